"""What starting tells: its steps in order, why it compiles anew, and nothing on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import Progress, progress
from compilespec.cli import main, report
from compilespec.errors import InvalidOption
from compilespec.inspect.stages import context_of
from compilespec.lowering import artifacts, lower, prepare_kernels
from compilespec.lowering.artifacts import ArtifactCache, ArtifactKey, artifact_key
from compilespec.ops import _build
from compilespec.program import SpecProgram
from compilespec.progress import Reporter, rare_collections, reporting
from tests.support import fake_compiler
from tests.support.models import tiny_target

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 48, "max_prefill_tokens": 24}


def small_program(**options: Any) -> SpecProgram:
    target = tiny_target("llama", num_layers=2)
    return compilespec.trace(target, keep_graphs=False, **{**SIZES, **options})


@pytest.fixture(scope="module")
def program() -> SpecProgram:
    return small_program()


def test_an_interpreted_start_tells_its_steps_in_order(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Progress] = []
    target = tiny_target("llama", num_layers=2)
    with caplog.at_level(logging.INFO, logger="compilespec"):
        engine = compilespec.compile(
            target, "ngram", num_draft_tokens=(0, 2), backend="eager", progress=told.append, **SIZES
        )
    done = [(one.stage, one.what, one.index, one.total) for one in told if one.done]
    titles = ("prefill", "decode, K=2", "decode, K=0")
    assert [one for one in done if one[1] != "C++ kernels"] == [
        ("load", "target", None, None),
        ("trace", "target", None, None),
        ("trace", "drafter", None, None),
        *(("rewrite", title, i, 3) for i, title in enumerate(titles, 1)),
        *(("rewrite", f"{title}, to ATen", i, 3) for i, title in enumerate(titles, 1)),
        ("load", "weights and buffers, in place", None, None),
        ("capture", "times of steps, by K", None, None),
        ("ready", "all", None, None),
    ]
    begun = [one for one in told if not one.done]
    assert all(one.elapsed_ms < 100 for one in begun if one.what != "C++ kernels")
    last = told[-1]
    assert {"load", "trace", "rewrite", "capture"} <= set(last.seconds)
    assert 0 < sum(last.seconds.values()) <= last.elapsed_ms / 1e3
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        *map(str, told)
    ]
    text = "Engine(LlamaForCausalLM, ngram, K=0,2, cpu, float64"
    assert repr(engine) == f"{text})"
    engine.close()
    assert repr(engine) == f"{text}, closed)"


def test_graphs_and_programs_print_a_line(program: SpecProgram) -> None:
    assert repr(program) == "SpecProgram(LlamaForCausalLM, none, K=0, cpu, float64)"
    decode = program.graphs["decode"]
    for one in (decode, decode.step, context_of(decode).target, lower(program, backend="eager")):
        text = repr(one)
        assert len(text) < 1500, text[:200]
        assert "tensor(" not in text


def test_time_inside_another_step_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 1.0, 1.0, 1.0, 3.0, 3.0, 7.0, 7.0, 8.0])
    monkeypatch.setattr("compilespec.progress.time.perf_counter", lambda: next(now))
    told: list[Progress] = []
    reporter = Reporter(told.append)
    with reporter.step("compile", "decode, K=3", index=2, total=3) as step:
        with step.inside("rewrite", "to ATen"):
            pass
    reporter.ready()
    assert told[-1].seconds == {"rewrite": 2.0, "compile": 5.0}
    assert [str(one) for one in told[1:4]] == [
        "rewriting 2 of 3: decode, K=3, to ATen",
        "rewriting 2 of 3: decode, K=3, to ATen, 2.0 s",
        "compiling 2 of 3: decode, K=3, 7.0 s",
    ]


def test_an_exception_of_the_callable_stops_the_start() -> None:
    def stop(record: Progress) -> None:
        if record.stage == "rewrite":
            raise InterruptedError(record.what)

    with pytest.raises(InterruptedError, match="prefill"):
        small_program(progress=stop)


# --- why something is compiled anew ---


def whys(told: list[Progress]) -> dict[str, str]:
    return {one.what: one.why for one in told if one.done and one.from_cache is False}


def test_the_reason_is_what_differs_from_the_nearest_artifact(
    program: SpecProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = fake_compiler.install(monkeypatch)
    cache = ArtifactCache(tmp_path)

    def start(one: SpecProgram, **options: Any) -> dict[str, str]:
        told: list[Progress] = []
        lower(one, cache=cache, progress=Reporter(told.append), **options)
        return whys(told)

    assert start(program) == {
        "prefill": "first time for this model",
        "decode, K=0": "first time for this step of the model",
    }
    assert start(program) == {}
    bigger = small_program(max_batch_size=3)
    assert set(start(bigger).values()) == {
        "max_batch_size changed from 2 to 3, num_blocks changed from 6 to 9"
    }
    drafting = small_program(spec="ngram", num_draft_tokens=2)
    assert set(start(drafting).values()) == {
        "method changed from none to ngram, num_draft_tokens changed from 0 to 2"
    }
    units: Any = {"prefill": "pieces"}
    assert start(program, units=units) == {"prefill": "compiler options changed"}
    assert start(program, units=units) == {}
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "source_digest", lambda: "f" * 64)
        assert set(start(program).values()) == {"compilespec's code changed"}
    for path in cache.directory.glob("*.bin"):
        path.unlink()
    assert set(start(program).values()) == {"the artifact is gone or cannot be read"}
    assert len(graphs) == 2 * 5 + 3


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("torch version", "2.99", "torch version changed from 2.99 to {}"),
        ("CPU capability", "none", "CPU capability changed from none to {}"),
        ("compiler options", "{}", "compiler options changed"),
        ("dtype", "float16", "dtype changed from float16 to float64"),
        ("layout of weights", "0" * 64, "layout of weights changed"),
        ("model", "0" * 64, "first time for this model"),
        ("step", "replay", "first time for this step of the model"),
    ],
)
def test_every_part_of_the_key_has_its_reason(
    program: SpecProgram, tmp_path: Path, part: str, value: str, why: str
) -> None:
    cache = ArtifactCache(tmp_path)
    key = artifact_key(program.graphs["decode"], program, {"an option": "that is long enough"})
    parts = dict(key.parts)
    assert part in parts
    assert ArtifactKey(tuple({**parts, part: value}.items())).name != key.name
    far = {**parts, part: value, "max_seq_len": "7", "graph of the step": "0" * 64}
    for stored in (far, {**parts, part: value}):
        cache.keep_key(ArtifactKey(tuple(stored.items())))
    assert cache.why_new(key) == why.format(parts[part])


def test_damaged_keys_are_passed_over(program: SpecProgram, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    key = artifact_key(program.graphs["decode"], program, {})
    cache.keep_key(key)
    (stored,) = cache.directory.glob("keys/*/*.json")
    for damage in ("", "[1]", '"text"', "\udcff"):
        stored.write_bytes(damage.encode(errors="surrogateescape"))
        assert cache.why_new(key) == "first time for this model"
    stored.write_text(json.dumps({"step": dict(key.parts)["step"], "dtype": 7}))
    assert "dtype changed from 7 to float64" in cache.why_new(key)


def test_building_the_cpp_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    monkeypatch.setattr(_build, "kernels_untried", lambda: True)
    monkeypatch.setattr(_build, "is_cached", lambda: False)
    monkeypatch.setattr(_build, "load_kernels", lambda: told.append(told[-1]))
    prepare_kernels(torch.device("meta"), Reporter(told.append))
    assert not told
    prepare_kernels(torch.device("cpu"), Reporter(told.append))
    assert [one.from_cache for one in told] == [None, False, False, False], "said before it builds"
    assert str(dataclasses.replace(told[-1], elapsed_ms=41_000)) == (
        "compiling: C++ kernels (none are cached for this CPU, compiler and torch), 41.0 s"
    )


# --- the command line ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_starting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with report.starting("[demo]") as progress:
        assert progress is not None
        progress(Progress(stage="compile", what="decode, K=3", index=2, total=3))
        progress(Progress(stage="compile", what="prefill", index=1, total=2))
        monkeypatch.setattr(report, "MIN_SPENT_S", 0.0)
        progress(Progress(stage="compile", what="x", index=2, total=2, detail="part 3 of 4"))
    shown = screen.getvalue()
    assert "[demo]: compiling 2 of 3: decode, K=3" in shown
    assert "0:00:00" in shown
    assert "compiling 2 of 2: x, part 3 of 4; about 0 s left" in shown


def start(tell: Any = None) -> None:
    with reporting(tell) as reporter:
        time.sleep(0.05)
        for _ in range(2):
            with reporter.step("load", "target"):
                pass
        reporter.ready()


def test_a_long_start_says_a_line_a_step_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    start()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compilespec: loading: target"
    assert lines[1].startswith("compilespec: ready: all, ")
    assert len(lines) == 2
    told: list[Progress] = []
    start(False)
    start(told.append)
    assert told
    with caplog.at_level(logging.INFO, logger="compilespec"):
        start()
    monkeypatch.setattr(progress, "QUIET_S", 60.0)
    before = threading.active_count()
    start()
    with pytest.raises(InvalidOption, match="progress=False says nothing"):
        start(3)
    assert threading.active_count() <= before
    assert capsys.readouterr().err == ""


def test_a_compiled_step_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with reporting(None) as reporter:
        time.sleep(0.05)
        with reporter.step("compile", "prefill", index=1, total=2) as step:
            step.tell(why="first time for this model", from_cache=False)
            step.tell(detail="part 1 of 2")
        with reporter.step("compile", "machine code") as step:
            step.tell(detail="graph 1 of 3")
    assert capsys.readouterr().err.splitlines() == [
        "compilespec: compiling 1 of 2: prefill (first time for this model)",
        "compilespec: compiling: machine code, graph 1 of 3",
    ]


def test_a_short_start_in_a_pipe_and_json_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_compiler.install(monkeypatch)
    _build.load_kernels()  # from where they are kept between runs
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "QUIET_S", 60.0)
    tiny_target("llama", num_layers=2).save_pretrained(tmp_path / "model")
    capsys.readouterr()  # transformers says that it writes
    command = ["compile", "--model", str(tmp_path / "model"), "--max-seq-len=48"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main([*command, "--json"]) == 0
    assert screen.getvalue() == ""
    assert main(command) == 0
    assert "compiling 2 of 2: decode, K=0" in re.sub(r"\s+", " ", screen.getvalue())


SCRIPT = """
import sys
import compilespec
options = {"quantize": sys.argv[2]} if len(sys.argv) > 2 else {}
options |= {"backend": "eager", "max_seq_len": 48, "progress": False}
with compilespec.compile(sys.argv[1], **options) as engine:
    engine.generate([[1, 2, 3]])
