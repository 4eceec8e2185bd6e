"""Which drafts are accepted, one request at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.ops.sample import layout, sample_reference
from compilespec.ops.sample.probabilities import (
    draw_weighted_reference,
    filtered_probs_reference,
    uniform_reference,
)
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.grown_trees import are_drawn
from compilespec.passes.references.placement import place_call
from compilespec.passes.references.rules import is_allowed, judge_by_rule, sampling_rows
from compilespec.passes.references.trees import accepted_path
from compilespec.passes.references.trials import judge_by_trials
from compilespec.passes.splice.acceptance.rule import Relaxed, RuleFunction
from compilespec.program import PAD


def splice_acceptance(before: Before, ctx: PassContext, case: Case) -> Values:
    """The tokens of this step by the program's rule, with its forced count and its state.

    Raises: NotSupported for a rule that has no reference.
    """
    if ctx.acceptance.function is None and ctx.acceptance.rule not in ("strict", "relaxed"):
        raise NotSupported(f"acceptance {ctx.acceptance.rule!r} has no reference")
    values = before(case.inputs)
    logits = values.outputs["logits"]
    choices = _choices(ctx, case, logits)
    buffers: dict[str, Tensor] = {}
    if case.phase == "decode":
        target, counts = _judge(ctx, case, values, choices)
    else:
        target = [[token] for token in choices[0]]
        counts = [int(row >= 0) for row in case.inputs["commit_row_R"].tolist()]
    emitted = [
        [*tokens[:count], *[PAD] * (len(tokens) - count)]
        for tokens, count in zip(target, counts, strict=True)
    ]
    if ctx.acceptance.relaxed is not None:
        buffers["relaxed_delta_R"] = _margins(ctx.acceptance.relaxed, case, emitted)
    made = {
        name: torch.tensor(value, dtype=torch.int32, device=logits.device)
        for name, value in (("target", target), ("emitted", emitted), ("num_emitted", counts))
    }
    return dataclasses.replace(
        values,
        outputs={"emitted_BS": made["emitted"], "num_emitted_B": made["num_emitted"]},
        roles={**values.roles, **made},
        buffers={**values.buffers, **buffers},
    )


def _choices(ctx: PassContext, case: Case, logits: Tensor) -> list[list[int]]:
    """The target's token at every row: the best, or drawn if the request is sampled.  Prefill: one
    list with each prompt's token.
    """
    choices = [[first_best(scores) for scores in request] for request in logits]
    if ctx.greedy_only:
        return choices
    greedy = torch.tensor(choices, dtype=torch.int32, device=logits.device)
    placed = place_call(ctx.config, case)
    if case.phase == "prefill":
        logits, greedy = logits.transpose(0, 1), greedy.transpose(0, 1)
        drawn = placed.start.unsqueeze(1)
    else:
        drawn = placed.start.unsqueeze(1) + torch.arange(1, logits.shape[1] + 1)
        if placed.paths:
            drawn = placed.start.unsqueeze(1) + _depths(ctx, case) + 1
    names = ("sampling_RF", "sampling_RI", "bias_RV", "context_RL", "mask_RSW")
    state = [case.inputs[name].clone() for name in names]
    chosen = sample_reference(logits, greedy, None, placed.row_index, drawn, *state)
    if case.phase == "prefill":
        chosen = chosen.transpose(0, 1)
    tokens: list[list[int]] = chosen.tolist()
    return tokens


def _depths(ctx: PassContext, case: Case) -> Tensor:
    """The depth of each row of a tree, int32 [B, S]."""
    paths = place_call(ctx.config, case).paths
    return torch.tensor([[len(path) - 1 for path in tree] for tree in paths], dtype=torch.int32)


def _judged_ids(ctx: PassContext, case: Case, values: Values) -> list[list[int]]:
    """The last token and the drafts of each request, PAD for drafts that must not be judged."""
    rows = case.inputs["row_B"].tolist()
    drafts: list[list[int]] = values.roles["ids"].tolist()
    if ctx.may_omit_drafts:  # PAD drafts match nothing
        held = case.inputs["tokens_RS"].tolist()
        own = ctx.config.num_verify_tokens
        drafts = [held[row][:own] for row in rows]  # -1: the spare row
    if ctx.config.num_draft_tokens:
        held_back = [int(case.inputs["withheld_R"][row]) for row in rows]
        most = ctx.config.num_row_tokens - 1
        places = [list(range(len(ids))) for ids in drafts]
        if ctx.config.tree is not None:
            places = _depths(ctx, case).tolist()
        drafts = [
            [token if place <= most - count else PAD for place, token in zip(at, ids, strict=True)]
            for at, ids, count in zip(places, drafts, held_back, strict=True)
        ]
    return drafts


def _judge(
    ctx: PassContext, case: Case, values: Values, choices: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Each request's tokens, and how many of them are emitted."""
    drafts = _judged_ids(ctx, case, values)
    if ctx.config.tree is not None:
        return _along_tree(ctx, case, values.outputs["logits"], drafts, choices)
    if ctx.acceptance.function is not None:
        target, counts = _by_function(ctx, case, values, drafts)
    else:
        target, counts = _by_choice(ctx, case, values, drafts, choices)
    force = ctx.acceptance.force_num_accepted
    if force:
        most = ctx.config.num_draft_tokens
        counts = [
            min(force, most) + 1 if row >= 0 else count
            for row, count in zip(case.inputs["row_B"].tolist(), counts, strict=True)
        ]
    return target, counts


