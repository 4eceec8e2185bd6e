"""Computes what a step must say of its drafts, one request at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.program import PAD


def confidence_of_match(length: int) -> int:
    """9 to 15 by the length of a match, 0 for none."""
    for confidence, least in ((15, 13), (14, 9), (13, 6)):
        if length >= least:
            return confidence
    return min(length, 4) + 8 if length > 0 else 0


def confidence_of_chances(chances: Sequence[float]) -> int:
    """1 to 8 by the geometric mean of the drafts' probabilities."""
    mean = math.exp(sum(math.log(max(chance, 1e-30)) for chance in chances) / len(chances))
    return 1 + min(7, int(8 * mean))


def evidence_of(drafts_BK: Tensor, confidences: Sequence[int]) -> Tensor:
    """The number of drafts before the first PAD, and 256 times the confidence."""
    counts = [
        sum(1 for _ in itertools.takewhile(lambda token: token != PAD, row))
        for row in drafts_BK.tolist()
    ]
    values = [count + 256 * sure for count, sure in zip(counts, confidences, strict=True)]
    return torch.tensor(values, dtype=torch.int32, device=drafts_BK.device)


def report_evidence(before: Before, ctx: PassContext, case: Case) -> Values:
    """Of each request the tokens it has, its evidence, and whether the next draft was right."""
    values, judged = before(case.inputs), ctx.config.num_draft_tokens
    counts = values.outputs["num_emitted_B"].tolist()
    outcome = []
    for request, (count, evidence) in enumerate(
        zip(counts, values.roles["evidence"].tolist(), strict=True)
    ):
        goes_on = False
        if case.phase == "decode" and judged + 1 < case.inputs["tokens_RS"].shape[1]:
            row = int(case.inputs["row_B"][request])  # -1, the spare row, is the last one
            following = int(case.inputs["tokens_RS"][row, judged + 1])
            right = int(values.roles["target"][request, judged])
            goes_on = count == judged + 1 and following == right
        outcome.append(count + 256 * evidence + 2**24 * goes_on)
    device = values.outputs["num_emitted_B"].device
    outputs = {
        "emitted_BS": values.outputs["emitted_BS"],
        "outcome_B": torch.tensor(outcome, dtype=torch.int32, device=device),
    }
    others = {n: v for n, v in values.outputs.items() if n not in (*outputs, "num_emitted_B")}
    return dataclasses.replace(values, outputs={**outputs, **others})


__all__ = ["confidence_of_chances", "confidence_of_match", "evidence_of", "report_evidence"]
