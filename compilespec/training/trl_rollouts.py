"""Rollouts of an engine for the GRPOTrainer of TRL."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from compilespec.errors import InvalidOption, MissingDependency, NotSupported
from compilespec.runtime.engine import Engine
from compilespec.runtime.rollouts import Rollout
from compilespec.runtime.sampling_params import SamplingParams

OLDEST = 1  # TRL 0.x asks a rollout_func with vLLM alone, and leaves it out silently otherwise
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class TrlRollouts:
    """The `rollout_func` of a GRPOTrainer: `GRPOTrainer(model, rollout_func=TrlRollouts(engine))`.

    The engine is compiled with the model before the trainer is made.  It takes over the trainer's
    weights after every step of its optimizer, and samples as its GRPOConfig says.  Each sample
    hands `acceptance_length` and `weights_version` to the reward functions.

    Args:
        engine: of the model that is trained.
    Raises: MissingDependency (TRL is missing, or too old), InvalidOption (not an engine).
    """

    def __init__(self, engine: Engine) -> None:
        _check_trl()
        if not isinstance(engine, Engine):
            raise InvalidOption(
                f"TrlRollouts: expected an engine, got {type(engine).__name__}; give it "
                "compile(model)"
            )
        self.engine = engine
        self.last: list[Rollout] = []
        """The samples of the last call, in the trainer's order."""
        self._num_calls = 0
        self._weights_of: tuple[Any, int] | None = None  # the trainer and its step

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """A sample for each prompt; those of equal neighbours share a seed.

        The seeds are made of the trainer's, the number of this call and of its process.
        Raises: NotSupported (names an option of the trainer), any error of a request.
        """
        _check_trainer(trainer)
        self._take_weights(trainer)
        sampling = _sampling(trainer)
        each, n = _grouped(prompts)
        seed = trainer.args.seed + trainer.accelerator.process_index
        found = self.engine.rollout(
            _encoded(each, trainer), n, seed, sampling, step=self._num_calls
        )
        self._num_calls += 1
        self.last = [one for samples in found for one in samples]
        is_plain = all(getattr(sampling, name) == v for name, v in _PLAIN.items())
        return {
            "prompt_ids": [one.prompt_token_ids for one in self.last],
            "completion_ids": [one.token_ids for one in self.last],
            # the trainer's are those of the distribution that is drawn from
            "logprobs": [list(one.log_probs) for one in self.last] if is_plain else None,
            "acceptance_length": [one.acceptance_length for one in self.last],
            "weights_version": [one.weights_version for one in self.last],
        }

    def _take_weights(self, trainer: Any) -> None:
        now = (trainer, trainer.state.global_step)
        if self._weights_of != now:
            self.engine.update_weights(trainer.accelerator.unwrap_model(trainer.model))
            self._weights_of = now


def _check_trl() -> None:
    try:
        import trl
    except ImportError as error:
        raise MissingDependency("TrlRollouts needs TRL: pip install 'trl>=1'") from error
    if int(trl.__version__.split(".")[0]) < OLDEST:
        raise MissingDependency(
            f"TrlRollouts: TRL {trl.__version__} does not ask a rollout_func without vLLM; "
            "pip install 'trl>=1'"
        )


def _check_trainer(trainer: Any) -> None:
    refused = {
        "use_vllm": "rollouts come from the engine; leave it out",
        "tools": "turns after a tool's answer are not sampled by the engine; leave them out",
        "environment_factories": "its turns are not sampled by the engine; leave it out",
    }
    for name, reason in refused.items():
        if getattr(trainer, name, None):
            raise NotSupported(f"TrlRollouts: {name} of the trainer is not served: {reason}")
    if unread := trainer.args.generation_kwargs:
        raise NotSupported(
            f"TrlRollouts: generation_kwargs {sorted(unread)} are not read; the fields of "
            "GRPOConfig are"
        )
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise NotSupported(
            "TrlRollouts: the adapters of a PEFT model are not read; leave rollout_func= out, and "
            "give GRPOTrainer a model after compilespec.attach(model)"
        )


def _grouped(prompts: Sequence[Any]) -> tuple[list[Any], int]:
    """The prompts without repetitions, and how often each stands there; else all of them, and 1."""
    groups = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
    if len({size for _, size in groups}) != 1:
        return list(prompts), 1
    return [prompt for prompt, _ in groups], groups[0][1]


def _sampling(trainer: Any) -> SamplingParams:
    args = trainer.args
    return SamplingParams(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        ignore_eos=True,
        stop_token_ids=tuple(trainer.eos_token_ids),
    )


def _encoded(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """The prompts as the trainer's own tokenizer writes them."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    contents = [message["content"] for prompt in prompts for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise NotSupported("TrlRollouts: prompts with images are not served; leave them out")
    chats = tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in chats["input_ids"]]
