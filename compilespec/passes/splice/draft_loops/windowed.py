"""Windowed drafting: one module per draft step, each with its own cache."""

from __future__ import annotations

import torch
from torch import Tensor

import compilespec.ops.roll_window  # noqa: F401  (registers the operator)
from compilespec.ops.device import traits_of
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.calls import next_position, propose, run
from compilespec.passes.splice.places import Places, place, placed_by, step_places
from compilespec.passes.splice.rows import Rows, take_newest, take_rows
from compilespec.program import Traced


def windowed(step: Splice) -> int:
    """Module i proposes draft i+1.  Makes the role `drafts` ([B, K], int32 target ids).

    Input pairs are (hidden state of position t, token at t+1).  Decode: the last K pairs are kept
    in a ring per request; with the S new ones a window of K+1 pairs ends at the last committed row
    e, so that it holds no rejected row and skips no slot.  Prefill: the window is the packed
    prompt.  Then, by `ctx.drafter.chain`:

    module_rows  module i's row t = (module i-1's output t, token t+1+i), positions e-K .. e
    target_rows  module i's row t = (target's hidden t+i, token t+1+i), what lies past e being the
                 output of an earlier module and a draft; positions e-K-i .. e

    The last i rows that module i writes hold drafts; the next step's window covers them.
    Source: requirements M4-M7, H-4, H-6, H-9, H-21, H-22.
    """
    drafts = _decode(step) if step.is_decode else _prefill(step)
    step.roles.drafts = torch.stack(drafts, 1)
    return step.config.num_draft_tokens


def _decode(step: Splice) -> list[Tensor]:
    roles, window = step.roles, step.config.num_verify_tokens
    takes_target_rows = step.ctx.drafter.chain == "target_rows"
    hidden, ids = _roll(step)
    newest = next_position(step)
    drafts: list[Tensor] = []
    for index in range(step.config.num_draft_tokens):
        num_rows = window + (index if takes_target_rows else 0)
        places = placed_by(step, window_places, roles.start, roles.num_emitted, num_rows=num_rows)
        head, recycled = _run(step, index, places, ids, hidden)
        last = Rows(index=None)
        head, output = (take_rows(step, x, last) for x in (head, recycled))
        drafts.append(_propose(step, index, head, newest))
        if index + 1 == step.config.num_draft_tokens:
            break
        if takes_target_rows:
            ids, hidden = append_pair(ids, hidden, drafts[-1], output)
        else:
            ids, hidden = next_ids(ids, drafts[-1]), recycled
    return drafts


def _roll(step: Splice) -> tuple[Tensor, Tensor]:
    """Move the window of pairs on by the step's own: hidden states [B, K+1, D], tokens [B, K+1]."""
    roles, rings = step.roles, _rings(step)
    pairs = (*rings, roles.row_index, roles.aux, roles.draft_ids, roles.num_emitted)
    if rolls_in_one_kernel(step.ctx):
        both = torch.ops.compilespec.roll_window.default(*pairs)
        return both[0], both[1]
    hidden, ids = take_window(*pairs, window=step.config.num_verify_tokens)
    write_ring(*rings, roles.row_index, hidden, ids)
    return hidden, ids


def rolls_in_one_kernel(ctx: PassContext) -> bool:
    """True on a GPU, where gathers and writes are separate launches."""
    return traits_of(ctx.config.device).is_cuda


def _prefill(step: Splice) -> list[Tensor]:
    roles, places = step.roles, step_places(step)
    hidden, ids, last, owner = roles.aux, roles.draft_ids, roles.last_R, roles.owner_T
    count = step.config.num_draft_tokens
    prompt = packed_ring(hidden, ids, places.position, last, num_pairs=count)
    store_ring(*_rings(step), roles.row_index, *prompt)
    drafts: list[Tensor] = []
    for index in range(count):
        head, recycled = _run(step, index, places, ids, hidden)
        (head,) = take_newest(step, head)
        drafts.append(_propose(step, index, head, roles.start))
        if index + 1 == count:
            break
        ids = shift_ids(ids, drafts[-1], owner, last)
        if step.ctx.drafter.chain == "target_rows":
            hidden = shift_rows(hidden, recycled, owner, last)
        else:
            hidden = recycled
    return drafts


def _run(
    step: Splice, index: int, places: Places, ids: Tensor, hidden: Tensor
) -> tuple[Tensor, ...]:
    """Splice one pass of module `index` over its own caches."""
    sizes = step.ctx.drafter.kv_block_sizes
    return run(
        step,
        f"forward.{index}",
        places,
        caches=f"draft.{index}",
        block_size=sizes[index] if sizes else None,
        input_ids=ids,
        hidden=hidden,
    )


def _propose(step: Splice, index: int, head_B1D: Tensor, newest: Tensor) -> Tensor:
    """Draft index + 1, whose position is as far past the bonus token's."""
    return propose(step, head_B1D.squeeze(1), newest, index + 1, call=f"propose.{index}")


def _rings(step: Splice) -> tuple[Tensor, Tensor]:
    """The last K input pairs of each request before `start`: hidden states and their tokens."""
    count = step.config.num_draft_tokens
    width = argument_width(step.ctx.draft["forward.0"], "hidden")
    hidden = step.state("ring_hidden_RKD", (count, width), step.config.dtype)
    return hidden, step.state("ring_ids_RK", (count,), torch.int32)


