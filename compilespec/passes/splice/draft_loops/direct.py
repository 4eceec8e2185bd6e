"""Direct drafting: one call gives all K drafts; no cache, no loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.calls import newest_hidden
from compilespec.passes.splice.evidence import confidence_of_matches
from compilespec.program import PAD, BufferSpec, Traced


def direct(step: Splice) -> int:
    """Splice the drafter's single call, "draft", with the inputs that its argument names ask for:

    history_BL  int32 [B, max_seq_len]: the request's tokens, the bonus token last, then PAD
    length_B    int32 [B]: how many of them are valid
    past_ML     int32 [M, max_seq_len]: texts of requests that ended, which the host writes
    hidden_BE   [B, A*D]: the target's taps at the last committed row, n-1

    The history is a state buffer of one row per request, declared only if it is read.  Makes the
    role `drafts` ([B, K], int32), in which PAD is not a draft.  Torch IR.
    """
    drafts, *sure = proposed(step)
    step.roles.drafts = drafts
    if sure and step.ctx.tells_evidence:
        step.roles.confidence = confidence_of_matches(sure[0])
    return 1


def proposed(step: Splice) -> tuple[Tensor, ...]:
    """What the call "draft" gives: the drafts, and how sure they are if it says so."""
    call = step.ctx.draft["draft"]
    arguments: dict[str, Tensor] = {}
    if {"history_BL", "length_B"} & {*call.arguments}:
        arguments["length_B"] = _length(step)
    made: dict[str, Callable[[], Tensor]] = {
        "history_BL": lambda: _history(step, arguments["length_B"]),
        "past_ML": lambda: step.buffer(_past_texts(call)),
        "hidden_BE": lambda: newest_hidden(step),
    }
    arguments |= {name: make() for name, make in made.items() if name in call.arguments}
    return step.fragment(call, **arguments)


def keep_history(step: Splice) -> None:
    """Write the tokens of a step of K = 0, which drafts nothing, into the history."""
    if "history_BL" in step.ctx.draft["draft"].arguments:
        _history(step, _length(step))


def _length(step: Splice) -> Tensor:
    """The tokens of each request, including this step's: up to `start`, then the emitted ones."""
    roles, limit = step.roles, step.config.max_seq_len
    parts = (roles.start, roles.num_emitted) if step.is_decode else (roles.start,)
    return cast(Tensor, sum(parts) + 1).clamp(max=limit)


def _history(step: Splice, length: Tensor) -> Tensor:
    """Write this step's tokens into the history rows and read the rows of the step's requests."""
    roles, index, start = step.roles, step.roles.row_index, step.roles.start
    history = step.state("history_RL", (step.config.max_seq_len,), torch.int32, fill=PAD)
    if step.is_decode:
        places = step.call(emitted_places, index, start, roles.num_emitted, roles.emitted)
    else:
        prompt = (roles.ids_T, roles.position_T, roles.row_T)
        places = step.call(prompt_places, *prompt, index, start, roles.emitted)
    return step.call(write_and_read, history, *places, index, length, roles.live)


def emitted_places(
    index_B: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    emitted_BS: Tensor,
    *,
    num_verify_tokens: int,
    spare_row: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode: emitted token j has position start + 1 + j.  Returns (row, column, token), [B, S];
    PAD and tokens past the maximum length go to the spare row.
    """
    offset_S = arange_like(start_B, num_verify_tokens)
    wanted_BS = (start_B.unsqueeze(1) + offset_S + 1).long()
    inside_BS = (offset_S < count_B.unsqueeze(1)) & (wanted_BS < max_seq_len)
    row_BS = torch.where(inside_BS, index_B.unsqueeze(1), spare_row)
    return row_BS, wanted_BS.clamp(max=max_seq_len - 1), emitted_BS


def prompt_places(
    ids_T: Tensor,
    position_T: Tensor,
    row_T: Tensor,
    index_R: Tensor,
    start_R: Tensor,
    emitted_R1: Tensor,
    *,
    spare_row: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill: the chunks' tokens at their positions, and each first token after its prompt.

    Returns (row, column, token), [T + R].  An unfinished prompt has the spare row in `index_R`.
    """
    row_R = torch.where(start_R < max_seq_len, index_R, spare_row)
    row = torch.cat([torch.where(row_T >= 0, row_T, spare_row).long(), row_R])
    column = torch.cat([position_T, start_R]).clamp(max=max_seq_len - 1).long()
    return row, column, torch.cat([ids_T, emitted_R1.squeeze(1)])


def write_and_read(
    history_RL: Tensor,
    row: Tensor,
    column: Tensor,
    token: Tensor,
    index_B: Tensor,
    length_B: Tensor,
    live_B: Tensor,
    *,
    max_seq_len: int,
) -> Tensor:
    """[B, max_seq_len] tokens, PAD from `length_B` on, so that tokens of the row's earlier owner
    are never seen.  Padded rows hold only PAD.
    """
    history_RL.index_put_((row, column), token)
    rows_BL = history_RL[index_B]
    is_valid = arange_like(length_B, max_seq_len) < length_B.unsqueeze(1)
    return torch.where(is_valid & live_B.unsqueeze(1), rows_BL, PAD)


def _past_texts(call: Traced) -> BufferSpec:
    """Texts of requests that ended, as large as the call was captured with."""
    placeholders = call.graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, call.inputs, strict=True)
    (past,) = (node for node, entry in pairs if entry.name == "past_ML")
    shape = tuple(past.meta["example_value"].shape)
    return BufferSpec(
        name="past_ML", kind="state", shape=shape, dtype=torch.int32, fill=PAD, by_host=True
    )
