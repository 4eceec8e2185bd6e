"""The required speeds: ratios between ways of one run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EAGER = "transformers eager"
STATIC = "transformers static compiled"
LOOKUP = "transformers prompt lookup"
PLAIN = "compilespec none"
EAGLE3 = "compilespec eagle3"  # the best K that was run
LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`way` must be at least `ratio` times as fast as the fastest of `against`, at every batch."""

    way: str
    against: tuple[str, ...]
    ratio: float
    required: bool = True
    """False for a goal, which is printed but does not fail the run if it is missed."""


GATES = (
    Gate(way=PLAIN, against=(EAGER,), ratio=1.5),
    Gate(way=EAGLE3, against=(EAGER,), ratio=2.5),
    Gate(way=EAGLE3, against=(EAGER, STATIC, LOOKUP), ratio=1.0),
    Gate(way=EAGLE3, against=(PLAIN,), ratio=1.1),
    Gate(way=EAGLE3, against=(EAGER, STATIC, LOOKUP), ratio=1.5, required=False),
    Gate(way=EAGLE3, against=(LLAMA_CPP,), ratio=1.0, required=False),
)

FIRST_TOKEN_LIMIT_S = {"cold": 180.0, "warm": 15.0}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One gate at one batch size."""

    gate: Gate
    batch: int
    way: str
    against: str
    ratio: float

    @property
    def passed(self) -> bool:
        return self.ratio >= self.gate.ratio

    @property
    def failed(self) -> bool:
        return self.gate.required and not self.passed


def judge(
    speeds: Mapping[str, float], batch: int, gates: tuple[Gate, ...] = GATES
) -> list[Verdict]:
    """Verdicts for the ways that ran; a gate has none if one of its sides did not run.

    Args:
        speeds: tokens/s by the name of the way.  "compilespec eagle3 K=3" counts for the gate's
            "compilespec eagle3"; the fastest of several counts.
    """
    verdicts = []
    for gate in gates:
        ours = _fastest(speeds, (gate.way,))
        theirs = _fastest(speeds, gate.against)
        if ours is None or theirs is None:
            continue
        ratio = speeds[ours] / speeds[theirs]
        verdicts.append(Verdict(gate=gate, batch=batch, way=ours, against=theirs, ratio=ratio))
    return verdicts


def missing(speeds: Mapping[str, float], gates: tuple[Gate, ...] = GATES) -> list[Gate]:
    """Required gates that could not be judged because a side did not run."""
    return [
        gate
        for gate in gates
        if gate.required
        and (not _fastest(speeds, (gate.way,)) or not _fastest(speeds, gate.against))
    ]


def _fastest(speeds: Mapping[str, float], names: tuple[str, ...]) -> str | None:
    matching = [
        way for way in speeds if any(way == name or way.startswith(name + " ") for name in names)
    ]
    return max(matching, key=lambda way: speeds[way], default=None)
