"""TRL's GRPOTrainer trains with an engine's rollouts."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec.errors import InvalidOption, MissingDependency, NotSupported
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.rollouts import derived_seed
from compilespec.training import TrlRollouts, log_probs
from tests.support.drafters import traced_info
from tests.support.models import VOCAB, even_target
from tests.support.toy_tokenizer import byte_level_tokenizer

# TRL's own words about itself
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are using 'rollout_f")
STEPS = 8


def _eagle3(model: Any) -> dict[str, Any]:
    head = random_head(traced_info(model), aux_layers=(0, 1, 2))
    return {"spec": "eagle3", "draft": head, "num_draft_tokens": 3}


SPECS: dict[str, Any] = {
    "none": lambda model: {},
    "ngram": lambda model: {"spec": "ngram", "num_draft_tokens": 3},
    "eagle3": _eagle3,
}


def tokenizer() -> Any:
    letters = [bytes([code]) for code in range(32, 32 + VOCAB - 3)]
    made = byte_level_tokenizer(["<pad>", "<bos>", "<eos>", *letters], eos="<eos>")
    made.pad_token = "<pad>"
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def compiled(model: Any, **options: Any) -> Engine:
    sizes = {"max_batch_size": 8, "max_seq_len": 64, "max_prefill_tokens": 64}
    return compilespec.compile(
        model, **{"backend": "eager", "prompt_logprobs": True, **sizes, **options}
    )


def share_of_even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(model: Any, rollouts: Any, directory: Path, peft_config: Any = None) -> Any:
    import datasets
    import trl

    args = trl.GRPOConfig(
        output_dir=str(directory), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1, max_steps=STEPS, per_device_train_batch_size=16,
        num_generations=8, max_completion_length=12, learning_rate=1e-2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer(),
        reward_funcs=share_of_even_ids,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["say so", "hello", "go on", "end"]}),
        rollout_func=rollouts,
        peft_config=peft_config,
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_trainer_learns_from_rollouts_whose_log_probabilities_are_its_own(
    spec: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="needs TRL: make test-trainers")
    model: Any = even_target(num_layers=2)
    before = [p.detach().clone() for p in model.parameters()]
    with compiled(model, **SPECS[spec](model)) as engine:
        rollouts = TrlRollouts(engine)
        apart: list[float] = []
        versions: list[int] = []

        def checked(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            found = rollouts(prompts, trainer)
            assert [one.why_not_exact for one in rollouts.last] == [None] * 16
            both = [
                p + c for p, c in zip(found["prompt_ids"], found["completion_ids"], strict=True)
            ]
            for own, its, prompt in zip(
                log_probs(engine, both, model=trainer.model),
                found["logprobs"],
                found["prompt_ids"],
                strict=True,
            ):
                difference = own.detach()[len(prompt) - 1 :] - torch.tensor(its)
                assert len(difference) == len(its) > 0
                apart.extend(difference.tolist())
            versions.append(engine.weights_version)
            assert set(found["weights_version"]) == {engine.weights_version}
            return found

        trainer = trainer_of(model, checked, tmp_path)
        trainer.train()
        assert len(apart) > 100 * STEPS
        assert set(apart) == {0.0}
        assert versions == list(range(1, STEPS + 1))
        rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
        assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4, rewards
    assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("with_peft", [False, True], ids=["whole", "lora"])
def test_a_trainer_learns_with_an_attached_model(with_peft: bool, tmp_path: Path) -> None:
    """Without a rollout_func TRL calls `model.generate`, which is the engine's then."""
    pytest.importorskip("trl", reason="needs TRL: make test-trainers")
    lora = None
    if with_peft:
        peft = pytest.importorskip("peft", reason="needs peft: make test-peft")
        lora = peft.LoraConfig(r=8, lora_alpha=64, target_modules="all-linear")
    model: Any = even_target(num_layers=2)
    compilespec.attach(model, "ngram", num_draft_tokens=3, max_seq_len=64, backend="eager")
    trainer = trainer_of(model, None, tmp_path, lora)
    torch.manual_seed(0)
    trainer.train()
    engine = compilespec.engine_of(model)
    assert engine.stats().num_emitted > 16 * (STEPS - 1)
    assert engine.weights_version == (0 if with_peft else STEPS - 1)
    rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.3
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    trained = trainer.model.eval()
    tokens = trained.generate(input_ids=torch.arange(3, 12)[None], **greedy)
    compilespec.detach(model)
    assert torch.equal(tokens, trained.generate(input_ids=torch.arange(3, 12)[None], **greedy))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with compiled(even_target(num_layers=2), spec="ngram", num_draft_tokens=2) as engine:
        yield engine


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A TRL of which only the version is read."""
    module: Any = types.ModuleType("trl")
    module.__version__ = "1.16.0"
    monkeypatch.setitem(sys.modules, "trl", module)
    return module


def trainer_like(engine: Engine, model: Any, **changes: Any) -> Any:
    """What the adapter reads of a trainer."""
    args = {
        "seed": 3, "max_completion_length": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    }  # fmt: skip
    args |= {key: changes.pop(key) for key in args.keys() & changes.keys()}
    given = {
        "model": model,
        "state": types.SimpleNamespace(global_step=0),
        "accelerator": types.SimpleNamespace(process_index=0, unwrap_model=lambda model: model),
        "args": types.SimpleNamespace(**args),
        "processing_class": tokenizer(),
        "eos_token_ids": [2, 7],
        "chat_template": None,
        "chat_template_kwargs": {},
    }
    return types.SimpleNamespace(**{**given, **changes})


def test_each_prompt_has_a_sample_and_equal_neighbours_a_seed(
    engine: Engine, installed: types.ModuleType
) -> None:
    rollouts = TrlRollouts(engine)
    trainer = trainer_like(engine, even_target(num_layers=2))
    version = engine.weights_version
    found = rollouts(["so", "so", "say", "say"], trainer)
    assert [len(ids) for ids in found["prompt_ids"]] == [2, 2, 3, 3]
    assert [one.seed for one in rollouts.last] == [derived_seed(3, 0, i) for i in (0, 0, 1, 1)]
    assert engine.weights_version == version + 1
    chats = [[{"role": "user", "content": text}] for text in ("so", "so", "say")]
    assert rollouts(chats, trainer)["prompt_ids"] == found["prompt_ids"][:3]
    assert [one.seed for one in rollouts.last] == [derived_seed(3, 1, i) for i in range(3)]
    assert engine.weights_version == version + 1  # nothing changed since
    trainer.state.global_step += 1
    ended = [ids[-1] for _ in range(9) for ids in rollouts(["so"] * 8, trainer)["completion_ids"]]
    assert engine.weights_version == version + 2
    assert {2, 7} <= set(ended)


def test_log_probabilities_are_left_out_where_the_trainer_means_others(
    engine: Engine, installed: types.ModuleType
) -> None:
    model = even_target(num_layers=2)
    rollouts = TrlRollouts(engine)
    assert rollouts(["so"], trainer_like(engine, model))["logprobs"] is not None
    for name, value in (("temperature", 0.7), ("top_k", 5), ("repetition_penalty", 1.2)):
        changed = trainer_like(engine, model, **{name: value})
        assert rollouts(["so"], changed)["logprobs"] is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vllm": ({"use_vllm": True}, "use_vllm of the trainer is not served"),
    "tools": ({"tools": [print]}, "tools of the trainer is not served"),
    "keywords": ({"generation_kwargs": {"num_beams": 2}}, r"\['num_beams'\] are not read"),
    "peft": (
        {"model": types.SimpleNamespace(peft_config={})},
        r"after compilespec\.attach\(model\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(
    engine: Engine, installed: types.ModuleType, name: str
) -> None:
    changes, reason = REFUSED[name]
    trainer = trainer_like(engine, **{"model": None, **changes})
    with pytest.raises(NotSupported, match=reason):
        TrlRollouts(engine)(["so"], trainer)


def test_a_trl_without_the_hook_is_refused(
    engine: Engine, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidOption, match=r"give it compile\(model\)"):
        TrlRollouts(even_target())  # type: ignore[arg-type]
    picture = [[{"role": "user", "content": [{"type": "image"}]}]]
    with pytest.raises(NotSupported, match="prompts with images"):
        TrlRollouts(engine)(picture, trainer_like(engine, even_target(num_layers=2)))
    installed.__version__ = "0.29.1"
    with pytest.raises(MissingDependency, match=r"TRL 0\.29\.1 does not ask a rollout_func"):
        TrlRollouts(engine)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingDependency, match="needs TRL"):
        TrlRollouts(engine)
