"""read_long_rows: an argmax or topk over long rows becomes an operator of ours."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from compilespec.ops.device import CPU, CUDA, traits_of
from compilespec.passes.aten.read_long_rows import read_long_rows
from compilespec.passes.splice.builder import Splice
from tests.support.hand_graphs import call, code, graph_of
from tests.support.untouched import check_left_alone

ATEN = torch.ops.aten
MODULE = sys.modules[read_long_rows.__module__]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAST_COLUMNS_ON_GPU", 16)
    monkeypatch.setattr(MODULE, "LEAST_COLUMNS_ON_CPU", 16)


def best(x: Tensor) -> Tensor:
    return x.argmax(-1).to(torch.int32)


def graph(function: Any, x: Tensor, *, on_gpu: bool = True) -> Any:
    gm, ctx = graph_of(function, x=("batch", x))
    ctx.traits = CUDA if on_gpu else CPU
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
    assert read_long_rows(Splice(gm, ctx)) == 1
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
    assert read_long_rows(Splice(gm, ctx)) == 0
    assert code(gm) == before


def best_three(x: Tensor) -> tuple[Tensor, ...]:
    return x.topk(3, -1)


def best_probabilities(x: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten._log_softmax(x, -1, False).topk(3, -1)


def best_of_read_probabilities(x: Tensor) -> tuple[Tensor, ...]:
    log_probs = torch.ops.aten._log_softmax(x, -1, False)
    return (*log_probs.topk(3, -1), log_probs)


@pytest.mark.parametrize("function", [best_three, best_probabilities, best_of_read_probabilities])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_best_few_are_found_on_the_cpu(function: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 40, 99).to(dtype)[..., 1:-1]
    gm, ctx = graph(function, x, on_gpu=False)
    assert read_long_rows(Splice(gm, ctx)) == 1
    for got, wanted in zip(call(gm, x), function(x), strict=True):
        torch.testing.assert_close(got, wanted)
    ours = gm.graph.find_nodes(op="call_function", target=torch.ops.compilespec.row_topk.default)
    assert ours[0].args[1:] == (3, function is best_probabilities)
    left = gm.graph.find_nodes(op="call_function", target=ATEN._log_softmax.default)
    assert len(left) == (function is best_of_read_probabilities)


def worst_three(x: Tensor) -> tuple[Tensor, ...]:
    return x.topk(3, -1, False)


def three_of_columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.topk(3, 0)


def three_of_few(x: Tensor) -> tuple[Tensor, ...]:
    return x[:, :15].topk(3, -1)


def three_of_halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.half().topk(3, -1)


@pytest.mark.parametrize(
    ("function", "on_gpu"),
    [(worst_three, False), (three_of_columns, False), (three_of_few, False),
     (three_of_halves, False), (best_three, True)],
)  # fmt: skip
def test_other_topks_are_left_alone(function: Any, on_gpu: bool) -> None:
    gm, ctx = graph(function, torch.randn(20, 20), on_gpu=on_gpu)
    before = code(gm)
    assert read_long_rows(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_other_devices_have_no_operator_of_it() -> None:
    gm, ctx = graph(best, torch.randn(20, 20))
    ctx.traits = traits_of(torch.device("meta"))
    before = code(gm)
    assert read_long_rows(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_short_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the limits as they are
    gm, ctx = graph_of(lambda x: x.argmax(-1), x=("batch", torch.randn(2, 8191)))
    ctx.traits = CUDA
    check_left_alone("read_long_rows", (gm, ctx))
