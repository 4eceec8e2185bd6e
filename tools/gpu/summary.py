"""What the parts of a check show together: shares of the bandwidth, ratios, and goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.gpu.measure import PEERS, PLAIN, VERIFY

Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Goal:
    name: str
    bound: float
    is_most: bool
    """Whether the bound is the largest good value, and not the smallest."""
    measured: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `is_met` of what was not measured is None."""
        is_met = None
        if self.measured is not None:
            is_met = (self.measured <= self.bound) == self.is_most or self.measured == self.bound
        said = f"at {'most' if self.is_most else 'least'} {self.bound:g}"
        return {"goal": self.name, "bound": said, "measured": self.measured, "is_met": is_met}


def part_name(model: str, way: str) -> str:
    return f"{model}, {way}"


def goals(parts: Parts, model: str) -> list[Goal]:
    """What plain decoding and a verify step of one request should reach."""
    copied = value_of(parts.get("copy"), "copy_gb_per_s")
    plain = first_step(parts.get(part_name(model, PLAIN)))
    verify = first_step(parts.get(part_name(model, VERIFY)))
    share, ratio = share_of_copy(plain, copied), None
    if plain and verify:
        ratio = verify["device_ms"]["p50"] / plain["device_ms"]["p50"]
    idle = plain["idle_share"] if plain else None
    return [
        Goal(name=f"{model}, plain: share of the copy bandwidth", bound=0.85, is_most=False,
             measured=share),
        Goal(name=f"{model}: a verify step over a plain one", bound=1.25, is_most=True,
             measured=ratio),
        Goal(name=f"{model}, plain: share of the time without work", bound=0.02, is_most=True,
             measured=idle),
    ]  # fmt: skip


def ratios(parts: Parts, model: str) -> dict[str, dict[str, float]]:
    """By part of a model: its tokens per second over those of each peer, where both ran."""
    theirs = {peer: rate_of(parts.get(part_name(model, peer))) for peer in PEERS}
    found: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        rate, is_ours = rate_of(part), name.startswith(part_name(model, ""))
        if rate is not None and is_ours and name.removeprefix(part_name(model, "")) not in PEERS:
            found[name] = {peer: rate / its for peer, its in theirs.items() if its is not None}
    return found


def share_of_copy(step: Mapping[str, Any] | None, copied: float | None) -> float | None:
    """What part of the bandwidth of a copy a step's weights come at."""
    if not step or copied is None or step["weight_gb"] is None:
        return None
    return float(step["weight_gb"] / (step["step_ms"]["p50"] / 1e3) / copied)


def first_step(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The record of a part's smallest batch; there is one even if the part failed later."""
    return next((record for record in _records(part) if "batch" in record), None)


def rate_of(part: Mapping[str, Any] | None) -> float | None:
    rate = value_of(part, "tokens_per_s")
    return None if rate is None else float(rate["p50"])


def value_of(part: Mapping[str, Any] | None, name: str) -> Any:
    return next((record[name] for record in _records(part) if name in record), None)


def _records(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    yield from part["records"] if part is not None else ()
