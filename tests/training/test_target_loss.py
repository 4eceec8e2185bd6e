"""The loss in chunks is the plain formula, and so are its gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compilespec.training.target_loss import CHUNK_ROWS, step_cost

PLACES = (3, CHUNK_ROWS // 2 + 7)  # more than a chunk, and no multiple


def plain_cost(
    hidden: Tensor, norm: nn.Module, head: Tensor, probs_BAV: Tensor, weight_BA: Tensor
) -> tuple[Tensor, Tensor]:
    logits = F.linear(norm(hidden), head).float()
    cost_BA = -(probs_BAV * F.log_softmax(logits, -1)).sum(-1)
    return (cost_BA * weight_BA).sum(), logits.argmax(-1)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_the_loss_in_chunks_is_the_plain_one(share: float, mixed: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(*PLACES, 24, generator=rng)
    weights = torch.randn(77, 24, generator=rng)
    # not all mass can be drafted, and the probabilities are those of some places of more
    probs_BAV = torch.rand(PLACES[0], PLACES[1] + 2, 77, generator=rng).softmax(-1)[:, 1:-1] * 0.9
    weight_BA = (torch.rand(PLACES, generator=rng) < share).float()
    found = []
    for cost in (plain_cost, step_cost):
        hidden, head = values.clone().requires_grad_(), weights.clone().requires_grad_()
        norm = nn.LayerNorm(24)
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            total, chosen = cost(hidden, norm, head, probs_BAV, weight_BA)
        (0.3 * total).backward()
        gradients = [hidden.grad, head.grad, norm.weight.grad]
        found.append([total.detach(), chosen * weight_BA, *gradients])
    rtol, atol = (2e-2, 2e-2) if mixed else (1e-4, 1e-5)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, head = torch.randn(1, 4, 8, requires_grad=True), torch.randn(5, 8)
    total, _ = step_cost(hidden, nn.Identity(), head, torch.full((1, 4, 5), 0.2), torch.ones(1, 4))
    total.backward()
    assert head.grad is None
    assert hidden.grad is not None
