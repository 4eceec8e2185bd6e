"""Makes the drafter's input: the hidden state at position t paired with the token at t + 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_input, emit, find_role, output_node
from compilespec.program import InputSpec


def shift_hidden_states(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Make the roles `draft_ids` and `aux` ([B, S] or [1, T]; [.., A*D]).  Numerics: exact.  Torch
    IR.

    Decode: row j holds the hidden state of position seq_len + j, and target token j has position
    seq_len + j + 1: the rows already pair up, and `target` holds no PAD, so the rejected tail is
    harmless.  Prefill: ids move left by one; a chunk that does not end its prompt is followed by
    the true next token (E2, H-4).
    """
    before = output_node(gm)
    target = find_role(gm, "target")
    taps = [find_role(gm, f"aux.{index}") for index in range(len(ctx.aux_layers))]
    if ctx.phase == "decode":
        ids = emit(gm, lambda target_BS: target_BS.clamp(min=0), target, before=before)
    else:
        following = add_input(gm, ctx, InputSpec(name="next_T", kind="batch"))
        ids = emit(gm, shift_prompt, following, target, find_role(gm, "owner_T"), before=before)
    ids.meta["role"] = "draft_ids"
    aux = emit(gm, lambda *parts: torch.cat(parts, -1), *taps, before=before)
    aux.meta["role"] = "aux"
    return 1


def pairs_hidden_states(ctx: PassContext) -> bool:
    """Whether the drafter reads rows of (hidden state, next token); some kinds read one row, or
    hidden states alone.
    """
    reads_one_row = ctx.capabilities.kind in ("direct", "heads", "shared_kv")
    reads_no_tokens = ctx.capabilities.kind == "block"
    return ctx.capabilities.reads_hidden_states and not (reads_one_row or reads_no_tokens)


def shift_prompt(next_T: Any, target_R1: Any, owner_T: Any) -> Any:
    """next_T: the prompt token after each token; -1 at the end of the prompt, which the sampled
    token follows.
    """
    sampled_T = target_R1.squeeze(1)[owner_T.long()]
    return torch.where(next_T < 0, sampled_T, next_T).clamp(min=0).unsqueeze(0)
