"""Users' acceptance rules along trees, and guides, in plain Python."""

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


def judge_by_rule(
    ctx: PassContext, case: Case, logits: Tensor, drafts: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """The way to the row that the rule's function names, as far as it may be taken; the function is
    called for one request at a time, on inputs computed here.
    """
    placed, rule = place_call(ctx.config, case), ctx.acceptance.function
    assert rule is not None
    state = sampling_rows(case)
    target, counts = [], []
    for request, (tree, ids) in enumerate(zip(placed.paths, drafts, strict=True)):
        one = slice(request, request + 1)
        row, start = placed.row_index[one], placed.start[one]
        depths = torch.tensor([[len(path) - 1 for path in tree]], dtype=torch.int32)
        drawn, best = start.unsqueeze(1) + depths, logits[one].argmax(-1).int()
        probs = filtered_probs_reference(logits[one], best, None, row, drawn + 1, *state)
        words = torch.arange(len(tree), dtype=torch.int32).unsqueeze(0) * 8 + layout.STREAM_ACCEPT
        made = {
            "probs_BSV": probs,
            "logits_BSV": logits[one],
            "draft_BK": torch.tensor([ids[1:]], dtype=torch.int32),
            "uniform_BK": uniform_reference(row, drawn, words, state[1])[:, 1:],
            "parents_BS": torch.tensor([[path[-2:][0] for path in tree]], dtype=torch.int32),
        }
        asked, last = rule.function(**{name: made[name] for name in rule.inputs})
        wanted, way = min(max(int(asked), 0), len(tree) - 1), [0]
        for node in tree[wanted][1:]:
            if ids[node] < 0 or not is_allowed(case, int(row), way[-1], ids[node]):
                break
            way.append(node)
        if last.dim() == 1:
            token = min(max(int(last), 0), probs.shape[-1] - 1)
        else:
            is_given = way[-1] == wanted and bool((last > 0).any())
            word = torch.full_like(start, layout.STREAM_RECOVER + 8 * len(way))
            weights = last if is_given else probs[:, way[-1]]
            token = int(draw_weighted_reference(weights, row, start + len(way), word, state[1]))
        target.append(along(ids, way, token, ctx.config.num_step_tokens))
        counts.append(len(way))
    return target, counts


def along(ids: list[int], way: list[int], last: int, count: int) -> list[int]:
    """The drafts on the way from the root, then the last token, as often as there is room."""
    tokens = [ids[node] for node in way[1:]]
    return [*tokens, *[last] * (count - len(tokens))]


def sampling_rows(case: Case) -> list[Tensor]:
    """The state rows that distributions follow from; copies, for some are written."""
    names = ("sampling_RF", "sampling_RI", "bias_RV", "context_RL", "mask_RSW")
    return [case.inputs[name].clone() for name in names]


def is_allowed(case: Case, row: int, place: int, draft: int) -> bool:
    """True where the guide of the request allows the draft after this row of the window."""
    if not int(case.inputs["sampling_RI"][row, layout.FLAGS]) & layout.GUIDE:
        return True
    word = int(case.inputs["mask_RSW"][row, place, max(draft, 0) // 32])
    return bool(word >> (max(draft, 0) % 32) & 1)
