"""The loss of a drafter's hidden states against the target's probabilities, without an array of
[rows, V] in float32 in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compilespec.ops.device import traits_of

CHUNK_ROWS = 256  # logits in float32 at a time: 8 MiB where 8,192 ids can be drafted


def step_cost(
    hidden: Tensor, norm: nn.Module, head: Tensor, probs_BAV: Tensor, weight_BA: Tensor
) -> tuple[Tensor, Tensor]:
    """The cross entropy against the target's probabilities, summed over the rows of weight 1, and
    the draft ids [B, A] chosen there (0 elsewhere).

    The probabilities are not renormalised: a place counts by the mass that can be drafted.

    Args:
        hidden: [B, A, D], before the norm.
        head: [Vd, D].
    """
    places = weight_BA.nonzero(as_tuple=True)
    apply: Any = _CrossEntropy.apply
    total, chosen = apply(norm(hidden)[places], head, probs_BAV, *places)
    chosen_BA = torch.zeros(weight_BA.shape, dtype=torch.int64, device=weight_BA.device)
    chosen_BA[places] = chosen
    return total, chosen_BA


class _CrossEntropy(torch.autograd.Function):
    """The sum over rows, and each row's best id; the gradients are made along with it."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, head: Tensor, probs_BAV: Tensor, b_N: Tensor, a_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        kind = traits_of(rows_ND).kind
        mixed = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else rows_ND.dtype
        rows, weight = rows_ND.to(dtype), head.to(dtype)
        total = torch.zeros((), device=rows.device)
        best_N = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        slope_NV = torch.empty(len(rows), len(head), dtype=dtype, device=rows.device)
        for first in range(0, len(rows), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            probs = probs_BAV[b_N[part], a_N[part]]
            logits = (rows[part] @ weight.T).float()
            highest, best_N[part] = logits.max(-1)
            logits -= highest[:, None]
            mass, agreed = probs.sum(-1), torch.linalg.vecdot(probs, logits)
            scale = logits.exp_().sum(-1)
            total += (mass * scale.log() - agreed).sum()
            slope_NV[part] = logits.mul_((mass / scale)[:, None]).sub_(probs)
        wants_head = ctx.needs_input_grad[1]
        ctx.save_for_backward(
            (slope_NV @ weight).to(rows_ND.dtype),
            (slope_NV.T @ rows).to(head.dtype) if wants_head else None,
        )
        ctx.mark_non_differentiable(best_N)
        return total, best_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        rows_ND, head = ctx.saved_tensors
        return rows_ND * grad, None if head is None else head * grad, None, None, None
