"""The options of a training run, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption, is_integer

LAYOUTS = ("safeailab", "speculators")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of training a drafter.  Raises: InvalidOption."""

    layout: str = "safeailab"
    """The names of the tensors: "safeailab", the common layout of published heads, or
    "speculators".
    """

    steps: int | None = None
    """Steps of the whole run; None: until `max_minutes`, or until the acceptance stays the same."""

    max_minutes: float | None = None
    """Minutes of training of the whole run, calls that were resumed included."""

    learning_rate: float = 5e-3
    """The highest learning rate: of Muon for matrices, and a tenth of it of AdamW for the head."""

    warmup_steps: int = 30
    """Steps in which the learning rate rises."""

    decay_share: float = 0.25
    """The share of the run in which the learning rate falls to zero, at the end."""

    batch_tokens: int = 4096
    """The largest number of tokens in a step; padding counts."""

    max_length: int = 1024
    """The largest number of tokens in a sequence: longer documents are cut into pieces, longer
    answers are cut off.
    """

    depth: int = 3
    """Draft steps of EAGLE-3's training-time test: the later ones run on the head's own output."""

    step_decay: float = 0.8
    """The weight of the loss of each draft step, relative to the one before."""

    draft_vocab_size: int | None = None
    """Rows of the head, the commonest tokens of the data; None: all up to 16,384, else 8,192."""

    intermediate_size: int | None = None
    """Width of the head's MLP; None: the target's."""

    num_draft_tokens: int = 3
    """K of the measurements, and the K that the checkpoint suggests."""

    held_out_one_in: int = 20
    """One in this many sequences is kept for measuring the acceptance."""

    eval_every: int = 200
    """Steps between measurements."""

    eval_prompts: int = 16
    """The largest number of held-out prompts in a measurement."""

    eval_new_tokens: int = 96
    """Tokens of each answer."""

    backend: str = "inductor"
    """The backend of the engines that answer prompts and measure: "eager" starts sooner, but is
    slower.
    """

    patience: int = 6
    """Measurements without a better acceptance after which the run ends."""

    save_every: int = 50
    """Steps between saved states; a killed run goes on from the last one."""

    dtype: str | None = None
    """The dtype of the target while training; None: float32 on the CPU, else as stored."""

    keep_states: bool = False
    """Keep the target's hidden states on disk, in bfloat16: the target then runs once a sequence,
    instead of once an epoch."""

    start_from: str | None = None
    """A checkpoint of the method whose weights the run begins with; None: new ones."""

    learn_prompts: bool = False
    """Learn from the tokens of the prompts too, by the target's probabilities there; without it,
    only from the answers.  For runs with little data.
    """

    compiled: bool = False
    """Run forward and backward through torch.compile: worth it for long runs."""

    mixed_precision: bool = False
    """Products of the drafter in bfloat16, forward, backward and in the optimizer; its weights stay
    float32.  Worth it where the processor multiplies bfloat16 (GPUs, CPUs with AVX512-BF16)."""

    seed: int = 0
    """The seed of the head's first weights and of the order of the data."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InvalidOption(f"layout must be one of {', '.join(LAYOUTS)}; got {self.layout!r}")
        if self.backend not in ("inductor", "eager"):
            raise InvalidOption(f"backend must be 'inductor' or 'eager'; got {self.backend!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _LEAST and value is not None:
                self._check(field.name, value, _LEAST[field.name])
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise InvalidOption(f"max_minutes must be above 0; got {self.max_minutes!r}")
        for name in ("learning_rate", "decay_share", "step_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidOption(f"{name} must be above 0, up to 1; got {getattr(self, name)!r}")

    @staticmethod
    def _check(name: str, value: Any, least: int) -> None:
        if not is_integer(value) or value < least:
            raise InvalidOption(f"{name} must be an integer of {least} or more; got {value!r}")

    def same_run(self) -> dict[str, Any]:
        """The options that a resumed run may not change: they decide its losses."""
        changeable = (
            "layout", "steps", "max_minutes", "eval_every", "eval_prompts", "eval_new_tokens",
            "backend", "patience", "save_every", "compiled", "num_draft_tokens", "decay_share",
            "dtype", "start_from",
        )  # fmt: skip
        given = dataclasses.asdict(self)
        return {name: value for name, value in given.items() if name not in changeable}


_LEAST = {
    "steps": 1, "warmup_steps": 1, "batch_tokens": 8, "max_length": 4, "depth": 1,
    "draft_vocab_size": 1, "intermediate_size": 1, "num_draft_tokens": 1, "held_out_one_in": 2,
    "eval_every": 1, "eval_prompts": 1, "eval_new_tokens": 2, "patience": 1, "save_every": 1,
}  # fmt: skip
