"""When an earlier capture is taken again, and when it must not be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compilespec.program import Traced
from compilespec.tracing import reuse
from compilespec.tracing.capture import trace_call
from compilespec.tracing.fingerprint import Fingerprint
from compilespec.tracing.target import trace_target
from tests.support.models import tiny_target

SCALE = 2.0  # read by `Scaled.forward`


def shift(x: Tensor) -> Tensor:
    return x + 1


class Scaled(nn.Module):
    """Reads a global, calls a function and holds attributes."""

    def __init__(self, width: int = 5, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.settings = {"flip": False, **attributes}

    def forward(self, x: Tensor) -> Tensor:
        y = shift(self.linear(x)) * SCALE
        return y.flip(0) if self.settings["flip"] else y


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path))
    reuse.forget_captures()
    yield
    reuse.forget_captures()


def trace(module: nn.Module, function: Callable[[Tensor], Tensor] | None = None) -> Traced:
    def call(x: Tensor) -> Tensor:
        return module(x) if function is None else function(module(x))

    width = next(module.parameters()).shape[-1]
    return trace_call(module, call, {"x": (torch.zeros(3, width), (0,))}, name="one")


def computes_what_the_module_does(traced: Traced, module: nn.Module) -> bool:
    x = torch.randn(4, next(module.parameters()).shape[-1])
    with torch.no_grad():
        return torch.equal(traced.graph_module(*traced.bind(x=x))[0], module(x))


def test_a_module_like_an_earlier_one_is_not_traced():
    first, second = trace(one := Scaled()), trace(other := Scaled())
    assert (first.reused, second.reused) == (False, True)
    assert first.why_traced
    assert not second.why_traced
    assert first.graph_module.code == second.graph_module.code
    assert first.graph_module is not second.graph_module
    for traced, module in ((first, one), (second, other)):
        assert computes_what_the_module_does(traced, module)
        weight = traced.weights["one.linear.weight"]
        assert weight.data_ptr() == module.linear.weight.data_ptr()


def test_what_is_done_to_a_capture_stays_out_of_later_ones():
    first = trace(Scaled())
    nodes = list(first.graph_module.graph.nodes)
    nodes[-2].meta["custom"] = {"pass": "mine"}
    nodes[-1].args = ((nodes[0],),)
    second = trace(module := Scaled())
    assert second.reused
    assert computes_what_the_module_does(second, module)
    assert {n.meta["custom"]["pass"] for n in second.graph_module.graph.nodes} == {"trace"}


class Other(Scaled):
    pass


def _tied(module: Scaled) -> Scaled:
    module.linear.bias = nn.Parameter(module.linear.weight[0].detach().clone())
    module.again = module.linear
    return module


@pytest.mark.parametrize(
    "changed",
    [
        lambda: Scaled(flip=True),
        lambda: Scaled(width=7),
        lambda: Scaled(more=1),
        lambda: Scaled().double(),
        lambda: Scaled().requires_grad_(False),
        lambda: Other(),
        lambda: _tied(Scaled()),
    ],
    ids=["attribute", "width", "another", "dtype", "flag", "subclass", "alias"],
)
def test_a_module_that_differs_is_traced(changed):
    trace(Scaled())
    module = changed()
    traced = trace(module)
    assert not traced.reused
    if next(module.parameters()).dtype == torch.float32:
        assert computes_what_the_module_does(traced, module)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (sys.modules[__name__], "SCALE", 3.0),
        (sys.modules[__name__], "shift", lambda x: x + 2),
        (Scaled, "forward", lambda self, x: self.linear(x)),
        (nn.Linear, "forward", lambda self, x: x @ self.weight),
        (nn.functional, "linear", lambda x, w, b: x @ w),
        (Tensor, "flip", lambda self, dims: self),
    ],
    ids=["global", "function", "method", "method of torch", "function of torch", "of tensors"],
)
def test_code_that_was_replaced_is_traced(monkeypatch, place, name, value):
    trace(Scaled())
    monkeypatch.setattr(place, name, value)
    traced = trace(module := Scaled())
    assert not traced.reused
    assert computes_what_the_module_does(traced, module)
    monkeypatch.undo()
    traced = trace(module := Scaled())
    assert traced.reused
    assert computes_what_the_module_does(traced, module)


def test_what_the_call_closes_over_counts():
    def times(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    assert not trace(Scaled(), times(2.0)).reused
    assert not trace(Scaled(), times(3.0)).reused
    assert trace(Scaled(), times(2.0)).reused


@pytest.mark.parametrize("setting", ["dtype", "precision", "dynamo"])
def test_settings_of_torch_count(setting):
    trace(Scaled())
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
        if setting == "precision":
            torch.set_float32_matmul_precision("medium")
        with torch._dynamo.config.patch(specialize_int=setting == "dynamo"):
            assert not trace(Scaled().float()).reused
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])
    assert trace(Scaled()).reused


def _hooked(module: Scaled) -> Scaled:
    module.linear.register_forward_hook(lambda module, args, output: output * 2)
    return module


def _with_tensor(module: Scaled) -> Scaled:
    module.table = torch.randn(5)
    module.forward = lambda x: x * module.table + module.linear(x)
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: _hooked(Scaled()), "hooks"),
        (lambda: Scaled(lock=threading.Lock()), "settings.lock is a _thread.lock"),
        (lambda: _with_tensor(Scaled()), "no parameter or buffer"),
    ],
    ids=["hook", "lock", "tensor"],
)
def test_what_cannot_be_told_is_traced_every_time(make, why):
    for _ in range(2):
        traced = trace(module := make())
        assert not traced.reused
        assert why in traced.why_traced
        assert computes_what_the_module_does(traced, module)


def test_a_mode_of_torch_is_traced_every_time():
    with torch.device("cpu"):
        for _ in range(2):
            traced = trace(Scaled())
            assert not traced.reused
            assert "mode" in traced.why_traced


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_models_of_transformers_are_traced_once(family):
    first = trace_target(tiny_target(family, num_layers=1))
    model = tiny_target(family, seed=1, num_layers=1)
    second = trace_target(model)
    assert (first.reused, second.reused) == (False, True), second.why_traced
    assert first.graph_module.code == second.graph_module.code
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, weight in second.weights.items():
        assert weight.data_ptr() == known[name.removeprefix("target.")].data_ptr()
    assert trace_target(model).reused  # tracing leaves no marks that count
    if family == "llama":
        model.model.norm.variance_epsilon = 0.5
        assert not trace_target(model).reused


@pytest.mark.parametrize("value", [2.0, 7.0])
def test_a_module_that_was_met_is_looked_at_for_other_names(monkeypatch, value):
    def digest() -> str:
        found, space = Fingerprint(), {"__name__": "one", "here": sys.modules[__name__]}
        for name in ("shift", "SCALE"):
            found.add_globals(space, ["here", name])
        return found.hexdigest()

    before = digest()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
    assert (digest() == before) == (value == 2.0)
