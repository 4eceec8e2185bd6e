"""Which products a quantized step calls on CUDA, and what of the weights they read."""

from __future__ import annotations

from typing import Any

import pytest

from tools.without_gpu.prove import run_part

pytest.importorskip("triton")
PRODUCTS = 4  # q with k and v, o, gate with up, down; then the head


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    """Records by the short name of the quantization."""
    part = run_part("quantized")
    assert not part["exit_status"], part["error"]
    return {record["quantize"]: record for record in part["records"]}


@pytest.mark.parametrize("name", ["int8_weight_only", "float8_weight_only", "int4_weight_only"])
def test_small_weights_are_multiplied_as_they_are(steps: dict[str, Any], name: str) -> None:
    step = steps[name]
    assert step["own_calls"]["linear_kernel"] == PRODUCTS + 1
    assert step["library_calls"] == {}
    assert step["weights_beside_products"] == []
    assert step["most_reads_of_a_weight"] == {"target": 1}
    assert step["bytes_over_floor"] <= 1.2  # of small matrices: activations count


def test_int8_rows_are_multiplied_in_int8(steps: dict[str, Any]) -> None:
    assert steps["int8_dynamic"]["library_calls"]["aten::_int_mm.out"] == 8


def test_int8_dynamic_reads_its_weights_once(steps: dict[str, Any]) -> None:
    assert steps["int8_dynamic"]["most_reads_of_a_weight"] == {"target": 1}
