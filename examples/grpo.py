"""Reinforcement learning by GRPO: a model is rewarded for letters, and samples by its engine.

python examples/grpo.py [MODEL [SPEC [BACKEND [STEPS]]]]
The trainer's log-probabilities are those of the rollouts, bit for bit: their difference is 0.
"""

import sys
from pathlib import Path

import torch
import transformers

import compilespec
from compilespec import SamplingParams
from compilespec.demo import demo_directory
from compilespec.training import log_probs

PROMPTS = ["def main():\n", "import os\n", "x = [1, 2, 3]\n", "class A:\n"]
SAMPLES = 8  # of each prompt
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=24)


def reward(text: str) -> float:
    """The share of letters."""
    return sum(char.isalpha() for char in text) / max(len(text), 1)


def loss_of(rollouts, engine, model):
    """GRPO's loss of one prompt's samples, their mean reward, and the largest difference of
    log-probabilities."""
    rewards = torch.tensor([reward(one.output.text) for one in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    ids = [[*one.prompt_token_ids, *one.token_ids] for one in rollouts]
    loss, apart = torch.zeros(()), 0.0
    for one, advantage, values in zip(
        rollouts, advantages, log_probs(engine, ids, model=model), strict=True
    ):
        now = values[len(one.prompt_token_ids) - 1 :]
        then = torch.tensor(one.log_probs)
        apart = max(apart, (now.detach() - then).abs().max().item())
        loss = loss - (advantage * (now - then).exp()).mean() / len(rollouts)
    return loss, rewards.mean().item(), apart


def main(
    model: str = "demo", spec: str = "eagle3", backend: str = "inductor", steps: str = "10"
) -> None:
    path = demo_directory() if model == "demo" else Path(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    lm = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    head = path / spec if (path / spec).is_dir() else None
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-4, weight_decay=0.0)
    with compilespec.compile(
        lm, spec, draft=head, tokenizer=tokenizer, backend=backend, max_batch_size=32,
        max_seq_len=128, prompt_logprobs=True,
    ) as engine:  # fmt: skip
        for step in range(int(steps)):
            rollouts = engine.rollout(PROMPTS, SAMPLES, seeds=0, sampling=SAMPLING, step=step)
            found = [loss_of(samples, engine, lm) for samples in rollouts]
            lengths = [one.acceptance_length for samples in rollouts for one in samples]
            print(
                f"step {step}: reward {sum(one[1] for one in found) / len(found):.3f}, "
                f"log-probability difference {max(one[2] for one in found)}, "
                f"{sum(lengths) / len(lengths):.2f} tokens a verify step"
            )
            optimizer.zero_grad()
            (sum(one[0] for one in found) / len(found)).backward()
            optimizer.step()
            engine.update_weights(lm)


if __name__ == "__main__":
    main(*sys.argv[1:])
