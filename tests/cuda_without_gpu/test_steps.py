"""Steps at real size, compiled for GPUs that are not there: no copy, no wait, kernels in bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.without_gpu.prove import PARTS, faults_of, run_part

pytest.importorskip("triton")

# Launches of a layer: those that Inductor generates, ours (attention: write, attend, merge), and
# products of a library.  A step has `OTHERS` beside its target's layers, for each of K drafts too.
LAYER = {"llama-3.1-8b": 12, "moe": 22}
OTHERS = 24
RESULTS = Path(__file__).resolve().parents[2] / "tools/bench/results/without-gpu.json"
WHEN = ("before", "after")
STEPS = [name for name in PARTS if "sm_" in name]


@pytest.fixture(scope="module")
def smallest() -> dict[str, Any]:
    """The record of the smallest step: plain greedy decoding with one layer of Llama-3.1-8B."""
    part = run_part("smallest step")
    assert not faults_of(part)
    return part["records"][0]


def test_a_step_copies_nothing_and_waits_for_nothing(smallest: dict[str, Any]) -> None:
    assert smallest["step"] == "decode.0.greedy"
    assert smallest["waits_for_host"] == ""
    for what in ("cache_copies", "weights_beside_products", "host_copies", "syncs", "references"):
        assert smallest[what] == [], what


def test_every_kernel_fits_on_the_gpu(smallest: dict[str, Any]) -> None:
    assert smallest["num_kernels"] >= 10
    assert smallest["most_registers"] <= 255
    assert smallest["most_shared"] <= 227 * 1024
    assert smallest["spilled"] == []


def test_weights_are_read_once_and_little_else(smallest: dict[str, Any]) -> None:
    assert smallest["most_reads_of_a_weight"] == {"target": 1}
    assert 1 < smallest["bytes_over_floor"] <= 1.1


def test_much_is_moved_by_many_programs(smallest: dict[str, Any]) -> None:
    """Logits and activations: no kernel that Inductor made leaves most of the GPU idle."""
    assert all(count >= 132 for count in smallest["fewest_programs"].values())


def test_a_step_launches_little(smallest: dict[str, Any]) -> None:
    assert smallest["launches"]["all"] <= LAYER["llama-3.1-8b"] + 6


def recorded(name: str) -> dict[str, dict[str, Any]]:
    """A part's records in the committed results, by step."""
    return {
        record["step"]: record
        for record in json.loads(RESULTS.read_text())["parts"][name]["records"]
    }


@pytest.mark.parametrize("name", STEPS)
def test_recorded_steps_are_within_bounds(name: str) -> None:
    for step, record in recorded(name).items():
        assert record["faults"] == []
        if step != "replay":
            assert record["bytes_over_floor"] <= 1.1
            assert record["launches_of_a_layer"]["all"] <= LAYER[name.partition(",")[0]]


@pytest.mark.parametrize("shape", LAYER)
def test_recorded_pieces_are_within_bounds(shape: str) -> None:
    """The first, one between attention calls, and the last."""
    found = recorded(f"pieces of {shape}")
    assert list(found) == [f"prefill, piece {number} of 3" for number in (1, 2, 3)]
    for record in found.values():
        assert record["faults"] == []
        assert record["most_reads_of_a_weight"] == {"target": 1}


def test_recorded_launches_are_fewer_than_before() -> None:
    """Of a whole Llama-3.1-8B with an EAGLE-3 head, a greedy step: three in each of 32 layers."""
    (before,), (after,) = (recorded(f"{when} the passes for speed").values() for when in WHEN)
    assert before["step"] == after["step"] == "decode.2.greedy"
    assert before["launches_at_full_depth"] - after["launches_at_full_depth"] >= 3 * 32
    assert after["bytes"] < before["bytes"]
    assert after["bytes_over_floor"] <= 1.1
    assert min(before["fewest_programs"].values()) < 132
    assert after["fewest_programs"] == {}


@pytest.mark.parametrize("name", STEPS)
def test_every_step_of_a_program(name: str) -> None:
    """Full and greedy steps and prefill, with an EAGLE-3 head; of llama also K = 0, and replay;
    on GPUs other than the A100 and Hopper's plain decoding, and one layer.
    """
    part = run_part(name)
    assert not faults_of(part)
    layer = LAYER[name.partition(",")[0]]
    kinds = {"prefill", "decode", "decode.2.greedy"}
    if "--spec" not in PARTS[name]:
        kinds = {"prefill", "decode", "decode.0.greedy"}
    if name == "llama-3.1-8b, sm_90":
        kinds |= {"decode.0", "decode.0.greedy", "replay"}
    assert {record["step"] for record in part["records"]} == kinds
    for record in part["records"]:
        why = "aten._grouped_mm.default: torch.bfloat16 on sm_8x" if name == "moe, sm_80" else ""
        assert record["waits_for_host"].startswith(why)
        assert bool(record["waits_for_host"]) == bool(why)
        if record["step"] == "replay":  # the drafter alone, over 64 tokens that it was not given
            assert record["launches"]["all"] <= 3 * OTHERS
            assert record["bytes_over_floor"] <= 1.3
            continue
        assert record["launches_of_a_layer"]["all"] <= layer, record["step"]
        assert record["launches"]["all"] <= 2 * layer + 3 * OTHERS, record["step"]
        assert record["most_reads_of_a_weight"]["target"] == 1, record["step"]
        assert record["most_reads_of_a_weight"].get("draft", 0) <= 2, record["step"]
        assert record["bytes_over_floor"] <= 1.1, record["step"]
