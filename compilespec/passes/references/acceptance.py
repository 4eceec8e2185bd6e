"""Which drafts are accepted, one request at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.acceptance import Relaxed
from compilespec.errors import NotSupported
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.runner import PassContext
from compilespec.program import PAD


def splice_acceptance(before: Before, ctx: PassContext, case: Case) -> Values:
    """The tokens of this step by the program's rule, its forced count, and its state.

    Raises: NotSupported for a rule that has no reference.
    """
    if ctx.acceptance.rule not in ("strict", "relaxed"):
        raise NotSupported(f"acceptance {ctx.acceptance.rule!r} has no reference")
    values = before(case.inputs)
    logits = values.outputs["logits"]
    choices = [[first_best(scores) for scores in request] for request in logits]
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


def _judge(
    ctx: PassContext, case: Case, values: Values, choices: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Each request's tokens, and how many of them are emitted."""
    rows = case.inputs["row_B"].tolist()
    drafts = values.roles["ids"].tolist()
    if ctx.may_omit_drafts:  # its PAD drafts match nothing
        held = case.inputs["tokens_RS"].tolist()
        own = ctx.config.num_verify_tokens
        drafts = [held[row][:own] for row in rows]  # -1: the spare row
    if ctx.config.num_draft_tokens:
        held_back = [int(case.inputs["withheld_R"][row]) for row in rows]
        most = ctx.config.num_row_tokens - 1
        drafts = [
            [token if place <= most - count else PAD for place, token in enumerate(ids)]
            for ids, count in zip(drafts, held_back, strict=True)
        ]
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
                and is_near(logits[request, kept], ids[kept + 1], options.topk, margins[row])
            )
        ):
            kept += 1
        target.append([*ids[1 : kept + 1], *choice[kept:]])
        counts.append(kept + 1)
    force = ctx.acceptance.force_num_accepted
    if force:
        most = ctx.config.num_draft_tokens
        counts = [
            min(force, most) + 1 if row >= 0 else count
            for row, count in zip(rows, counts, strict=True)
        ]
    return target, counts


def is_near(logits_V: Tensor, draft: int, topk: int, margin: Tensor) -> bool:
    """Whether the draft is among the best tokens, and near enough to the best one."""
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
    """The lowest id among the best; the first NaN, where there is one."""
    best_V = scores_V.isnan() if bool(scores_V.isnan().any()) else scores_V == scores_V.max()
    return int(best_V.nonzero()[0])
