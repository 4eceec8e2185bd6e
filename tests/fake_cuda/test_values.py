"""Values on the fake device: of operators, of products that the CPU lacks, of Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tools.fake_cuda import device

pytestmark = pytest.mark.fake_cuda
ROOT = Path(__file__).resolve().parents[2]


def test_a_captured_model_replays_other_inputs() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 100)).requires_grad_(False)
    inputs = [torch.randn(4, 16) for _ in range(4)]
    wanted = [model(given).argmax(-1).tolist() for given in inputs]
    model.cuda()
    x = inputs[0].cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x).argmax(-1)
    for given, want in zip(inputs, wanted, strict=True):
        x.copy_(given)
        graph.replay()
        assert out.tolist() == want
    assert any("aten::addmm" in node for node in device.nodes(graph))
    assert device.faults() == []


@pytest.mark.parametrize("is_rowwise", [False, True], ids=["tensor", "rows"])
def test_products_in_float8(is_rowwise: bool) -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    scale_a = torch.rand(32, 1) + 0.5 if is_rowwise else torch.tensor(0.5)
    scale_b = torch.rand(1, 48) + 0.5 if is_rowwise else torch.tensor(2.0)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    got = torch._scaled_mm(
        a.cuda(), b.cuda().t(), scale_a.cuda(), scale_b.cuda(), out_dtype=torch.bfloat16
    )
    want = (a.double() @ b.double().t()) * scale_a * scale_b
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-2, atol=1e-2)


def test_grouped_products() -> None:
    a = torch.randn(40, 32).bfloat16()
    weights, ends = torch.randn(3, 32, 48).bfloat16(), torch.tensor([8, 8, 32], dtype=torch.int32)
    got = torch._grouped_mm(a.cuda(), weights.cuda(), offs=ends.cuda()).cpu()
    starts = [0, 8, 8]
    for group, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        torch.testing.assert_close(got[start:end], a[start:end] @ weights[group])


def test_a_triton_kernel_is_interpreted_in_replays() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)

    a, b, out = torch.arange(1000.0).cuda(), torch.ones(1000).cuda(), torch.zeros(1000).cuda()

    def launch() -> Tensor:
        add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](a, b, out, 1000, BLOCK=256)
        return out

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    b.fill_(7)
    graph.replay()
    assert torch.equal(out.cpu(), torch.arange(1000.0) + 7)
    assert "kernel add" in device.nodes(graph)


def test_a_place_outside_a_tensor_is_a_fault() -> None:
    x, index = torch.ones(8, device="cuda"), torch.tensor([9], device="cuda")
    x.index_select(0, index)
    torch.cuda.synchronize()
    assert any("aten::index_select" in line for line in device.faults())


def test_expandable_segments() -> None:
    """In a new process, which reads the setting at its start: growth, a capture, and an end."""
    script = (
        "import torch; from tools.fake_cuda import device; device.attach()\n"
        "x = torch.ones(3 << 20, device='cuda'); y = torch.cat([x, x + 1])\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): z = y * 2\n"
        "graph.replay(); total = int(z.sum().item())\n"
        "del x, y; torch.cuda.empty_cache()\n"
        "print(total, [line.split()[1] for line in device.allocations()], device.faults())\n"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split(maxsplit=1)[0] == str(6 * (3 << 20))
    assert "cuMemCreate" in done.stdout
    assert done.stdout.rstrip().endswith("[]")
