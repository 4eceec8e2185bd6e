"""Makes the drafter's input: the hidden state at position t paired with the token at t + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice


def shift_hidden_states(step: Splice) -> int:
    """Make the roles `draft_ids` and `aux` ([B, S] or [1, T]; [.., A*D]).  Numerics: exact.  Torch
    IR.

    Decode: row j holds the hidden state of position seq_len + j, and target token j has position
    seq_len + j + 1: the rows already pair up, and `target` holds no PAD, so the rejected tail is
    harmless.  Prefill: ids move left by one; a chunk that does not end its prompt is followed by
    the true next token (E2, H-4).
    """
    roles = step.roles
    if step.is_decode:
        roles.draft_ids = roles.target.clamp(min=0)
    else:
        roles.draft_ids = shift_prompt(step.batch("next_T"), roles.target, roles.owner_T)
    roles.aux = torch.cat(step.taps(), -1)
    return 1


def pairs_hidden_states(ctx: PassContext) -> bool:
    """True where the drafter reads rows of (hidden state, next token); some kinds read one row, or
    hidden states alone.
    """
    reads_one_row = ctx.capabilities.kind in ("direct", "heads", "shared_kv")
    reads_no_tokens = ctx.capabilities.kind == "block"
    return ctx.capabilities.reads_hidden_states and not (reads_one_row or reads_no_tokens)


def shift_prompt(next_T: Tensor, target_R1: Tensor, owner_T: Tensor) -> Tensor:
    """next_T: the prompt token after each token; -1 at the end of the prompt, which the sampled
    token follows.
    """
    sampled_T = target_R1.squeeze(1)[owner_T.long()]
    return torch.where(next_T < 0, sampled_T, next_T).clamp(min=0).unsqueeze(0)
