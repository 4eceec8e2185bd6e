"""fuse_head_argmax, and the greedy step in which nothing but the argmax reads logits."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec.methods.eagle3 import random_head
from compilespec.methods.registry import get_method
from compilespec.ops.device import CPU, CUDA
from compilespec.passes.aten.fuse_head_argmax import fuse_head_argmax, pays
from compilespec.passes.order import PassContext, rewrite_phase
from compilespec.passes.splice.builder import Splice
from compilespec.program import ByStep, SpecProgram
from compilespec.tracing.target import trace_target
from tests.support.hand_graphs import HAND_CONFIG, call, code, graph_of
from tests.support.models import VOCAB, target_info, tiny_target
from tests.support.untouched import check_left_alone

ATEN = torch.ops.aten
FUSED = torch.ops.compilespec.argmax_linear.default


def head_graph(
    function: Callable[..., Any],
    *,
    bias: bool = False,
    fuse: bool | None = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    inputs = {"x": torch.randn(2, 3, 8, dtype=dtype), "w": torch.randn(11, 8, dtype=dtype)}
    if bias:
        inputs["b"] = torch.randn(11, dtype=dtype)
    gm, ctx = graph_of(
        function, **{name: ("batch" if name == "x" else "weight", t) for name, t in inputs.items()}
    )
    ctx.traits = dataclasses.replace(CUDA, fuses_heads=fuse)
    return gm, ctx, list(inputs.values())


def plain(x: Tensor, *head: Tensor) -> Tensor:
    return nn.functional.linear(x, *head).argmax(-1).to(torch.int32)


def widened(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w).double().argmax(-1)


def moved(x: Tensor, w: Tensor) -> Tensor:
    logits = nn.functional.linear(x[:1], w)
    return logits.squeeze(0).unsqueeze(1).argmax(2)


def best_logit_too(x: Tensor, w: Tensor) -> Any:
    """The gathered logit is the best one, which the operator gives."""
    logits = nn.functional.linear(x, w).double()
    best = logits.argmax(-1)
    return best, logits.gather(-1, best.unsqueeze(-1)).squeeze(-1).isnan()


@pytest.mark.parametrize(
    ("function", "bias"),
    [(plain, False), (plain, True), (widened, False), (moved, False), (best_logit_too, False)],
)
def test_a_head_whose_argmax_alone_is_wanted_is_fused(function, bias):
    gm, ctx, inputs = head_graph(function, bias=bias)
    want = call(gm, *inputs)
    assert fuse_head_argmax(Splice(gm, ctx)) == 1
    got = call(gm, *inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    targets = [node.target for node in gm.graph.nodes]
    assert FUSED in targets
    for gone in (ATEN.mm.default, ATEN.addmm.default, ATEN.argmax.default, ATEN.t.default):
        assert gone not in targets
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            assert 11 not in node.meta["val"].shape


def read_twice(x: Tensor, w: Tensor) -> Any:
    logits = nn.functional.linear(x, w)
    return logits.argmax(-1), logits.sum()


def other_logits_gathered(x: Tensor, w: Tensor) -> Any:
    logits = nn.functional.linear(x, w)
    best = logits.argmax(-1)
    return best, logits.gather(-1, best.unsqueeze(-1) - 1)


def kept_dimension(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w).argmax(-1, keepdim=True)


def over_tokens(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w).argmax(1)


def over_everything(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w).argmax()


def narrowed(x: Tensor, w: Tensor) -> Tensor:
    """Rounding makes ties: another index may come first."""
    return nn.functional.linear(x, w).bfloat16().argmax(-1)


def capped(x: Tensor, w: Tensor) -> Tensor:
    """Rising, but it rounds: ties again."""
    return nn.functional.linear(x, w).tanh().argmax(-1)


def rows_split(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w[:10]).view(12, 5).argmax(-1)


def no_weight(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w + 1).argmax(-1)


OTHERS = (read_twice, other_logits_gathered, kept_dimension, over_tokens, over_everything, narrowed,
          capped, rows_split, no_weight)  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_other_heads_are_left_alone(function):
    gm, ctx, _ = head_graph(function)
    before = code(gm)
    assert fuse_head_argmax(Splice(gm, ctx)) == 0
    assert code(gm) == before


@pytest.mark.parametrize("fuse", [None, False])
def test_it_is_off_where_nobody_asks(fuse):
    """Without a switch, on the CPU."""
    gm, ctx, _ = head_graph(plain, fuse=fuse)
    before = code(gm)
    assert fuse_head_argmax(Splice(gm, ctx)) == 0
    assert code(gm) == before


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("most_rows", "num_outputs", "dtype", "fused"),
    [
        (1, 128256, BF16, True),
        (128, 8192, torch.float16, True),
        (129, 128256, BF16, False),
        (48, 8191, BF16, False),
        (6, 128256, torch.float32, False),
        (math.inf, 128256, BF16, False),  # nobody knows how many
    ],
)
def test_sizes_decide(most_rows, num_outputs, dtype, fused):
    assert pays(most_rows, num_outputs, dtype) == fused


@pytest.mark.parametrize(("limit", "fused"), [(6, 1), (5, 0)])
@pytest.mark.parametrize("fuse", [None, False])
def test_on_a_gpu_sizes_decide_at_the_largest_batch(monkeypatch, fuse, limit, fused):
    """Nothing is run for it: the weights have no data, and no device is asked to finish."""
    module = sys.modules[fuse_head_argmax.__module__]
    monkeypatch.setattr(module, "MOST_ROWS", limit)
    monkeypatch.setattr(module, "LEAST_OUTPUTS", 11)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    gm, ctx, _ = head_graph(plain, fuse=fuse, dtype=BF16)
    ctx.weights = {name: weight.to("meta") for name, weight in ctx.weights.items()}
    assert fuse_head_argmax(Splice(gm, ctx)) == (fused if fuse is None else 0)


@pytest.mark.parametrize(("max_batch_size", "fused"), [(42, 3), (43, 2), (129, 0)])
def test_each_head_is_judged_by_its_own_rows(monkeypatch, max_batch_size, fused):
    """The target's head has three rows a request, at most 128; each of the drafts' one."""
    monkeypatch.setattr(sys.modules[fuse_head_argmax.__module__], "LEAST_OUTPUTS", VOCAB)
    model = tiny_target("llama", BF16, num_layers=1)
    info = target_info(model, 64)
    head = random_head(info, aux_layers=(0,), num_draft_tokens=2).eval()
    config = dataclasses.replace(HAND_CONFIG, max_batch_size=max_batch_size, dtype=BF16)
    ctx = PassContext(
        phase="decode", config=config, capabilities=get_method("eagle3").capabilities,
        target=trace_target(model), draft=head.capture(config, info), drafter=head,
        kind="greedy", traits=CUDA,
    )  # fmt: skip
    nodes = rewrite_phase(ctx, keep_graphs=False).finish().graph_module.graph.nodes
    assert sum(node.target is FUSED for node in nodes) == fused


# --- the greedy step ---


@pytest.fixture(scope="module")
def parts() -> Any:
    model = tiny_target("llama", torch.float64, num_layers=2)
    head = random_head(target_info(model, 128), aux_layers=(0, 1, 2), num_draft_tokens=3)
    return trace_target(model), head.eval(), target_info(model, 128)


@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_greedy_step_writes_no_logits(parts, phase):
    """Target and drafter: a fused head each pass, no operator of sampling, and verify agrees."""
    target, head, info = parts
    config = dataclasses.replace(HAND_CONFIG, num_draft_tokens=3, dtype=torch.float64)
    ctx = PassContext(
        phase=phase, config=config, capabilities=get_method("eagle3").capabilities, target=target,
        draft=head.capture(config, info), drafter=head, kind="greedy",
        traits=dataclasses.replace(CPU, fuses_heads=True),
    )  # fmt: skip
    graph = rewrite_phase(ctx, keep_graphs=True)
    program = SpecProgram(
        target=target, capabilities=ctx.capabilities, config=config, graphs=ByStep([graph]),
        buffers=tuple(ctx.buffers.values()), weights=ctx.weights,
    )  # fmt: skip
    nodes = graph.graph_module.graph.nodes
    assert sum(node.target is FUSED for node in nodes) == 1 + 3
    for node in nodes:
        assert "sample" not in str(node.target)
        assert "draw" not in str(node.target)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.op == "call_function" and value.dim() > 1:
            assert value.shape[-1] != VOCAB
    assert {"sampling_RF", "sampling_RI", "bias_RV", "context_RL", "logprob_RSN"}.isdisjoint(
        ctx.buffers
    )
    report = compilespec.verify(program, batch_sizes=(config.max_batch_size,))
    assert report.ok, str(report)


def test_logits_with_another_reader_are_left_alone() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(x, w)
        return logits.argmax(-1), logits.amax(-1)

    gm, ctx = graph_of(function, x=("batch", torch.randn(2, 4)), w=("weight", torch.randn(5, 4)))
    ctx.traits = dataclasses.replace(ctx.traits, fuses_heads=True)
    check_left_alone("fuse_head_argmax", (gm, ctx))