"""


@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_start_prints_nothing_on_stderr(
    quantize: str | None, tmp_path: Path, kernels: None
) -> None:
    if quantize is not None:
        pytest.importorskip("torchao")
    tiny_target("llama", torch.float32, num_layers=2).save_pretrained(tmp_path)
    environment = dict(os.environ)
    environment.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *([quantize] if quantize else [])]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_garbage_is_collected_rarely_while_programs_start():
    """Starts may overlap and fail; the usual thresholds come back after the last."""
    usual = gc.get_threshold()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(rare_collections())
    second.enter_context(rare_collections())
    assert gc.get_threshold() > usual
    first.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert gc.get_threshold() > usual
    second.close()
    assert gc.get_threshold() == usual


def test_what_earlier_programs_left_is_collected(monkeypatch):
    """A start walks through no objects, unless they are a quarter more than there were."""
    monkeypatch.setattr(progress, "_num_kept", 0)
    walks = []
    monkeypatch.setattr(gc, "collect", lambda: walks.append(len(walks)))
    with rare_collections():
        kept = [[] for _ in range(1000)]
    before = progress._num_kept
    assert before > len(kept)
    assert not walks, "the first one"
    with rare_collections():
        kept += [[] for _ in range(before // 8)]
    assert not walks
    with rare_collections():
        kept += [[] for _ in range(before // 6)]
    assert walks == [0]
    assert progress._num_kept > before * 1.25
    with rare_collections():
        pass
    assert walks == [0]
    assert not gc.get_freeze_count()


def test_frozen_objects_stay_frozen(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 7000)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("they thawed"))
    with rare_collections():
        pass
