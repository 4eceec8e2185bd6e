"""Users' rules along a tree: the function says at which row the accepted path ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.ops.sample.layout import FLAGS, GUIDE
from compilespec.passes.splice.acceptance.base import Judged
from compilespec.passes.splice.acceptance.multi_candidate import emit_path, last_place, trial_places
from compilespec.passes.splice.acceptance.rule import Acceptance
from compilespec.passes.splice.acceptance.user import gives_weights, trace_rule
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.sampling import (
    guide_masks,
    sampling_state,
    target_probs,
    wide_dtype,
)
from compilespec.passes.splice.trees import take_path

OF_CHAINS = ("num_drafts_B", "draft_probs_BKV")  # inputs that a rule has no use for in a tree


def check_tree_rule(acceptance: Acceptance) -> None:
    """Refuse a user's rule that cannot judge a tree.  Raises: NotSupported."""
    function = acceptance.function
    if acceptance.rule != "user" or function is None:
        return
    if "parents_BS" not in function.inputs or any(name in function.inputs for name in OF_CHAINS):
        raise NotSupported(
            f"acceptance={function.name} judges no trees: with draft_tree= a rule reads "
            f"parents_BS, and neither {' nor '.join(OF_CHAINS)}; leave acceptance= or draft_tree= "
            "out"
        )


def decode_tree(step: Splice, ids: Tensor) -> Judged:
    roles, config = step.roles, step.config
    whole, probs = sampling_state(step).whole, target_probs(step)
    parents = parents_of(roles.depth, roles.path)
    made: dict[str, Callable[[], Tensor]] = {
        "probs_BSV": lambda: probs,
        "logits_BSV": lambda: roles.logits,
        "draft_BK": lambda: ids[:, 1:],
        "parents_BS": lambda: parents,
        "uniform_BK": lambda: _uniform(step),
    }
    rule = trace_rule(step.ctx)
    row, last = step.fragment(rule, **{name: made[name]() for name in rule.arguments})
    masks = guide_masks(step)
    allowed = step.call(allowed_nodes, ids, parents, whole, masks, roles.row_index)
    leaf, is_whole = step.call(
        limit_leaf, row, ids, allowed, roles.path, max_depth=config.num_draft_tokens
    )
    if gives_weights(rule):
        weights = own_weights(
            last,
            probs,
            leaf,
            is_whole,
            vocab_size=step.config.vocab_size,
            dtype=wide_dtype(step.ctx),
        )
        drawn, stream = last_place(roles.start, roles.depth, leaf)
        token = torch.ops.compilespec.draw_weighted.default(
            weights, roles.row_index, drawn, stream, whole
        )
    else:
        token = last.clamp(0, step.config.vocab_size - 1).to(torch.int32)
    return emit_path(ids, roles.depth, roles.path, leaf, token, max_depth=config.num_draft_tokens)


def _uniform(step: Splice) -> Tensor:
    """A number in (0, 1) for each node, [B, S - 1]."""
    roles, whole = step.roles, sampling_state(step).whole
    drawn, stream = step.call(trial_places, roles.start, roles.depth)
    uniform_BS: Tensor = torch.ops.compilespec.uniform_noise.default(
        roles.row_index, drawn, stream, whole
    )
    return uniform_BS[:, 1:]


# --- tensor code ---


def parents_of(depth_BS: Tensor, path_BSP: Tensor) -> Tensor:
    """The row before each one on its path, int32 [B, S]; the root is its own."""
    before_BS1 = (depth_BS - 1).clamp(min=0).long().unsqueeze(-1)
    return path_BSP.gather(2, before_BS1).squeeze(-1).to(torch.int32)


def allowed_nodes(
    ids_BS: Tensor,
    parent_BS: Tensor,
    sampling_RI: Tensor,
    mask_RSW: Tensor,
    index_B: Tensor,
    *,
    num_verify_tokens: int,
) -> Tensor:
    """Which rows hold a token that the request's guide allows after the row before: [B, S]."""
    place_BS = ids_BS.clamp(min=0).long()
    words_BSW = mask_RSW[index_B][:, :num_verify_tokens]
    of_parent_BSW = words_BSW.gather(
        1, parent_BS.long().unsqueeze(-1).expand(-1, -1, words_BSW.shape[-1])
    )
    word_BS = of_parent_BSW.gather(2, (place_BS // 32).unsqueeze(-1)).squeeze(-1)
    is_free_B1 = (sampling_RI[index_B][:, FLAGS] & GUIDE == 0).unsqueeze(1)
    return is_free_B1 | (word_BS >> (place_BS % 32) & 1 != 0)


def limit_leaf(
    row_B: Tensor,
    ids_BS: Tensor,
    allowed_BS: Tensor,
    path_BSP: Tensor,
    *,
    num_verify_tokens: int,
    max_depth: int,
) -> tuple[Tensor, Tensor]:
    """The last row on the way to `row` before one that must not be judged or that a guide forbids,
    int64 [B], and whether that is `row` itself.
    """
    wanted_B = row_B.long().clamp(0, num_verify_tokens - 1)
    way_BP = take_path(path_BSP, wanted_B.unsqueeze(1), sizes=(max_depth + 1,)).squeeze(1)
    is_good_BS = (ids_BS >= 0) & allowed_BS
    is_good_BP = is_good_BS.gather(1, way_BP.clamp(min=0).long()) & (way_BP >= 0)
    count_B = is_good_BP[:, 1:].to(torch.int32).cumprod(1).sum(1)
    leaf_B = way_BP.gather(1, count_B.unsqueeze(1)).squeeze(1).clamp(min=0).long()
    return leaf_B, leaf_B == wanted_B


def own_weights(
    weights_BV: Tensor,
    probs_BSV: Tensor,
    leaf_B: Tensor,
    is_whole_B: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The rule's weights; the target's own for rows without any, and for paths that were cut."""
    own_BV = probs_BSV.gather(1, leaf_B.view(-1, 1, 1).expand(-1, 1, vocab_size)).squeeze(1)
    is_given_B1 = (weights_BV > 0).any(-1, keepdim=True) & is_whole_B.unsqueeze(1)
    return torch.where(is_given_B1, weights_BV.to(dtype), own_BV)
