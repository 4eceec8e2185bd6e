"""Every program of examples/ runs, on a tiny model in a directory; on the demo in the slow run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from compilespec.methods.eagle3 import random_head, save_head
from tests.support.models import save_byte_model, target_info

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTS = {  # a line of each, for any model
    "agent_session": r"from disk, ms to the first token of each turn: \[\d+, ",
    "dump_pass": r"\+ .*torch\.cat",
    "generate": r"-> (stop|length), \d+ tokens, \d\.\d\d a verify step",
    "grpo": r"step 1: reward 0\.\d+, log-probability difference 0\.0, \d\.\d\d tokens",
    "guide": r"\{'size': [123], 'colour': '(red|green)'\} stop",
    "own_drafter": r"tokens by verify step: \[\d",
    "serve_asyncio": r"patient: (stop|length) after \d+ tokens",
    "transformers_generate": r"the same tokens: True",
    "stream": r"-> (stop|length), \d+ ms",
}
CLIENTS = ("openai_client",)  # run by tests/serving


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of bytes with a tokenizer, and an EAGLE-3 head where `compile` looks."""
    path = tmp_path_factory.mktemp("tiny")
    model = save_byte_model(path, num_layers=3, max_positions=256)
    head = random_head(target_info(model, 256), aux_layers=(0, 1, 2))
    save_head(head, path / "eagle3")
    return path


def _run(name: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where tracing looks for a function's globals
    try:
        spec.loader.exec_module(module)
        module.main(*arguments)
    finally:
        del sys.modules[spec.name]


def _arguments(name: str, model: str) -> tuple[str, ...]:
    """Without a trained drafter, where there is a choice, for a program that prints text."""
    spec = {
        "stream": ("ngram",),
        "guide": ("none",),
        "own_drafter": (),
        "transformers_generate": ("ngram",),
    }.get(name, ("eagle3",))
    after = {"dump_pass": (), "grpo": ("eager", "2")}.get(name, ("eager",))
    return (model, *spec, *after)


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTS, *CLIENTS}


@pytest.mark.parametrize("name", [*PRINTS, *CLIENTS])
def test_examples_are_short_and_listed(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < (81 if name == "grpo" else 40)  # a whole trainer
    assert f"python examples/{name}.py" in text
    assert f"{name}.py" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs_on_a_tiny_model(
    name: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "guide":
        pytest.importorskip("llguidance")
    _run(name, *_arguments(name, str(directory)))
    assert re.search(PRINTS[name], capsys.readouterr().out)


@pytest.mark.parametrize("model", ["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def test_the_notebook_runs(model: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell, in order; what its last line gives is shown."""
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    if model == "tiny":
        cells[0] = f'MODEL, SPEC, BACKEND = {str(directory)!r}, "eagle3", "eager"'
    names: dict[str, Any] = {}
    shown = [_run_cell(cell, names) for cell in cells]
    engine, outputs, picture, why = (one for one in shown if one is not None)
    assert re.fullmatch(r"Engine\(.*eagle3, K=[\d,]+, cpu, .*closed\)", repr(engine))
    assert [len(output.token_ids) for output in outputs] == [64, 64]
    assert "GenerationOutput(text=" in repr(outputs)
    assert re.search(r">draft 3</text>[\s\S]*</svg>", picture._repr_svg_())
    assert why
    assert capsys.readouterr().out.strip()


def _run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs_on_the_demo(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(name, *_arguments(name, "demo"))
    assert re.search(PRINTS[name], capsys.readouterr().out)
