"""packed_linear: its definition, bitwise equal rows, its place in a compiled graph."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compilespec.ops import pack_weight, packed_linear
from compilespec.ops.packed_linear import packed_linear_reference, unpack_weight

TOLERANCE = {
    torch.float32: 2e-6,
    torch.float64: 1e-14,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}  # relative to |x||w|
DTYPES = list(TOLERANCE)
SHAPES = [(1, 1), (15, 7), (16, 16), (33, 70), (100, 385), (256, 800)]  # N, K


def make_layer(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    weight_NK = torch.randn(shape, generator=generator).to(dtype)
    return weight_NK, torch.randn(shape[0], generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_is_lossless(shape, dtype):
    weight_NK, _ = make_layer(shape, dtype)
    packed = pack_weight(weight_NK)
    assert packed.is_contiguous()
    assert packed.dtype == dtype
    strips = (-(-shape[1] // 2), 16, 2) if dtype == torch.bfloat16 else (shape[1], 16)
    assert packed.shape[1:] == strips
    assert torch.equal(unpack_weight(packed, *shape), weight_NK)
    assert torch.equal(pack_weight(weight_NK.t().contiguous().t()), packed)  # strides do not matter
    shifted = torch.cat([torch.zeros(1, dtype=dtype), weight_NK.flatten()])[1:].view(shape)
    assert torch.equal(pack_weight(shifted), packed)  # nor where in its memory a weight begins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 2), (16, 1), (32, 6)], ids=str)
def test_a_packed_weight_has_memory_of_its_own(shape, dtype):
    weight_NK, _ = make_layer(shape, dtype)
    packed = pack_weight(weight_NK)
    before = packed.clone()
    weight_NK.zero_()
    assert torch.equal(packed, before)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 24, 200], ids="T{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_linear(shape, dtype, rows):
    weight_NK, bias_N = make_layer(shape, dtype)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
    wide = torch.float64
    for bias in (None, bias_N):
        got = packed_linear(x, pack_weight(weight_NK), bias, shape[0])
        want = F.linear(x.to(wide), weight_NK.to(wide), None if bias is None else bias.to(wide))
        size = F.linear(x.to(wide).abs(), weight_NK.to(wide).abs()) + 1
        assert got.dtype == dtype
        assert got.shape == (rows, shape[0])
        assert got.is_contiguous()
        assert ((got.to(wide) - want).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_dtypes_and_strides(x_dtype, weight_dtype):
    weight_NK, bias_N = make_layer((33, 70), weight_dtype)
    packed = pack_weight(weight_NK)
    base = torch.randn(3, 5, 140).to(x_dtype)
    for x in (
        base[..., :70],
        base[:, 2, 70:],
        base[0, 0, :70],
        base.transpose(0, 1)[..., ::2],
        base[:0, :, :70],
    ):
        got = packed_linear(x, packed, bias_N.float(), 33)
        torch.testing.assert_close(
            got, packed_linear_reference(x, packed, bias_N.float(), 33), rtol=1e-2, atol=1e-4
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_bitwise_independent(dtype, kernels, threads):
    weight_NK, bias_N = make_layer((300, 800), dtype)
    packed = pack_weight(weight_NK)
    x = torch.randn(450, 800).to(dtype)
    threads(1)
    alone = torch.cat([packed_linear(x[i : i + 1], packed, bias_N, 300) for i in range(450)])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for rows in (*range(1, 14), 24, 97, 193, 450):
            assert torch.equal(packed_linear(x[:rows], packed, bias_N, 300), alone[:rows]), (
                num_threads,
                rows,
            )


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0], ids=str)
def test_special_values_stay_in_their_row_and_column(special, kernels):
    weight_NK = torch.ones(20, 8, dtype=torch.bfloat16)
    x = torch.ones(5, 8, dtype=torch.bfloat16)
    clean = packed_linear(x, pack_weight(weight_NK), None, 20)
    x[2, 3] = special
    got = packed_linear(x, pack_weight(weight_NK), None, 20)
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert torch.equal(got[2].nan_to_num(), F.linear(x, weight_NK)[2].nan_to_num())


def test_wrong_shapes_are_refused(kernels):
    packed = pack_weight(torch.ones(20, 8))
    for x, out_features in (
        (torch.ones(2, 9), 20),
        (torch.ones(2, 8), 40),
        (torch.ones(2, 8).double(), 20),
    ):
        with pytest.raises(RuntimeError, match="packed_linear"):
            packed_linear(x, packed, None, out_features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    weight_NK, bias_N = make_layer((33, 70), dtype)
    packed = pack_weight(weight_NK)
    for weight in (weight_NK, weight_NK[:32, :6]):  # what is missing is padded; nothing is missing
        torch.library.opcheck(torch.ops.compilespec.pack_weight.default, (weight,))
    for shape in ((70,), (2, 3, 70), (0, 70)):
        arguments = (torch.randn(shape).to(dtype), packed, bias_N, 33)
        torch.library.opcheck(torch.ops.compilespec.packed_linear.default, arguments)


def test_packed_weight_is_a_plain_graph_input():
    weight_NK, _ = make_layer((33, 70), torch.float32)
    packed, x = pack_weight(weight_NK), torch.randn(4, 70)

    def double(x, packed):
        return packed_linear(packed_linear(x, packed, None, 33) @ weight_NK, packed, None, 33)

    torch.testing.assert_close(torch.compile(double, fullgraph=True)(x, packed), double(x, packed))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is of x86-64")
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
def test_kernels_for_smaller_registers(tmp_path, level):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/bash\nexec g++ "${{@/-march=native/-march={level}}}"\n')
    compiler.chmod(0o755)
    folder = Path(__file__).parent
    names = ("linear", "attention", "quantized")
    files = [str(folder / f"test_ops_{name}.py") for name in names]
    environment = {
        **os.environ, "CXX": str(compiler), "COMPILESPEC_CACHE_DIR": str(tmp_path / "cache")
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *files],
        env=environment, cwd=folder.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert list((tmp_path / "cache" / "kernels").glob("*.so"))
