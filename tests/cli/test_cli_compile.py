"""`compilespec compile` fills the cache that compile() reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compilespec
from compilespec.cli import main
from compilespec.ops import load_kernels
from tests.support import fake_compiler
from tests.support.models import tiny_target

SIZES = {"max_batch_size": 2, "max_seq_len": 48, "max_prefill_tokens": 24}


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tiny_target("llama", num_layers=2).save_pretrained(tmp_path / "model")
    load_kernels()  # from where they are kept between runs
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "cache"))
    return str(tmp_path / "model")


def test_a_later_start_compiles_nothing(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    graphs = fake_compiler.install(monkeypatch)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = ["compile", "--model", model_dir, "--dtype", "float64", *options]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["directory"] == str(tmp_path / "cache")
    assert set(first["phases"]) == {"prefill", "decode"}
    assert not any(phase["from_cache"] for phase in first["phases"].values())
    assert len(graphs) == 2
    with compilespec.compile(model_dir, dtype="float64", **SIZES) as engine:
        assert len(graphs) == 2, "compile() found them"
        costs = engine.plan()["compile"]
        assert all(phase["from_cache"] for phase in costs.values())
    assert main([*command, "--cudagraphs", "full_and_piecewise"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("was in the cache") == 1, "the decode step, which is replayed whole"
    assert printed.count("3 distinct pieces") == 1
    assert len(graphs) == 2 + 3
