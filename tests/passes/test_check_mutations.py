"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.errors import PassError
from compilespec.passes.aten.check_mutations import check_mutations
from compilespec.passes.splice.builder import Splice
from tests.support.hand_graphs import code, graph_of
from tests.support.untouched import check_left_alone


def test_check_mutations_allows_buffers_and_temporaries():
    def function(state: Tensor, cache: Tensor, x: Tensor) -> Tensor:
        state.view(-1).add_(1)
        cache[0].copy_(x)
        return torch.zeros_like(x).add_(x)

    specs = {
        "state": ("state", torch.zeros(2)),
        "cache": ("cache", torch.zeros(2, 3)),
        "x": ("batch", torch.ones(3)),
    }
    gm, ctx = graph_of(function, **specs)
    before = code(gm)
    assert check_mutations(Splice(gm, ctx)) == 2
    assert code(gm) == before


@pytest.mark.parametrize("kind", ["weight", "batch"])
def test_check_mutations_refuses_other_writes(kind):
    gm, ctx = graph_of(lambda w: w.view(-1)[1:].mul_(2), w=(kind, torch.ones(2, 2)))
    with pytest.raises(PassError, match="the graph writes w, which is neither state nor cache"):
        check_mutations(Splice(gm, ctx))


def test_writes_of_buffers_and_temporaries_stay() -> None:
    def function(state: Tensor, x: Tensor) -> Tensor:
        state.add_(1)
        return torch.zeros_like(x).add_(x)

    case = graph_of(function, state=("state", torch.zeros(2)), x=("batch", torch.ones(3)))
    check_left_alone("check_mutations", case)
