"""The modes of `cudagraphs=`: which phases replay graphs, and of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.lowering import Units
from compilespec.ops.device import traits_of
from compilespec.program import Phase

GraphKind = Literal["full", "piecewise"]

# A phase that is not named runs without graphs.  Source: requirement A7.
MODES: Mapping[str, Mapping[Phase, GraphKind]] = {
    "full_and_piecewise": {"decode": "full", "prefill": "piecewise"},
    "full": {"decode": "full", "prefill": "full"},
    "full_decode_only": {"decode": "full"},
    "piecewise": {"decode": "piecewise", "prefill": "piecewise"},
    "none": {},
}
MODE_NAMES = ("auto", *MODES)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """The options of `cudagraphs=`, in the place of a mode's name.  Raises: InvalidOption.

    Raises: InvalidOption.
    """

    mode: str = "auto"
    """"auto": full_and_piecewise on CUDA, none elsewhere.  Named outright on the CPU, a mode runs
    an emulation for tests: the captured call is executed again over the same buffers."""

    startup_seconds: float = 30.0
    """Seconds that capturing at start may take.  The other buckets are captured when a batch first
    needs them; with 0, all of them are.
    """

    max_seconds: float = 120.0
    """Seconds that capturing may take in total, at start and later."""

    max_mib: float | None = None
    """MiB of all graphs together.  None: a quarter of the memory that is free when capturing
    begins.
    """

    def __post_init__(self) -> None:
        if self.mode not in MODE_NAMES:
            raise not_one_of("cudagraphs", self.mode, MODE_NAMES)
        for name in ("startup_seconds", "max_seconds", "max_mib"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and (not is_number or value < 0):
                raise InvalidOption(f"cudagraphs: {name} must be a number >= 0; got {value!r}")

    def mode_on(self, device: torch.device) -> str:
        """The mode that "auto" stands for on a device."""
        if self.mode != "auto":
            return self.mode
        return "full_and_piecewise" if traits_of(device).has_launch_costs else "none"

    def kinds_on(self, device: torch.device) -> Mapping[Phase, GraphKind]:
        """The kind of graph that each phase replays; empty where none does."""
        return MODES[self.mode_on(device)]


NO_OPTIONS = GraphOptions()


def units_for(kinds: Mapping[Phase, GraphKind]) -> dict[Phase, Units]:
    """The unit to compile for each kind of graph: pieces if pieces are captured."""
    return {phase: "pieces" for phase, kind in kinds.items() if kind == "piecewise"}


def read_graph_options(given: Any) -> GraphOptions:
    """Read `cudagraphs=`.  Raises: InvalidOption."""
    return given if isinstance(given, GraphOptions) else GraphOptions(mode=given)
