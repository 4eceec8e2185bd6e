"""Other readings of a drafter, tried over the same texts: does one foresee the answers better?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.inspect.why.reading import DraftReader, Guesses, TargetSaid
from compilespec.inspect.why.records import CauseName
from compilespec.inspect.why.texts import Text
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.parts.layers import RMSNorm

LEAST_GAIN = 0.05  # nats a token, for a trial to count as better
CHANCE = 0.03  # of drafts that are right, by which a better reading may fall behind
LEAST_SCORE = 3.0  # standard errors: one healthy trial of 700 is taken for better by chance
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm", "input_norm",
         "fc_norm")  # fmt: skip

Guess = Callable[[Text, TargetSaid], Guesses]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherReading:
    """One other reading."""

    cause: CauseName
    what: str
    """The reading in words; it follows "with"."""
    guess: Guess
    depth: int = 1
    """The draft of a step that it can change."""


@dataclasses.dataclass(kw_only=True)
class Tried:
    """A trial over all texts, token by token next to the reading as it is."""

    trial: OtherReading
    gains: list[Tensor] = dataclasses.field(default_factory=list)
    right: list[Tensor] = dataclasses.field(default_factory=list)
    own_right: list[Tensor] = dataclasses.field(default_factory=list)
    guesses: list[Guesses] = dataclasses.field(default_factory=list)

    def add(self, own: Guesses, other: Guesses) -> None:
        self.guesses.append(other)
        self.right.append(other.right_G.float())
        self.own_right.append(own.right_G.float())
        self.gains.append(own.cost_G - other.cost_G)

    @property
    def gain(self) -> float:
        """Mean nats a token; of a map of ids, which changes what is known, of right drafts."""
        return float(self._gains().mean())

    @property
    def is_better(self) -> bool:
        """True where it foresees the answers better, and not by chance."""
        gains = self._gains()
        if len(gains) < 2:
            return False
        error = float(gains.std()) / math.sqrt(len(gains))
        own, other = self._rights()
        return other > own - CHANCE and self.gain > max(LEAST_GAIN, LEAST_SCORE * error)

    def _rights(self) -> tuple[float, float]:
        """The shares of drafts that are right, as it is and in the trial."""
        own, other = (float(torch.cat(one).mean()) for one in (self.own_right, self.right))
        return own, other

    def _gains(self) -> Tensor:
        if self.trial.cause == "draft_ids":
            return torch.cat(self.right) - torch.cat(self.own_right)
        return torch.cat(self.gains)

    def describe(self) -> str:
        """Its figures in words."""
        own, other = self._rights()
        which = {1: "first", 2: "second"}[self.trial.depth]
        return (
            f"with {self.trial.what} {other:.0%} of {which} drafts would be right, not {own:.0%} "
            f"({self.gain:+.2f} {'a draft' if self.trial.cause == 'draft_ids' else 'nats a token'})"
        )


def trials_of(reader: DraftReader, num_layers: int) -> list[OtherReading]:
    """The trials that the drafter allows."""
    drafter = reader.drafter
    if not hasattr(drafter, "combine"):
        return []
    trials = [*_taps(reader, num_layers), *_norms(reader)]
    ids = getattr(drafter, "draft_ids", None)
    if ids is not None and bool((ids.diff() <= 0).any()):
        trials.append(
            OtherReading(
                cause="draft_ids",
                what="its ids in ascending order, as published heads have them,",
                guess=lambda text, said: reader.guess(
                    text.tokens, text.start, said, draft_ids=ids.sort().values
                ),
            )
        )
    return trials


def _taps(reader: DraftReader, num_layers: int) -> Iterator[OtherReading]:
    own = tuple(reader.drafter.aux_layers)

    def trial(layers: Sequence[int], what: str) -> OtherReading:
        return OtherReading(
            cause="tap_layers",
            what=f"hs{list(layers)} ({what}) instead of hs{list(own)}",
            guess=lambda text, said: reader.guess(text.tokens, text.start, said, aux_layers=layers),
        )

    if own in ((FINAL_NORM,), (num_layers,)):
        other = (num_layers if own == (FINAL_NORM,) else FINAL_NORM,)
        yield trial(other, "before the last norm" if own == (FINAL_NORM,) else "after it")
        return
    tried = {own}
    usual = (2, num_layers // 2, num_layers - 3)
    for layers, what in (
        (tuple(k + 1 for k in own), "the ids read as outputs of layers"),
        (tuple(k - 1 for k in own), "the ids read as indices of hidden states"),
        (usual, "the usual ones"),
        (tuple(k + 1 for k in usual), "the outputs of the usual ones"),
        (tuple(k - 1 for k in usual), "the inputs of the usual ones"),
    ):
        fits = len(layers) == len(own) and min(layers) >= 0 and max(layers) <= num_layers
        if layers not in tried and fits:
            tried.add(layers)
            yield trial(layers, what)


def _norms(reader: DraftReader) -> Iterator[OtherReading]:
    drafter = reader.drafter
    for path, module in drafter.named_modules():
        name = path.rpartition(".")[2] or type(module).__name__
        if hasattr(module, "norm_before_residual"):
            flag = not module.norm_before_residual
            yield _patched(
                reader, module, f"norm_before_residual={flag}", norm_before_residual=flag
            )
        for attribute in NORMS:
            if isinstance(getattr(module, attribute, None), nn.Identity):
                norm = _plain_norm(drafter, drafter.config.hidden_size)
                where = f"a norm for {name}.{attribute}, which is none now,"
                values: dict[str, Any] = {attribute: norm}
                yield _patched(reader, module, where, **values)
    config: Any = getattr(drafter, "config", None)
    if hasattr(config, "norm_output"):
        other = dataclasses.replace(config, norm_output=not config.norm_output)
        what = f"norm_output={other.norm_output}"
        yield _patched(reader, drafter, what, depth=2, config=other)
    if getattr(drafter, "input_norm", 0) is None and getattr(drafter, "fc_norm", 0) is None:
        width, count = config.target_hidden_size, len(drafter.aux_layers)
        whole = _plain_norm(drafter, count * width)
        parts = nn.ModuleList(_plain_norm(drafter, width) for _ in range(count))
        yield _patched(reader, drafter, "norm_before_fc=True", input_norm=whole)
        yield _patched(reader, drafter, "fc_norm=True", fc_norm=parts)


def _plain_norm(drafter: Any, width: int) -> RMSNorm:
    return RMSNorm(width, drafter.config.rms_norm_eps).to(next(drafter.parameters()))


def _patched(
    reader: DraftReader, module: nn.Module, what: str, *, depth: int = 1, **values: Any
) -> OtherReading:
    def guess(text: Text, said: TargetSaid) -> Guesses:
        with _set(module, values):
            return reader.guess(text.tokens, text.start, said, depth=depth)

    return OtherReading(cause="norm", what=what, guess=guess, depth=depth)


@contextlib.contextmanager
def _set(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def unloaded_norms(drafter: Any) -> list[str]:
    """Norms whose weights are all 1, which no training leaves, where others are not."""
    weights = {
        path: module.weight
        for path, module in drafter.named_modules()
        if path.rpartition(".")[2].endswith("norm") and isinstance(module, RMSNorm)
    }
    ones = [path for path, weight in weights.items() if bool((weight == 1).all())]
    return ones if len(ones) < len(weights) else []


def learned_rows(own: Sequence[Guesses], texts: Sequence[Text]) -> tuple[float, float]:
    """The share of first drafts that are right, and that which would be if each row of the head
    meant the token that it foretold most often in the other texts (of one text: in the other half).
    """
    pairs = [
        list(zip(one.row_G.tolist(), text.tokens[one.first :], strict=True))
        for one, text in zip(own, texts, strict=True)
    ]
    if len(pairs) == 1:
        pairs = [pairs[0][::2], pairs[0][1::2]]
    seen = [Counter(part) for part in pairs]
    num_right = 0
    for number, part in enumerate(pairs):
        meant: dict[int, tuple[int, int]] = {}
        others = (one for other, one in enumerate(seen) if other != number)
        for (row, token), times in sum(others, Counter[tuple[int, int]]()).items():
            meant[row] = max(meant.get(row, (0, -1)), (times, token))
        num_right += sum(meant.get(row, (0, -1))[1] == token for row, token in part)
    right = torch.cat([one.right_G for one in own]).float()
    return float(right.mean()), num_right / max(1, sum(map(len, pairs)))
