"""The result of verification: every pass on every case, and a report of them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.program import Phase, StepKey


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One wrong value."""

    value: str  # "output emitted_BS", "role slot", "buffer cache.target.0.key", "node argmax"
    text: str
    error: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One pass on one case."""

    key: StepKey
    pass_name: str
    case: str
    batch_size: int
    against: str  # "the graph before", "its reference", "the interpreted graph"
    numerics: str
    bound: float | None  # None: bit for bit
    num_values: int  # tensors compared
    error: float  # largest, as a part of a tensor's largest magnitude
    num_ties: int = 0  # argmaxes that rounding flipped, within the bound
    mismatches: tuple[Mismatch, ...] = ()
    skipped: str = ""  # the reason why nothing was compared

    @property
    def phase(self) -> Phase:
        return self.key.phase

    @property
    def ok(self) -> bool:
        return not self.mismatches and not self.skipped

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "key"}
        mismatches = [vars(mismatch) for mismatch in self.mismatches]
        own = {"mismatches": mismatches, "ok": self.ok}
        return {"phase": self.phase, "step": str(self.key), **values, **own}


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Every pass on every case; `ok` when all agree and none was skipped."""

    method: str
    dtype: torch.dtype
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def steps(self) -> tuple[StepKey, ...]:
        """The graphs that were checked, in the order of the checks."""
        return tuple(dict.fromkeys(check.key for check in self.checks))

    @property
    def failed(self) -> tuple[Check, ...]:
        """In the order of the pipeline; skipped checks included."""
        return tuple(check for check in self.checks if not check.ok)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """One row a pass and graph: graph, pass, compared with, calls, values, largest error,
        bound, result.
        """
        groups: dict[tuple[StepKey, str], list[Check]] = {}
        for check in self.checks:
            groups.setdefault((check.key, check.pass_name), []).append(check)
        for (key, name), checks in groups.items():
            first = next((check for check in checks if not check.ok), checks[0])
            result = "equal" if first.bound is None else "within the bound"
            if first.skipped:
                result = f"NOT CHECKED: {first.skipped}"
            elif first.mismatches:
                worst = first.mismatches[0]
                result = f"PARTS at {first.case}: {worst.value}: {worst.text}"
            ties = sum(check.num_ties for check in checks)
            yield (
                str(key), name, first.against, str(len(checks)),
                str(sum(check.num_values for check in checks)),
                f"{max(check.error for check in checks):.1e}",
                "bitwise" if first.bound is None else f"{first.bound:.0e}",
                result + (f", {ties} near ties" if ties else ""),
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "method": self.method,
            "dtype": str(self.dtype).removeprefix("torch."),
            "checks": [check.to_dict() for check in self.checks],
        }

    def __str__(self) -> str:
        header = ("graph", "pass", "against", "calls", "values", "error", "bound", "result")
        rows = [header, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        num_failed = len(self.failed)
        verdict = "all agree" if self.ok else f"{num_failed} of {len(self.checks)} checks failed"
        return "\n".join([*lines, f"verify: {self.method}, {self.dtype}: {verdict}"])