def _along_tree(
    ctx: PassContext, case: Case, logits: Tensor, drafts: list[list[int]],
    choices: list[list[int]],
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """The choices on the longest accepted path; after it those of the root."""
    if are_drawn(ctx):
        return judge_by_trials(ctx, case, logits, drafts)
    if ctx.acceptance.rule == "user":
        return judge_by_rule(ctx, case, logits, drafts)
    target, counts = [], []
    trees = place_call(ctx.config, case).paths
    for tree, ids, choice in zip(trees, drafts, choices, strict=True):
        path = accepted_path(tree, ids, choice)
        rows = [*path, *[0] * (ctx.config.num_step_tokens - len(path))]
        target.append([choice[row] for row in rows])
        counts.append(len(path))
    return target, counts


def _by_choice(
    ctx: PassContext,
    case: Case,
    values: Values,
    drafts: list[list[int]],
    choices: list[list[int]],
) -> tuple[list[list[int]], list[int]]:
    """Keep drafts that are the target's choice, or near enough to it."""
    rows = case.inputs["row_B"].tolist()
    logits, options = values.outputs["logits"], ctx.acceptance.relaxed
    margins = case.inputs["relaxed_delta_R"] if options is not None else None
    target, counts = [], []
    for request, (row, ids, choice) in enumerate(zip(rows, drafts, choices, strict=True)):
        kept = 0
        while kept < len(ids) - 1 and (
            ids[kept + 1] == choice[kept]
            or (
                options is not None
                and margins is not None
                and (ctx.greedy_only or is_allowed(case, row, kept, ids[kept + 1]))
                and is_near(logits[request, kept], ids[kept + 1], options.topk, margins[row])
            )
        ):
            kept += 1
        target.append([*ids[1 : kept + 1], *choice[kept:]])
        counts.append(kept + 1)
    return target, counts


def _by_function(
    ctx: PassContext, case: Case, values: Values, drafts: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Call the user's acceptance function for one request at a time, on inputs that we compute from
    the logits and do not take from the graph.  Returns: target tokens and counts by request.
    """
    placed, num_drafts = place_call(ctx.config, case), ctx.config.num_draft_tokens
    state, rule = sampling_rows(case), ctx.acceptance.function
    assert rule is not None
    target, counts = [], []
    for request, ids in enumerate(drafts):
        one = slice(request, request + 1)
        row, start = placed.row_index[one], placed.start[one]
        logits = values.outputs["logits"][one]
        drawn = start + torch.arange(1, num_drafts + 2, dtype=torch.int32).unsqueeze(0)
        best = torch.tensor([[first_best(scores) for scores in logits[0]]], dtype=torch.int32)
        probs = filtered_probs_reference(logits, best, None, row, drawn, *state)
        judged = [*ids[1:], PAD].index(PAD)
        kept, weights = 0, probs[:, 0]
        if num_drafts:
            made = {
                "probs_BSV": probs,
                "logits_BSV": logits,
                "draft_probs_BKV": _draft_probs(case, row, ids, probs),
                "draft_BK": torch.tensor([ids[1:]], dtype=torch.int32),
                "num_drafts_B": torch.tensor([judged], dtype=torch.int32),
                "uniform_BK": _uniform(row, drawn[:, :-1], state[1]),
            }
            kept, weights = _asked(rule, case, int(row), made, ids)
        token = _token_after(weights, probs, kept, judged, (row, start, state[1]))
        behind = [*[max(draft, 0) for draft in ids[kept + 2 :]], token]
        target.append([*ids[1 : kept + 1], token, *behind][: num_drafts + 1])
        counts.append(kept + 1)
    return target, counts


def _uniform(row: Tensor, drawn: Tensor, whole: Tensor) -> Tensor:
    """A number for each draft, [1, K]."""
    steps = torch.arange(1, drawn.shape[1] + 1, dtype=torch.int32).unsqueeze(0)
    return uniform_reference(row, drawn, layout.STREAM_ACCEPT + 8 * steps, whole)


def _asked(
    rule: RuleFunction, case: Case, row: int, made: Mapping[str, Tensor], ids: list[int]
) -> tuple[int, Tensor]:
    """Drafts of a request that are kept, and weights of the token after them, or its id."""
    number, last = rule.function(**{name: made[name] for name in rule.inputs})
    kept = min(max(int(number), 0), int(made["num_drafts_B"]))
    forbidden = (i for i in range(kept) if not is_allowed(case, row, i, ids[i + 1]))
    cut = next(forbidden, kept)
    return cut, torch.zeros_like(last) if cut < kept and last.dim() == 2 else last


def _token_after(
    weights: Tensor, probs: Tensor, kept: int, judged: int, at: tuple[Tensor, Tensor, Tensor]
) -> int:
    """The token after the kept drafts, of weights or an id; `at`: state row, start, parameters."""
    if weights.dim() == 1:
        return min(max(int(weights), 0), probs.shape[-1] - 1)
    row, start, whole = at
    if not bool((weights > 0).any()):
        weights = probs[:, kept]
    stream = layout.STREAM_RECOVER if kept < judged else layout.STREAM_BONUS
    word = torch.full_like(start, stream + 8 * (kept + 1))
    return int(draw_weighted_reference(weights, row, start + kept + 1, word, whole))


def _draft_probs(case: Case, row: Tensor, ids: list[int], probs: Tensor) -> Tensor:
    """The distributions of the request's drafts, [1, K, V]."""
    num_drafts = len(ids) - 1
    if "draft_prob_RKV" in case.inputs:
        return case.inputs["draft_prob_RKV"][row, :num_drafts]
    known = torch.zeros_like(probs[:, :num_drafts])
    for place, draft in enumerate(ids[1:]):
        if draft >= 0:
            known[0, place, draft] = 1
    return known


def is_near(logits_V: Tensor, draft: int, topk: int, margin: Tensor) -> bool:
    """True where the draft is among the best tokens, and near enough to the best one."""
    if draft < 0 or not float(margin) > 0:
        return False
    order = sorted(range(len(logits_V)), key=lambda token: -float(logits_V[token]))
    wide = torch.promote_types(logits_V.dtype, torch.float32)
    probability_V = torch.softmax(logits_V.to(wide), -1)
    needed = probability_V[order[0]] - margin
    return draft in order[:topk] and bool(probability_V[draft] >= needed)


def _margins(options: Relaxed, case: Case, emitted: Sequence[Sequence[int]]) -> Tensor:
    """The margins after this call's tokens, in order."""
    margin_R = case.inputs["relaxed_delta_R"].clone()
    inputs = {name: tensor.tolist() for name, tensor in case.inputs.items() if tensor.dim() == 1}
    if case.phase == "decode":
        for row, tokens in zip(inputs["row_B"], emitted, strict=True):
            if row >= 0:
                _read(margin_R, row, tokens, options)
        return margin_R
    prompts = zip(inputs["ids_T"], inputs["position_T"], inputs["row_T"], strict=True)
    for token, position, row in prompts:
        if row >= 0:
            if position == 0:
                margin_R[row] = 0
            _read(margin_R, row, [token], options)
    for row, tokens in zip(inputs["commit_row_R"], emitted, strict=True):
        if row >= 0:
            _read(margin_R, row, tokens, options)
    return margin_R


def _read(margin_R: Tensor, row: int, tokens: Sequence[int], options: Relaxed) -> None:
    for token in tokens:
        if token == options.begin_thinking_token_id:
            margin_R[row] = options.delta
        elif token == options.end_thinking_token_id:
            margin_R[row] = 0


def first_best(scores_V: Tensor) -> int:
    """The lowest id among the best; the first NaN if there is one."""
    best_V = scores_V.isnan() if bool(scores_V.isnan().any()) else scores_V == scores_V.max()
    return int(best_V.nonzero()[0])
