"""split_argmax: an argmax over a long row becomes an operator of ours."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from compilespec.passes.split_argmax import split_argmax
from tests.support.hand_graphs import call, code, graph_of

ATEN = torch.ops.aten
MODULE = sys.modules[split_argmax.__module__]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAST_COLUMNS", 16)


def best(x: Tensor) -> Tensor:
    return x.argmax(-1).to(torch.int32)


def graph(function: Any, x: Tensor, *, on_gpu: bool = True) -> Any:
    gm, ctx = graph_of(function, x=("batch", x))
    ctx.on_gpu, ctx.prepack = on_gpu, not on_gpu
    return gm, ctx


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("columns", [16, 17, 24, 97])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_first_of_the_best_is_found(columns: int, dtype: torch.dtype, on_gpu: bool) -> None:
    """Few values, so that ties are in a span and between spans; infinities; strided rows."""
    x = torch.randint(-2, 3, (3, 40, columns + 2)).to(dtype)[..., 1:-1]
    x[0, 0], x[0, 1] = -math.inf, math.inf
    x[0, 2, :-1] = -math.inf
    gm, ctx = graph(best, x, on_gpu=on_gpu)
    assert split_argmax(gm, ctx) == 1
    (got,) = [call(gm, x)]
    assert got.dtype == torch.int32
    assert torch.equal(got, best(x))
    assert not gm.graph.find_nodes(op="call_function", target=ATEN.argmax.default)


def short(x: Tensor) -> Tensor:
    return x[:, :15].argmax(-1)


def of_integers(x: Tensor) -> Tensor:
    return x.int().argmax(-1)


def kept_dimension(x: Tensor) -> Tensor:
    return x.argmax(-1, keepdim=True)


def over_rows(x: Tensor) -> Tensor:
    return x.argmax(0)


def over_everything(x: Tensor) -> Tensor:
    return x.argmax()


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "function", [short, of_integers, kept_dimension, over_rows, over_everything]
)
def test_others_are_left_alone(function: Any, on_gpu: bool) -> None:
    gm, ctx = graph(function, torch.randn(20, 20), on_gpu=on_gpu)
    before = code(gm)
    assert split_argmax(gm, ctx) == 0
    assert code(gm) == before


def test_other_devices_have_no_operator_of_it() -> None:
    gm, ctx = graph(best, torch.randn(20, 20))
    ctx.on_gpu = ctx.prepack = False
    before = code(gm)
    assert split_argmax(gm, ctx) == 0
    assert code(gm) == before
