"""Capture a drafter's calls: each becomes one graph, at the sizes that the draft loop uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compilespec.errors import DraftMismatch
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, fresh, output_widths, trace_call
from compilespec.tracing.target_info import TargetInfo


def capture_windowed(drafter: Any, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
    """The calls of a windowed drafter: "forward.i" at [B, T, ..] and "propose.i" on gathered rows
    for each of the K draft steps.

    `drafter.steps[i]` is a module under the contract of `Drafter`: forward(input_ids, position_ids,
    hidden) -> (head_input, recycled), propose(head_input) -> token.  If there are fewer steps than
    K, they are used in turn, each use with its own cache.

    Raises: DraftMismatch when a step's recycled width is not the one that the next step takes.
    """
    width = len(drafter.aux_layers) * info.hidden_size
    traced: dict[str, Traced] = {}
    for step, module in enumerate(list(drafter.steps)[: config.num_draft_tokens]):
        forward = _trace_step(module, config, f"draft.{step}", width)
        head_width, recycled_width = output_widths(forward)
        if recycled_width != width:
            raise DraftMismatch(
                f"draft step {step} takes hidden states of width {width} and gives "
                f"{recycled_width}; expected one width"
            )
        traced[f"forward.{step}"] = forward
        traced[f"propose.{step}"] = trace_proposal(module, config, f"draft.{step}", head_width)
    for step in range(len(drafter.steps), config.num_draft_tokens):
        for call in ("forward", "propose"):
            traced[f"{call}.{step}"] = traced[f"{call}.{step % len(drafter.steps)}"]
    return traced


def _trace_step(module: Any, config: ProgramConfig, name: str, width: int) -> Traced:
    ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=config.device)
    hidden = torch.zeros(*EXAMPLE_SHAPE, width, dtype=config.dtype, device=config.device)

    def forward(input_ids: Tensor, position_ids: Tensor, hidden: Tensor) -> Any:
        return fresh(module(input_ids, position_ids, hidden))

    dims = {
        "input_ids": (ids, (0, 1)),
        "position_ids": (ids.clone(), (0, 1)),
        "hidden": (hidden, (0, 1)),
    }
    return trace_call(module, forward, dims, name=f"{name}.forward", owner=name)


def trace_proposal(module: Any, config: ProgramConfig, name: str, width: int) -> Traced:
    """Capture head_input_BD -> (token_B,).  If the module has `logits`, the call also returns them
    for draws, and the target id of each of them if their vocabulary is another one.
    """
    ids = getattr(module, "draft_ids", None)
    if ids is not None:
        module.register_buffer("coupled_ids", ids, persistent=False)

    def propose(head_input: Tensor) -> tuple[Tensor, ...]:
        token_B: Tensor = module.propose(head_input)
        return (token_B,)

    def propose_and_tell(head_input: Tensor) -> tuple[Tensor, ...]:
        logits_BV = module.logits(head_input)
        best_B = logits_BV.argmax(-1)
        if ids is None:
            return best_B.to(torch.int32), logits_BV.view_as(logits_BV)
        known_V = module.coupled_ids
        return known_V[best_B].to(torch.int32), logits_BV.view_as(logits_BV), known_V.view(-1)

    call = propose_and_tell if offers_logits(module) else propose
    head_input = torch.zeros(EXAMPLE_SHAPE[0], width, dtype=config.dtype, device=config.device)
    dims = {"head_input": (head_input, (0,))}
    return trace_call(module, call, dims, name=f"{name}.propose", owner=name)


def offers_logits(module: Any) -> bool:
    """True where `logits` belongs to the module's `propose`: one class defines both."""
    owner = next(kind for kind in type(module).__mro__ if "propose" in vars(kind))
    return "logits" in vars(owner)
