"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.aten.cleanup import cleanup
from compilespec.passes.splice.builder import Splice
from tests.support.hand_graphs import call, code, graph_of
from tests.support.steps import ATEN, targets
from tests.support.untouched import check_left_alone


def test_cleanup_merges_equal_and_drops_dead_nodes():
    def function(x: Tensor, w: Tensor, unused: Tensor) -> Tensor:
        dead = torch.sin(x) @ unused
        del dead
        return (x @ w).cos() + (x @ w).cos()

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    gm, ctx = graph_of(function, x=("batch", x), w=("weight", w), unused=("weight", w.clone()))
    want = call(gm, x, w, w)
    assert cleanup(Splice(gm, ctx)) > 0
    assert "unused" not in ctx.inputs
    assert targets(gm).count(ATEN.mm.default) == targets(gm).count(ATEN.cos.default) == 1
    assert torch.equal(call(gm, x, w), want)


def test_cleanup_leaves_a_graph_of_distinct_nodes_alone():
    gm, ctx = graph_of(lambda x, y: (x + 1) * (y + 1) * (x + 1.5) * x.sum(0) * x.sum(1),
                       x=("batch", torch.ones(3, 3)), y=("batch", torch.ones(3, 3)))  # fmt: skip
    before = code(gm)
    assert cleanup(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_cleanup_merges_nothing_across_writes():
    """Two reads of a cache around a write are different values, through its views as well."""

    def function(cache: Tensor, index: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        first, seen = cache.cos(), cache.view(-1).cos()
        cache.index_put_((index,), value)
        second, again = cache.cos(), cache.view(-1).cos()
        cache.index_put_((index,), value)  # writes are never merged or dropped either
        return first, second, seen, again

    cache, index, value = torch.randn(4, 2), torch.tensor([1]), torch.randn(1, 2)
    gm, ctx = graph_of(
        function, cache=("cache", cache), index=("batch", index), value=("batch", value)
    )
    want = call(gm, cache, index, value)
    cleanup(Splice(gm, ctx))
    got = call(gm, cache, index, value)
    assert all(map(torch.equal, got, want))
    assert not torch.equal(got[0], got[1])
    assert not torch.equal(got[2], got[3])
    assert targets(gm).count(ATEN.index_put_.default) == 2


def test_cleanup_drops_writes_that_only_dead_code_read():
    """What a model writes in place on its way to a result that nobody wants, through a view too."""

    def function(x: Tensor, cache: Tensor) -> Tensor:
        top = x.cos()
        top.div_(top.sum())
        spread = torch.empty_like(x).view(-1)
        spread.index_put_((torch.arange(12),), (top * 3).view(-1))
        dead = spread.view(3, 4) + top
        kept = x.sin()
        kept.view(-1).mul_(2.0)
        cache.add_(kept)
        del dead
        return kept

    x, cache = torch.randn(3, 4), torch.zeros(3, 4)
    gm, ctx = graph_of(function, x=("batch", x), cache=("cache", cache))
    want, written = call(gm, x, cache).clone(), cache.clone()
    assert cleanup(Splice(gm, ctx)) > 0
    assert not {ATEN.div_.Tensor, ATEN.index_put_.default, ATEN.cos.default} & set(targets(gm))
    assert torch.equal(call(gm, x, cache.zero_()), want)
    assert torch.equal(cache, written)


def test_cleanup_keeps_temporaries_apart_that_are_written():
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        first.add_(x)
        return first, second

    x = torch.randn(3)
    gm, ctx = graph_of(function, x=("batch", x))
    cleanup(Splice(gm, ctx))
    first, second = call(gm, x)
    assert torch.equal(first, x)
    assert torch.equal(second, torch.zeros(3))


def test_cleanup_keeps_random_draws_apart():
    gm, ctx = graph_of(
        lambda x: (torch.rand_like(x), torch.rand_like(x)), x=("batch", torch.ones(8))
    )
    cleanup(Splice(gm, ctx))
    first, second = call(gm, torch.ones(8))
    assert not torch.equal(first, second)


def test_nodes_that_differ_and_are_used_stay() -> None:
    x = torch.ones(3, 3)
    case = graph_of(lambda x, y: (x + 1) * (y + 1) * (x + 1.5) * x.sum(0), x=("batch", x),
                    y=("batch", x))  # fmt: skip
    check_left_alone("cleanup", case)
