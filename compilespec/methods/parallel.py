"""Drafters of the parallel kind: all K drafts of one pass, whose later rows hold a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compilespec.methods.recycled import RecycledDrafter, capture_recycled
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, fresh, trace_call
from compilespec.tracing.target_info import TargetInfo


class ParallelDrafter(RecycledDrafter):
    """A `RecycledDrafter` that need not wait for its own drafts.

    The rows of drafts 2 to K stand for tokens and hidden states that are not known yet.  A further
    call, at [B, M], gives what `forward` takes there:
      mask(position_ids_BM)       -> (input_ids_BM, hidden_BMD)
    What `forward` recycles is not read.
    """

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The calls of a recycled drafter, and "mask".  Raises: DraftMismatch, TraceError."""
        traced = capture_recycled(self, config, info)
        positions = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=config.device)

        def mask(position_ids: Tensor) -> Any:
            return fresh(self.mask(position_ids))

        arguments = {"position_ids": (positions, (0, 1))}
        traced["mask"] = trace_call(self, mask, arguments, name="draft.mask", owner="draft")
        return traced

    def mask(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError
