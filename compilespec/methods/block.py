"""Drafters of the block kind: masked rows that see each other, over what the target has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capture import trace_proposal
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, fresh, output_widths, trace_call
from compilespec.tracing.target_info import TargetInfo


class BlockDrafter(Drafter):
    """A drafter whose only keys to stay are made of the target's hidden states.

    The engine traces four calls; W is the block's width, N the rows of it that propose:
      context(aux_BSE, position_ids_BS) -> key, value, each [B, Nkv, S, H], of layer 0, 1, ...
      block(token_B, position_B)        -> (input_ids_BW, position_ids_BW) and, of layer 0, 1, ...,
                                           (first_BW, path_BWW), all int32: see `paged_attention`
      forward(input_ids_BW, position_ids_BW) -> head_input_BND
      propose(head_input_BD)            -> token_B       int32 argmax, mapped to target ids
    `block` is given the newest token and its position; the context holds the positions before it.
    Attention inside `forward` goes through `torch.ops.compilespec.attention`, without a window:
    what its rows see of the context and of each other is what `block` says.

    `num_proposing_rows` is N: K may be that at most.  Optional `logits` and `draft_ids`: as for a
    `RecycledDrafter`.
    """

    num_proposing_rows: int
    num_layers: int

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_proposing_rows

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The four calls.  Raises: InvalidOption where K is more than the block has rows for."""
        if config.num_draft_tokens > self.num_proposing_rows:
            raise InvalidOption(
                f"num_draft_tokens={config.num_draft_tokens}: the drafter's block proposes "
                f"{self.num_proposing_rows} tokens (block_size in its config.json); give at most "
                f"{self.num_proposing_rows}"
            )
        return self.capture_calls(config, info)

    def capture_calls(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        return capture_block(self, config, info)

    def context(self, aux: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def block(self, token: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def propose(self, head_input: Tensor) -> Tensor:
        raise NotImplementedError


def capture_block(
    drafter: BlockDrafter, config: ProgramConfig, info: TargetInfo
) -> dict[str, Traced]:
    """The calls of a block drafter, each captured once, with B and S symbolic."""
    device = config.device

    def trace(name: str, call: Callable[..., Any], **arguments: Tensor) -> Traced:
        dims = {key: (x, (0, 1) if x.dim() > 1 else (0,)) for key, x in arguments.items()}
        return trace_call(drafter, call, dims, name=f"draft.{name}", owner="draft")

    def context(aux: Tensor, position_ids: Tensor) -> Any:
        return fresh(drafter.context(aux, position_ids))

    def block(token: Tensor, position: Tensor) -> Any:
        return fresh(drafter.block(token, position))

    ids_BS = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=device)
    ids_B = torch.zeros(EXAMPLE_SHAPE[0], dtype=torch.int32, device=device)
    width = len(drafter.aux_layers) * info.hidden_size
    aux = torch.zeros(*EXAMPLE_SHAPE, width, dtype=config.dtype, device=device)
    traced = {
        "context": trace("context", context, aux=aux, position_ids=ids_BS),
        "block": trace("block", block, token=ids_B, position=ids_B.clone()),
    }
    (block_width, *_) = output_widths(traced["block"])
    traced["forward"] = _trace_forward(drafter, block_width, config)
    (head_width, *_) = output_widths(traced["forward"])
    traced["propose"] = trace_proposal(drafter, config, "draft", head_width)
    return traced


def _trace_forward(drafter: BlockDrafter, width: int, config: ProgramConfig) -> Traced:
    def forward(input_ids: Tensor, position_ids: Tensor) -> Any:
        return fresh((drafter(input_ids, position_ids),))

    ids_BW = torch.zeros(EXAMPLE_SHAPE[0], width, dtype=torch.int32, device=config.device)
    rows = {"input_ids": (ids_BW, (0,)), "position_ids": (ids_BW.clone(), (0,))}
    return trace_call(drafter, forward, rows, name="draft.forward", owner="draft")


def capture_turns(drafter: Any, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
    """The calls of a block drafter whose drafts are chosen in turn: those of `capture_block`, but

    forward(...)                               -> head_input_BWD of all rows
    state(head_input_BWD, token_B)             -> head_input_BND, state_BR before the first row
    base(head_input_ND)                        -> logits_NV of the rows, without their bias
    follow(head_input_BD, token_B, state_BR)   -> features_BR, state_BR; of the token before
    propose(base_BV, features_BR)              -> as ever: token_B, logits_BV, ids_V
    """
    traced = capture_block(drafter, config, info)
    device, batch = config.device, EXAMPLE_SHAPE[0]
    (block_width, *_), (head_width,) = (output_widths(traced[c]) for c in ("block", "forward"))
    vocab, rank = output_widths(traced["propose"])[1], drafter.config.markov_rank
    ids = drafter.draft_ids
    if ids is not None:
        drafter.register_buffer("coupled_ids", ids, persistent=False)

    def floats(*size: int) -> Tensor:
        return torch.zeros(batch, *size, dtype=config.dtype, device=device)

    def trace(name: str, call: Callable[..., Any], **arguments: Tensor) -> None:
        dims = {key: (x, (0,)) for key, x in arguments.items()}
        traced[name] = trace_call(drafter, call, dims, name=f"draft.{name}", owner="draft")

    def forward(input_ids: Tensor, position_ids: Tensor) -> Any:
        return fresh((drafter.rows(input_ids, position_ids),))

    def state(head_input: Tensor, token: Tensor) -> Any:
        return fresh((drafter.proposing(head_input), drafter.state(head_input, token)))

    def base(head_input: Tensor) -> Any:
        return fresh((drafter.logits(head_input),))

    def follow(head_input: Tensor, token: Tensor, state: Tensor) -> Any:
        return fresh(drafter.follow(head_input, token, state))

    def propose(base: Tensor, features: Tensor) -> Any:
        logits_BV = drafter.biased(base, features)
        best_B = logits_BV.argmax(-1)
        if ids is None:
            return best_B.to(torch.int32), logits_BV.view_as(logits_BV)
        known_V = drafter.coupled_ids
        return known_V[best_B].to(torch.int32), logits_BV.view_as(logits_BV), known_V.view(-1)

    ids_B = torch.zeros(batch, dtype=torch.int32, device=device)
    ids_BW = torch.zeros(batch, block_width, dtype=torch.int32, device=device)
    trace("forward", forward, input_ids=ids_BW, position_ids=ids_BW.clone())
    trace("state", state, head_input=floats(block_width, head_width), token=ids_B)
    trace("base", base, head_input=floats(head_width))
    trace("follow", follow, head_input=floats(head_width), token=ids_B.clone(), state=floats(rank))
    trace("propose", propose, base=floats(vocab), features=floats(rank))
    return traced


def capture_sureness(drafter: Any, config: ProgramConfig, head_width: int) -> Traced:
    """sure(head_input_BD, token_B) -> logit_B: how probably the draft of a row will be accepted, by
    a head that is trained to say so, given the token before it.
    """
    batch, device = EXAMPLE_SHAPE[0], config.device

    def sure(head_input: Tensor, token: Tensor) -> Any:
        return fresh((drafter.confidence(head_input, token),))

    rows = {
        "head_input": (torch.zeros(batch, head_width, dtype=config.dtype, device=device), (0,)),
        "token": (torch.zeros(batch, dtype=torch.int32, device=device), (0,)),
    }
    return trace_call(drafter, sure, rows, name="draft.sure", owner="draft")
