"""Which operators are known to make the host wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import compilespec.ops.host_process  # noqa: F401  (registers the operator)
from compilespec import _torch_compat
from compilespec.lowering.host_waits import why_host_waits
from tools.without_gpu.steps import on_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
X, MASK, IDS = torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
HALF = torch.zeros(3, dtype=torch.bfloat16)
ELSEWHERE = torch.zeros(3, device="meta")  # stands for another kind of device


def graph(target: Any, *values: torch.Tensor, result: torch.Tensor = X) -> fx.GraphModule:
    """One call on placeholders; a list of indices after the first one."""
    made = fx.Graph()
    inputs = []
    for number, value in enumerate(values):
        inputs.append(made.placeholder(f"x{number}"))
        inputs[-1].meta["val"] = value
    is_index = "index" in str(target)
    args = (inputs[0], inputs[1:]) if is_index else tuple(inputs)
    node = made.call_function(target, args)
    node.meta["val"] = result
    made.output((node,))
    return fx.GraphModule(torch.nn.Module(), made)


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (aten.nonzero.default, [X]),
        (aten._local_scalar_dense.default, [X]),
        (aten.repeat_interleave.Tensor, [IDS]),
        (aten.index.Tensor, [X, MASK]),
        (aten._to_copy.default, [ELSEWHERE]),
        (aten.copy_.default, [X, ELSEWHERE]),
        (aten.index.Tensor, [ELSEWHERE, IDS]),
        (aten.add.Tensor, [ELSEWHERE, X]),
        (torch.ops.compilespec.host_process.default, [X]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)
def test_what_reads_numbers_on_the_host_is_named(target: Any, values: list[torch.Tensor]) -> None:
    why = why_host_waits(graph(target, *values), CPU)
    assert why.startswith(f"{target}: ")
    assert "\n" not in why


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (aten.index.Tensor, [X, IDS]),
        (aten._to_copy.default, [HALF]),
        (aten.copy_.default, [X, HALF]),
        (aten.where.self, [MASK, X, X]),
        (aten.argmax.default, [X]),
        (aten.where.self, [MASK, X, torch.zeros((), device="meta")]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)
def test_what_stays_on_the_device_is_not(target: Any, values: list[torch.Tensor]) -> None:
    assert why_host_waits(graph(target, *values), GPU) == ""


@pytest.mark.parametrize(
    ("sm", "result", "waits"),
    [((8, 0), HALF, True), ((8, 9), HALF, True), ((9, 0), HALF, False), ((9, 0), X, True),
     ((10, 0), HALF, False), ((12, 0), HALF, True)],
)  # fmt: skip
def test_grouped_products_wait_where_no_kernel_serves_them(
    sm: tuple[int, int], result: torch.Tensor, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the sizes of the groups on all GPUs but sm_9x and sm_10x, and in other dtypes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    gm = graph(aten._grouped_mm.default, X, X, result=result)
    assert bool(why_host_waits(gm, GPU)) == waits
    assert why_host_waits(gm, CPU) == ""


def test_a_stray_constant_of_the_host_stays_there_without_a_gpu() -> None:
    """A step that is traced without weights is moved to CUDA, and only what is its own."""
    mode = _torch_compat.fake_mode()
    fake = _torch_compat.fake_tensor(mode, torch.zeros(4, 3, device="meta"), (0,))

    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x[torch.arange(3, device="cpu")] + torch.arange(3, device=x.device),)

    gm = _torch_compat.retrace(fx.symbolic_trace(step), [fake], mode)
    moved = on_cuda(gm, [fake]).graph_module
    _, stray = moved.graph.find_nodes(op="placeholder")
    (own,) = moved.graph.find_nodes(op="call_function", target=aten.arange.default)
    assert [stray.meta["val"].device.type, own.meta["val"].device.type] == ["cpu", "cuda"]
    for graph in (gm, moved):
        assert "aten.index.Tensor: tensors of the host" in why_host_waits(graph, CPU)
