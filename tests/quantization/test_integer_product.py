"""`int8_dynamic` where weights are not packed, as on GPUs, by the rules of the product there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compilespec
from compilespec import SamplingParams
from compilespec.ops.device import CUDA
from compilespec.ops.quantized_linear import dynamic_int8_product
from compilespec.ops.quantized_linear.reference import dynamic_int8_linear_reference
from compilespec.passes.context import PassContext
from compilespec.pipeline import build
from tests.support.models import tiny_target


class CudaRules(TorchDispatchMode):
    """What torch's integer product demands on CUDA, and does not on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._int_mm.default:
            (num_rows, depth), width = args[0].shape, args[1].shape[1]
            assert num_rows > 16, f"self.size(0) needs to be greater than 16, but got {num_rows}"
            assert depth % 8 == width % 8 == 0, f"multiples of 8, but got {depth} and {width}"
            self.num_products += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "width"), [((1, 64), 24), ((2, 3, 64), 8), ((17, 40), 33), ((1, 1, 13), 1)], ids=str
)
def test_the_bits_are_those_of_the_reference(
    shape: tuple[int, ...], width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    weight_NK = torch.randint(-128, 128, (width, shape[-1]), dtype=torch.int8)
    scale_N1, bias_N = torch.rand(width, 1).to(dtype), torch.randn(width).to(dtype)
    for bias in (None, bias_N):
        with CudaRules() as rules:
            got = dynamic_int8_product(x, weight_NK, scale_N1, bias)
        assert rules.num_products == 1
        assert torch.equal(got, dynamic_int8_linear_reference(x, weight_NK, scale_N1, bias))


def test_a_row_of_zeros_stays_one() -> None:
    weight_NK = torch.full((8, 8), 127, dtype=torch.int8)
    made = dynamic_int8_product(torch.zeros(2, 8), weight_NK, torch.ones(8, 1), None)
    assert not made.any()


def test_an_engine_keeps_the_rules_with_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of prefill and decode, with the tokens of the CPU's own operator."""
    pytest.importorskip("torchao.quantization")
    prompts, params = [[5, 6, 7], [9]], SamplingParams(max_new_tokens=6, ignore_eos=True)

    def tokens() -> tuple[list[Any], int]:
        with compilespec.compile(
            tiny_target("llama", torch.float32, num_layers=1), quantize="int8_dynamic",
            backend="eager", max_batch_size=2, max_seq_len=32,
        ) as engine, CudaRules() as rules:  # fmt: skip
            return [out.token_ids for out in engine.generate(prompts, params)], rules.num_products

    want, _ = tokens()
    monkeypatch.setattr(
        build, "PassContext", lambda **given: PassContext(**{**given, "traits": CUDA})
    )
    got, num_products = tokens()
    assert got == want
    assert num_products % (7 + 1) == 0  # seven products of a layer, and the head
    assert num_products > 0
