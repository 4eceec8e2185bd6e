"""Captures on disk: what another process finds, and what is traced again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compilespec.program import Traced
from compilespec.tracing import capture_files, reuse
from compilespec.tracing.capture import trace_call
from compilespec.tracing.fingerprint import CannotKey
from compilespec.tracing.target import trace_target
from tests.support.models import call_traced, tiny_target

SCALE = 2.0


class Module(nn.Module):
    """Sizes that are sums and products, slices, dtypes, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.cat([x, x[:1]]).reshape(-1, 5) * SCALE
        first, second = self.linear(flat).to(torch.float64).chunk(2, dim=-1)
        return first[..., :2] + float("-inf"), second.argmax(-1)


def trace(module: nn.Module) -> Traced:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = module(x)
        return first, second

    return trace_call(module, call, {"x": (torch.zeros(3, 4, 5), (0, 1))}, name="one")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """A separate cache; `reuse.forget_captures` makes the process a new one."""
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path))
    reuse.forget_captures()
    yield tmp_path / "traces"
    reuse.forget_captures()


def looks(traced: Traced) -> list[tuple[str, ...]]:
    def form(value: object) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {[str(size) for size in (*value.shape, *value.stride())]}"
        return f"{type(value).__name__} {value}" if value is None else str(value)

    return [
        (node.format_node() or "", str(node.target), str(node.args), str(node.kwargs),
         str(node.meta.get("role")), str(node.meta.get("custom")),
         str(node.meta.get("stack_trace")), form(node.meta.get("example_value")))
        for node in traced.graph_module.graph.nodes
    ]  # fmt: skip


def test_what_is_read_is_what_was_written(folder):
    written = trace(Module())
    assert len(list(folder.glob("*.json"))) == 1
    reuse.forget_captures()
    read = trace(module := Module())
    assert (written.reused, read.reused) == (False, True)
    assert looks(read) == looks(written)
    assert read.graph_module.code == written.graph_module.code
    x = torch.randn(2, 7, 5)
    with torch.no_grad():
        expected = module(x)
    for got, want in zip(read.graph_module(*read.bind(x=x)), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_a_target_from_disk_is_the_target(family):
    model = tiny_target(family, num_layers=1)
    written = trace_target(model)
    reuse.forget_captures()
    read = trace_target(model)
    assert read.reused
    assert looks(read) == looks(written)
    ids = torch.randint(3, 90, (2, 5), dtype=torch.int32)
    positions = torch.arange(5, dtype=torch.int32).expand(2, 5).contiguous()
    arguments = {"input_ids": ids, "position_ids": positions}
    if family == "llama":
        for got, want in zip(
            call_traced(read, **arguments), call_traced(written, **arguments), strict=True
        ):
            assert torch.equal(got, want)


def test_another_process_finds_it():
    """Keys hold no addresses and no order of sets."""
    code = (
        "from compilespec.tracing.target import trace_target\n"
        "from tests.support.models import tiny_target\n"
        "print('reused', trace_target(tiny_target('llama', num_layers=1)).reused)"
    )
    for seed in ("7", "8"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert "reused True" in done.stdout


def test_what_the_code_read_is_compared(monkeypatch):
    trace(Module())
    reuse.forget_captures()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    changed = trace(Module())
    assert not changed.reused
    assert "3.0" in changed.graph_module.code
    reuse.forget_captures()
    assert trace(Module()).reused


def test_other_code_of_ours_traces_again(monkeypatch):
    trace(Module())
    reuse.forget_captures()
    monkeypatch.setattr(reuse, "_own_code", lambda: "other")
    assert not trace(Module()).reused


@pytest.mark.parametrize("damage", ["", "[1]", '{"names": []}', "node", "target"])
def test_a_damaged_file_is_traced_again(folder, damage):
    trace(Module())
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text())
    if damage == "node":
        record["nodes"][3]["args"] = {"tuple": [{"node": "nobody"}]}
    if damage == "target":
        record["nodes"][3]["target"] = {"function": ["torch", "nothing"]}
    path.write_text(json.dumps(record) if damage in ("node", "target") else damage)
    reuse.forget_captures()
    assert not trace(Module()).reused
    reuse.forget_captures()
    assert trace(Module()).reused


def test_a_directory_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "file"))
    assert not trace(Module()).reused
    assert trace(Module()).reused
    reuse.forget_captures()
    assert not trace(Module()).reused


@pytest.mark.parametrize("value", [object(), 1j, torch.zeros(2), lambda: 0])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(CannotKey, match=type(value).__name__):
        capture_files._write((1, value))