def argument_width(call: Traced, name: str) -> int:
    """The last dimension of an argument of a captured call."""
    nodes = call.graph_module.graph.find_nodes(op="placeholder")
    entry = next(n for n, given in zip(nodes, call.inputs, strict=True) if given.name == name)
    return int(entry.meta["example_value"].shape[-1])


def take_window(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_B: Tensor,
    hidden_BSD: Tensor,
    ids_BS: Tensor,
    num_emitted_B: Tensor,
    *,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Pairs cat[n-1 : n+K] of the ring's K and the step's S: [B, K+1, D] and [B, K+1]."""
    hidden = torch.cat([ring_hidden_RKD[index_B], hidden_BSD], 1)
    ids = torch.cat([ring_ids_RK[index_B], ids_BS], 1)
    place_BW = ((num_emitted_B - 1).unsqueeze(1) + arange_like(num_emitted_B, window)).long()
    place_BWD = place_BW.unsqueeze(-1).expand(-1, -1, hidden_BSD.shape[-1])
    return hidden.gather(1, place_BWD), ids.gather(1, place_BW)


def write_ring(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_B: Tensor,
    hidden_BWD: Tensor,
    ids_BW: Tensor,
) -> Tensor:
    """Keep the window's last K pairs; padded rows write the spare row."""
    ring_hidden_RKD.index_put_((index_B,), hidden_BWD[:, 1:])
    return ring_ids_RK.index_put_((index_B,), ids_BW[:, 1:])


def store_ring(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_R: Tensor,
    hidden_RKD: Tensor,
    ids_RK: Tensor,
) -> Tensor:
    ring_hidden_RKD.index_put_((index_R,), hidden_RKD)
    return ring_ids_RK.index_put_((index_R,), ids_RK)


def packed_ring(
    hidden_1TD: Tensor, ids_1T: Tensor, position_1T: Tensor, last_R: Tensor, *, num_pairs: int
) -> tuple[Tensor, Tensor]:
    """The last K pairs of each request of a packed call, zeros if the prompt is shorter."""
    back_K = arange_like(last_R, num_pairs) - (num_pairs - 1)
    last_position_R1 = position_1T[0][last_R.long()].unsqueeze(1)
    inside_RK = last_position_R1 + back_K >= 0
    place_RK = (last_R.unsqueeze(1) + back_K).clamp(min=0).long()
    hidden_RKD = torch.where(inside_RK.unsqueeze(-1), hidden_1TD[0][place_RK], 0)
    return hidden_RKD, torch.where(inside_RK, ids_1T[0][place_RK], 0)


def window_places(
    start_B: Tensor,
    num_emitted_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    num_rows: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, row and position of the `num_rows` rows that end at the last committed one.

    Positions before 0 and past the maximum length are redirected (H-9, E5).
    """
    wanted_BW = (start_B + num_emitted_B - num_rows).unsqueeze(1) + arange_like(start_B, num_rows)
    inside_BW = live_B.unsqueeze(1) & (wanted_BW >= 0)
    row_BW = torch.where(inside_BW, index_B.unsqueeze(1), -1).to(torch.int32)
    position, row, slot = place(
        wanted_BW.clamp(min=0),
        row_BW,
        index_B.unsqueeze(1),
        inside_BW,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return slot, row, position


def next_ids(ids_BW: Tensor, draft_B: Tensor) -> Tensor:
    """Shift each request's tokens by one row; the last row gets the draft."""
    return torch.cat([ids_BW[:, 1:], draft_B.clamp(min=0).unsqueeze(1)], 1)


def append_pair(
    ids_BW: Tensor, hidden_BWD: Tensor, draft_B: Tensor, output_B1D: Tensor
) -> tuple[Tensor, Tensor]:
    """Append one pair: the module's own output with its draft."""
    return (
        torch.cat([ids_BW, draft_B.clamp(min=0).unsqueeze(1)], 1),
        torch.cat([hidden_BWD, output_B1D], 1),
    )


def shift_ids(ids_1T: Tensor, draft_R: Tensor, owner_T: Tensor, last_R: Tensor) -> Tensor:
    """`next_ids` of packed rows.  The last rows of an unfinished prompt get wrong tokens; the next
    chunk runs those rows again.
    """
    owner_T = owner_T.long()
    moved_T = ids_1T[0].roll(-1, 0)
    is_last_T = _is_last(owner_T, last_R)
    return torch.where(is_last_T, draft_R.clamp(min=0)[owner_T], moved_T).unsqueeze(0)


def shift_rows(hidden_1TD: Tensor, recycled_1TD: Tensor, owner_T: Tensor, last_R: Tensor) -> Tensor:
    """Shift hidden states by one row; a request's last row takes the module's output."""
    moved_TD = hidden_1TD[0].roll(-1, 0)
    is_last_T1 = _is_last(owner_T.long(), last_R).unsqueeze(-1)
    return torch.where(is_last_T1, recycled_1TD[0], moved_TD).unsqueeze(0)


def _is_last(owner_T: Tensor, last_R: Tensor) -> Tensor:
    return arange_like(owner_T, owner_T.size(0)) == last_R[owner_T]
