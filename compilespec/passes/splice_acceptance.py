"""Judges the drafts inside the step, without the host: longest accepted prefix and bonus token."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.acceptance.registry import RULES, Judged
from compilespec.passes.context import PassContext
from compilespec.passes.graph import (
    add_buffer,
    arange_like,
    emit,
    find_role,
    output_node,
    set_outputs,
)
from compilespec.passes.read_state import first_columns
from compilespec.passes.sampling import note_logprobs, sampling_state
from compilespec.passes.tree_penalties import keep_context
from compilespec.passes.trees import verifies_tree
from compilespec.program import PAD, BufferSpec


def splice_acceptance(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Logits -> target tokens -> `emitted_BS`, `num_emitted_B` (decode) or the first token
    (prefill), by the rule of the program.

    Roles made: `target` ([B, S], or [R, 1] in prefill), `emitted` and `num_emitted` ([B]).
    Numerics: exact.  Torch IR.
    """
    logits, before = find_role(gm, "logits"), output_node(gm)
    rule = RULES[ctx.acceptance.rule]
    if ctx.phase == "decode":
        ids = find_role(gm, "ids")
        if ctx.may_omit_drafts:  # PAD, which `ids` clamped to 0
            tokens, index = find_role(gm, "tokens_RS"), find_role(gm, "row_index")
            ids = emit(
                gm, drafted_tokens, tokens, index, before=before,
                num_tokens=ctx.config.num_verify_tokens, row_tokens=ctx.config.num_row_tokens,
            )  # fmt: skip
        if ctx.config.num_draft_tokens:
            ids = _withhold(gm, ctx, ids)
        judge = rule.decode_tree if verifies_tree(ctx) else rule.decode
        assert judge is not None, "checked when the program was planned"
        judged = judge(gm, ctx, ids, logits)
        if ctx.acceptance.force_num_accepted:
            judged = _force(gm, ctx, judged)
    else:
        judged = rule.prefill(gm, ctx, logits)
    if judged.taken is not None and not ctx.greedy_only:
        keep_context(gm, ctx, sampling_state(gm, ctx), judged.taken)
    if rule.after is not None:
        rule.after(gm, ctx, judged)
    for name, node in judged._asdict().items():
        if node is not None:
            node.meta["role"] = name
    note_logprobs(gm, ctx, judged.target)
    if ctx.phase == "prefill":
        logits = emit(gm, lambda x_1RV: x_1RV.squeeze(0).unsqueeze(1), logits, before=before)
    spoilt = emit(gm, spoilt_rows, logits, before=before)
    if judged.taken is not None:
        spoilt = emit(gm, lambda x, at: x.gather(1, at.long()), spoilt, judged.taken, before=before)
    said = emit(gm, blank_spoilt, judged.emitted, spoilt, before=before)
    set_outputs(gm, {"emitted_BS": said, "num_emitted_B": judged.num_emitted})
    return 1


def spoilt_rows(logits_BSV: Any) -> Any:
    """Which rows hold NaN.  argmax treats NaN as the largest value, so that one element per row
    suffices.
    """
    best_BS1 = logits_BSV.argmax(-1).unsqueeze(-1)
    return logits_BSV.gather(-1, best_BS1).squeeze(-1).isnan()


def blank_spoilt(emitted_BS: Any, is_nan_BS: Any) -> Any:
    """Replace all tokens of a request by PAD if one of them was judged by logits with NaN.

    The host ends such a request; no other output shows the NaN.
    """
    is_spoilt_B1 = (is_nan_BS & (emitted_BS >= 0)).any(1, keepdim=True)
    return torch.where(is_spoilt_B1, PAD, emitted_BS)


def drafted_tokens(tokens_RS: Any, index_B: Any, *, num_tokens: int, row_tokens: int) -> Any:
    """The last emitted token and the drafts as stored in the rows, including PAD: [B, S]."""
    return first_columns(tokens_RS[index_B], num_tokens, row_tokens)


def _withhold(gm: fx.GraphModule, ctx: PassContext, ids: fx.Node) -> fx.Node:
    """Replace the drafts that must not be judged, a request's last `withheld_R`, by PAD.

    This gives each request its own K, down to 0, in the same graph.
    """
    rows = ctx.config.max_batch_size + 1
    withheld = add_buffer(
        gm,
        ctx,
        BufferSpec(name="withheld_R", kind="state", shape=(rows,), dtype=torch.int32, by_host=True),
    )
    depth = (find_role(gm, "depth"),) if verifies_tree(ctx) else ()
    node: fx.Node = emit(
        gm, withhold_drafts, ids, withheld, find_role(gm, "row_index"), *depth,
        before=output_node(gm), num_tokens=ctx.config.num_verify_tokens,
        row_tokens=ctx.config.num_row_tokens,
    )  # fmt: skip
    return node


def withhold_drafts(
    ids_BS: Any, withheld_R: Any, index_B: Any, depth_BS: Any = None, *, num_tokens: int,
    row_tokens: int,
) -> Any:  # fmt: skip
    """ids_BS with PAD after the columns that the request keeps, or below that depth of a tree;
    column 0 is the last emitted token, and the row holds the drafts of the largest K.
    """
    last_B1 = (row_tokens - 1 - withheld_R[index_B]).unsqueeze(1)
    place = arange_like(ids_BS, num_tokens) if depth_BS is None else depth_BS
    return torch.where(place <= last_B1, ids_BS, PAD)


def _force(gm: fx.GraphModule, ctx: PassContext, judged: Judged) -> Judged:
    """Put the forced count into every live row; `target` is unchanged, so its tokens after a wrong
    draft follow from that draft.  Source: requirement I1.
    """
    num_tokens = ctx.config.num_verify_tokens
    emitted, count = emit(
        gm, force_count, judged.target, judged.num_emitted, find_role(gm, "live"),
        before=output_node(gm), num_tokens=num_tokens,
        num_emitted=min(ctx.acceptance.force_num_accepted + 1, num_tokens),
    )  # fmt: skip
    return Judged(judged.target, emitted, count)


def force_count(
    target_BS: Any, count_B: Any, live_B: Any, *, num_tokens: int, num_emitted: int
) -> tuple[Any, Any]:
    """(emitted_BS, num_emitted_B) with the forced count in live rows."""
    forced_B = torch.where(live_B, num_emitted, count_B).to(torch.int32)
    step_S = arange_like(target_BS, num_tokens)
    return torch.where(step_S < forced_B.unsqueeze(1), target_BS, PAD), forced_B
