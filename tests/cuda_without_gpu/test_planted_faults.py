"""Faults planted in a step are found without a GPU: what would be slow, or wrong, on one.

A copy of what the host wrote that lands after its replay is a fault of the runner, not of a step:
`cudagraphs/test_gpu_model.py` plants it, and writes through pageable memory, beside others.
"""

from __future__ import annotations

from typing import Any

import pytest

from tools import parts

pytest.importorskip("triton")
LINES = {
    "a clone of the cache": "a cache is copied: triton_",
    "a weight in another layout": "generated code reads weights: target.",
    "an item": "the host waits: aten::_local_scalar_dense",
    "copies of pageable memory": "host and device exchange data: aten::copy_, aten::copy_",
    "too much shared memory": "bytes of shared memory, of 166912",
}


def records(which: str) -> list[dict[str, Any]]:
    """What `tests.support.planted_faults` says of steps with faults."""
    command = ("-m", "tests.support.planted_faults", which)
    part = parts.run(command, 1800, {"TRITON_INTERPRET": "0"})
    assert part["exit_status"] == 0, part["error"]
    found: list[dict[str, Any]] = part["records"]
    return found


def seen(said: list[str]) -> list[str]:
    """The faults that one is told of."""
    return [fault for fault, line in LINES.items() if any(line in text for text in said)]


def test_planted_faults_are_found() -> None:
    (record,) = records("all")
    assert record["planted"] == list(LINES)
    assert seen(record["said"]) == list(LINES), record["said"]


def test_a_planted_fault_is_found_for_itself() -> None:
    """And nothing of the kind is said of the step as it is."""
    for record in records("each"):
        assert seen(record["said"]) == record["planted"], record
