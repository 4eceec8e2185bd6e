"""Drafters of the recycled kind: one head, run again on its own hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import DraftMismatch
from compilespec.methods.base import Drafter
from compilespec.methods.capture import trace_proposal
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, fresh, output_widths, trace_call
from compilespec.tracing.target_info import TargetInfo


class RecycledDrafter(Drafter):
    """A drafter that runs again on its own output hidden state.

    The engine traces three calls, at these shapes ([B, S] first pass in decode, [1, T] in prefill,
    [B, 1] steps):
      combine(aux_BSE)            -> hidden_BSD    true target features to drafter width
      forward(input_ids_BS, position_ids_BS, hidden_BSD) -> (head_input_BSD, recycled_BSD)
      propose(head_input_BD)      -> token_B       int32 argmax, mapped to target ids
    Attention inside goes through `torch.ops.compilespec.attention`.

    Optional, in the class that defines `propose`: logits(head_input_BD) -> [B, Vd], whose argmax
    `propose` maps, and `draft_ids`, int64 [Vd], their target ids (None: the same).  Drafts of
    sampled requests are then drawn with the target's own noise, and are accepted far more often.
    """

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The calls "combine", "forward" and "propose".  Raises: DraftMismatch, TraceError."""
        return capture_recycled(self, config, info)

    def combine(self, aux: Tensor) -> Tensor:
        raise NotImplementedError

    def propose(self, head_input: Tensor) -> Tensor:
        raise NotImplementedError


def capture_recycled(
    drafter: RecycledDrafter, config: ProgramConfig, info: TargetInfo
) -> dict[str, Traced]:
    """The calls of a recycled drafter, each captured once: "combine" and "forward" at
    [B, T, ..], "propose" on gathered rows.

    Raises: DraftMismatch when the recycled hidden state's width is not the one that the drafter
    takes.
    """
    shape, dynamic = EXAMPLE_SHAPE, (0, 1)

    def trace(name: str, call: Callable[..., Any], **arguments: Tensor) -> Traced:
        dims = {key: (value, dynamic) for key, value in arguments.items()}
        return trace_call(drafter, call, dims, name=f"draft.{name}", owner="draft")

    def combine(aux: Tensor) -> Any:
        return fresh((drafter.combine(aux),))

    def forward(input_ids: Tensor, position_ids: Tensor, hidden: Tensor) -> Any:
        return fresh(drafter(input_ids, position_ids, hidden))

    def floats(*size: int) -> Tensor:
        return torch.zeros(size, dtype=config.dtype, device=config.device)

    ids = torch.zeros(shape, dtype=torch.int32, device=config.device)
    traced = {
        "combine": trace(
            "combine", combine, aux=floats(*shape, len(drafter.aux_layers) * info.hidden_size)
        )
    }
    (hidden_width,) = output_widths(traced["combine"])
    traced["forward"] = trace(
        "forward",
        forward,
        input_ids=ids,
        position_ids=ids.clone(),
        hidden=floats(*shape, hidden_width),
    )
    head_width, recycled_width = output_widths(traced["forward"])
    if recycled_width != hidden_width:
        raise DraftMismatch(
            f"the drafter takes hidden states of width {hidden_width} and recycles "
            f"{recycled_width}; expected one width"
        )
    traced["propose"] = trace_proposal(drafter, config, "draft", head_width)
    return traced
