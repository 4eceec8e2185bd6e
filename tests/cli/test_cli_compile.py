"""`compilespec compile` fills the cache that compile() reads."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import compilespec
from compilespec.cli import main
from compilespec.ops import load_kernels
from tests.support import fake_compiler
from tests.support.models import tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

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


@pytest.fixture
def chat_dir(model_dir: str) -> str:
    """A model of bytes with a chat template."""
    tokens = [*(bytes([byte]) for byte in range(255)), "<end>"]
    tokenizer = byte_level_tokenizer(tokens, eos="<end>")
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    tokenizer.save_pretrained(model_dir)
    return model_dir


def test_the_commands_share_what_they_compile(
    chat_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After one of them, the others compile nothing."""
    graphs = fake_compiler.install(monkeypatch)
    monkeypatch.setattr("compilespec.serving.run", lambda engine, *_: engine.close() or 0)
    monkeypatch.setattr("compilespec.serving.process.check", lambda binding: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("HI\n"))
    options = [chat_dir, "--spec", "ngram", "--dtype", "float64", "--max-seq-len", "64"]
    assert main(["generate", *options, "-p", "HI", "--max-new-tokens", "3"]) == 0
    first = len(graphs)
    assert first > 0
    for command in (
        ["chat", "--max-new-tokens", "3"], ["serve"], ["generate", "--chat", "-p", "A", "-p", "B"],
        ["compile"],
    ):  # fmt: skip
        assert main([*command, *options]) == 0
        assert len(graphs) == first, f"{command[0]} compiled"
    capsys.readouterr()
