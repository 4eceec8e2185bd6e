"""Rejection along a tree whose children are drawn without replacement, in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops.sample import layout
from compilespec.ops.sample.probabilities import (
    draw_weighted_reference,
    filtered_probs_reference,
    uniform_reference,
)
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Case
from compilespec.passes.references.placement import place_call
from compilespec.passes.references.rules import along, sampling_rows


def judge_by_trials(
    ctx: PassContext, case: Case, logits: Tensor, drafts: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """From the root on, the first child that passes the ratio test, against what the siblings
    before it left of both distributions; then a token drawn from what is left of the target's.
    """
    placed, shape = place_call(ctx.config, case), ctx.config.tree
    assert shape is not None
    places = [(), *shape.choices]
    inner = [row for row, p in enumerate(places) if any(q[:-1] == p for q in shape.choices)]
    state = sampling_rows(case)
    target, counts = [], []
    for request, (tree, ids) in enumerate(zip(placed.paths, drafts, strict=True)):
        one = slice(request, request + 1)
        row, start = placed.row_index[one], placed.start[one]
        depths = torch.tensor([[len(path) - 1 for path in tree]], dtype=torch.int32)
        at, best = start.unsqueeze(1) + depths, logits[one].argmax(-1).int()
        probs = filtered_probs_reference(logits[one], best, None, row, at + 1, *state)[0]
        words = torch.arange(len(tree), dtype=torch.int32).unsqueeze(0) * 8 + layout.STREAM_ACCEPT
        numbers = uniform_reference(row, at, words, state[1])[0]
        kept = case.inputs["child_prob_RIV"][int(row)]
        drawn = [kept[inner.index(s) if s in inner else 0] for s in range(len(tree))]
        way, left, rest = [0], probs[0], drawn[0]
        for node, path in enumerate(tree):
            if node == 0 or path[-2] != way[-1] or ids[node] < 0:
                continue
            if bool(numbers[node] * rest[ids[node]] < left[ids[node]]):
                way, left, rest = [*way, node], probs[node], drawn[node]
                continue
            left, rest = (left - rest).clamp(min=0), rest.clone()
            rest[ids[node]] = 0
            left = left / left.sum() if bool(left.sum() > 0) else left
            rest = rest / rest.sum() if bool(rest.sum() > 0) else rest
        weights = left if bool((left > 0).any()) else probs[way[-1]]
        word = torch.full_like(start, layout.STREAM_RECOVER + 8 * len(way))
        last = int(draw_weighted_reference(weights[None], row, start + len(way), word, state[1]))
        target.append(along(ids, way, last, ctx.config.num_step_tokens))
        counts.append(len(way))
    return target, counts
