"""Trees whose nodes' children are drawn, without replacement, as rejection needs them.

A static tree has as many children of a node as its form says, so they can be draws, of which the
ratio test knows the distribution.  Of a dynamic one the best are kept, which
nothing could be divided by: its children are the most probable tokens, and no draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from compilespec.ops.sample.layout import MIN_TEMPERATURE, STEP, STREAM_DRAFT, TEMPERATURE
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.sampling import (
    draft_noise,
    head_width,
    sampling_state,
    wide_dtype,
)
from compilespec.program import TreeShape


def draws_children(ctx: PassContext) -> bool:
    """True where the children of a node are drawn with their own noise."""
    tree = ctx.config.tree
    return tree is not None and bool(tree.choices) and ctx.acceptance.reads_draft_probs


def child_noise(
    step: Splice, drawn: Tensor, ids: Tensor | None, width: int, depth: int
) -> tuple[Tensor, ...]:
    """Temperature [B], and the noise [B, V] that chooses the drafts of a depth: the target's, their
    own, or none; nothing where all requests are greedy.
    """
    if step.ctx.acceptance.couples_drafts:
        return draft_noise(step, drawn, ids, width)
    made = draft_noise(step, drawn, ids, width, STREAM_DRAFT + STEP * depth)
    return made if draws_children(step.ctx) else made[:1]


def inner_rows(shape: TreeShape) -> list[int]:
    """The rows of a static tree that have children, the root first."""
    rows = {path: row for row, path in enumerate(((), *shape.choices))}
    return sorted({rows[path[:-1]] for path in shape.choices})


def sibling_ranks(shape: TreeShape) -> dict[tuple[int, ...], int]:
    """The number of each node of a static tree among its siblings."""
    seen: dict[tuple[int, ...], int] = {}
    ranks = {}
    for path in shape.choices:  # siblings come in order
        ranks[path] = seen.get(path[:-1], 0)
        seen[path[:-1]] = ranks[path] + 1
    return ranks


def child_probs(step: Splice, logits: Tensor, ids: Tensor | None, num_rows: int) -> Tensor:
    """What the children of a depth's nodes are drawn from, over the target's ids: [B, F, V]; 0 for
    greedy requests, whose children are no draws.
    """
    real, width = sampling_state(step).real, step.config.vocab_size
    return spread_probs(
        logits,
        real,
        step.roles.row_index,
        ids,
        num_rows=num_rows,
        vocab_size=width,
        num_missing=width - head_width(step.ctx),
        dtype=wide_dtype(step.ctx),
    )


def spread_probs(
    logits_NV: Tensor,
    sampling_RF: Tensor,
    index_B: Tensor,
    ids_V: Tensor | None = None,
    *,
    num_rows: int,
    vocab_size: int,
    num_missing: int,
    dtype: torch.dtype,
) -> Tensor:
    """Softmax of the logits at the requests' temperatures, over the target's ids."""
    temperature_B11 = sampling_RF[index_B][:, TEMPERATURE].view(-1, 1, 1)
    is_drawn_B11 = temperature_B11 >= MIN_TEMPERATURE
    logits_BFV = logits_NV.unflatten(0, (-1, num_rows)).to(dtype)
    scores_BFV = logits_BFV / torch.where(is_drawn_B11, temperature_B11, 1).to(dtype)
    if ids_V is None:
        probs_BFV = functional.pad(scores_BFV.softmax(-1), (0, num_missing))
    else:
        own_BFV = torch.where(ids_V >= 0, scores_BFV, -math.inf).softmax(-1)
        zeros_BFV = functional.pad(torch.zeros_like(own_BFV[..., :1]), (0, vocab_size - 1))
        probs_BFV = zeros_BFV.index_add(2, ids_V.clamp(min=0), own_BFV)
    return torch.where(is_drawn_B11, probs_BFV, 0)


def keep_child_probs(step: Splice, distributions: list[Tensor]) -> None:
    """Write the distributions of the inner nodes, depth by depth, into state rows."""
    write_rows(_prob_rows(step), step.roles.row_index, *distributions)


def read_child_probs(step: Splice) -> Tensor:
    """The distributions of the inner nodes, [B, I, V]."""
    return _prob_rows(step)[step.roles.row_index]


def write_rows(rows_RIV: Tensor, index_B: Tensor, *parts: Tensor) -> Tensor:
    probs_BIV = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return rows_RIV.index_put_((index_B,), probs_BIV)


def _prob_rows(step: Splice) -> Tensor:
    tree = step.config.tree
    assert tree is not None, "checked by the caller"
    shape = (len(inner_rows(tree)), step.config.vocab_size)
    return step.state("child_prob_RIV", shape, wide_dtype(step.ctx))
