"""Users' rules along a tree: the function says at which row the accepted path ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compilespec.errors import NotSupported
from compilespec.ops.sample.layout import FLAGS, GUIDE
from compilespec.passes.acceptance.base import Judged
from compilespec.passes.acceptance.multi_candidate import emit_path, last_place, trial_places
from compilespec.passes.acceptance.rule import Acceptance
from compilespec.passes.acceptance.user import gives_weights, trace_rule
from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role, output_node, splice
from compilespec.passes.sampling import guide_masks, sampling_state, target_probs, wide_dtype
from compilespec.passes.trees import take_path
from compilespec.tracing.capture import output_widths

OF_CHAINS = ("num_drafts_B", "draft_probs_BKV")  # inputs that a rule has no use for in a tree


def check_tree_rule(acceptance: Acceptance) -> None:
    """Whether a user's rule can judge a tree.  Raises: NotSupported."""
    function = acceptance.function
    if acceptance.rule != "user" or function is None:
        return
    if "parents_BS" not in function.inputs or any(name in function.inputs for name in OF_CHAINS):
        raise NotSupported(
            f"acceptance={function.name} judges no trees: with draft_tree= a rule reads "
            f"parents_BS, and neither {' nor '.join(OF_CHAINS)}; leave acceptance= or draft_tree= "
            "out"
        )


def decode_tree(gm: fx.GraphModule, ctx: PassContext, ids: fx.Node, logits: fx.Node) -> Judged:
    end, config = output_node(gm), ctx.config
    start, index = find_role(gm, "start"), find_role(gm, "row_index")
    depth, path = find_role(gm, "depth"), find_role(gm, "path")
    _, whole, *_ = sampling_state(gm, ctx)
    probs = target_probs(gm, ctx, before=end)
    parents = emit(gm, parents_of, depth, path, before=end)
    made: dict[str, Callable[[], fx.Node]] = {
        "probs_BSV": lambda: probs,
        "logits_BSV": lambda: logits,
        "draft_BK": lambda: emit(gm, lambda ids_BS: ids_BS[:, 1:], ids, before=end),
        "parents_BS": lambda: parents,
        "uniform_BK": lambda: _uniform(gm, ctx),
    }
    traced = trace_rule(ctx)
    reads = [entry.name for entry in traced.inputs if entry.kind == "argument"]
    row, last = splice(gm, ctx, traced, {name: made[name]() for name in reads})
    allowed = emit(
        gm, allowed_nodes, ids, parents, whole, guide_masks(gm, ctx), index, before=end,
        num_tokens=config.num_verify_tokens,
    )  # fmt: skip
    leaf, is_whole = emit(
        gm, limit_leaf, row, ids, allowed, path, before=end,
        num_tokens=config.num_verify_tokens, max_depth=config.num_draft_tokens,
    )  # fmt: skip
    (vocab,) = output_widths(ctx.target)
    if gives_weights(traced):
        weights = emit(
            gm, own_weights, last, probs, leaf, is_whole, before=end, vocab_size=vocab,
            dtype=wide_dtype(ctx),
        )  # fmt: skip
        drawn, stream = emit(gm, last_place, start, depth, leaf, before=end)
        with gm.graph.inserting_before(end):
            token = gm.graph.call_function(
                torch.ops.compilespec.draw_weighted.default, (weights, index, drawn, stream, whole)
            )
    else:
        token = emit(gm, lambda x_B: x_B.clamp(0, vocab - 1).to(torch.int32), last, before=end)
    taken, target, emitted, count = emit(
        gm, emit_path, ids, depth, path, leaf, token, before=end,
        max_depth=config.num_draft_tokens,
    )  # fmt: skip
    return Judged(target, emitted, count, taken)


def _uniform(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """A number in (0, 1) for each node, [B, S - 1]."""
    end = output_node(gm)
    _, whole, *_ = sampling_state(gm, ctx)
    drawn, stream = emit(
        gm, trial_places, find_role(gm, "start"), find_role(gm, "depth"), before=end,
        num_tokens=ctx.config.num_verify_tokens,
    )  # fmt: skip
    with gm.graph.inserting_before(end):
        numbers = gm.graph.call_function(
            torch.ops.compilespec.uniform_noise.default,
            (find_role(gm, "row_index"), drawn, stream, whole),
        )
    node: fx.Node = emit(gm, lambda uniform_BS: uniform_BS[:, 1:], numbers, before=end)
    return node


# --- tensor code ---


def parents_of(depth_BS: Any, path_BSP: Any) -> Any:
    """The row before each one on its path, int32 [B, S]; the root is its own."""
    before_BS1 = (depth_BS - 1).clamp(min=0).long().unsqueeze(-1)
    return path_BSP.gather(2, before_BS1).squeeze(-1).to(torch.int32)


def allowed_nodes(
    ids_BS: Any, parent_BS: Any, sampling_RI: Any, mask_RSW: Any, index_B: Any, *, num_tokens: int
) -> Any:
    """Which rows hold a token that the request's guide allows after the row before: [B, S]."""
    place_BS = ids_BS.clamp(min=0).long()
    words_BSW = mask_RSW[index_B][:, :num_tokens]
    of_parent_BSW = words_BSW.gather(
        1, parent_BS.long().unsqueeze(-1).expand(-1, -1, words_BSW.shape[-1])
    )
    word_BS = of_parent_BSW.gather(2, (place_BS // 32).unsqueeze(-1)).squeeze(-1)
    is_free_B1 = (sampling_RI[index_B][:, FLAGS] & GUIDE == 0).unsqueeze(1)
    return is_free_B1 | (word_BS >> (place_BS % 32) & 1 != 0)


def limit_leaf(
    row_B: Any, ids_BS: Any, allowed_BS: Any, path_BSP: Any, *, num_tokens: int, max_depth: int
) -> tuple[Any, Any]:
    """The last row on the way to `row` before one that must not be judged or that a guide forbids,
    int64 [B], and whether that is `row` itself.
    """
    wanted_B = row_B.long().clamp(0, num_tokens - 1)
    way_BP = take_path(path_BSP, wanted_B.unsqueeze(1), sizes=(max_depth + 1,)).squeeze(1)
    is_good_BS = (ids_BS >= 0) & allowed_BS
    is_good_BP = is_good_BS.gather(1, way_BP.clamp(min=0).long()) & (way_BP >= 0)
    count_B = is_good_BP[:, 1:].to(torch.int32).cumprod(1).sum(1)
    leaf_B = way_BP.gather(1, count_B.unsqueeze(1)).squeeze(1).clamp(min=0).long()
    return leaf_B, leaf_B == wanted_B


def own_weights(
    weights_BV: Any, probs_BSV: Any, leaf_B: Any, is_whole_B: Any, *, vocab_size: int,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The rule's weights; the target's own for rows without any, and for paths that were cut."""
    own_BV = probs_BSV.gather(1, leaf_B.view(-1, 1, 1).expand(-1, 1, vocab_size)).squeeze(1)
    is_given_B1 = (weights_BV > 0).any(-1, keepdim=True) & is_whole_B.unsqueeze(1)
    return torch.where(is_given_B1, weights_BV.to(dtype), own_BV)
