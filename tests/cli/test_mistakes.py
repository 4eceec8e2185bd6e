"""Mistakes that users make: an error of compilespec's, in one line that names the cure, at once."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.cli import main
from compilespec.cli.flags import in_flags
from compilespec.errors import (
    InvalidOption,
    InvalidRequest,
    MissingDependency,
    ModelNotFound,
    SpecError,
    UnknownMethod,
)
from compilespec.errors.suggest import ELSEWHERE
from compilespec.lowering import check_compiler
from compilespec.methods.registry import method_names
from compilespec.ops import _build
from compilespec.quantization.configs import NAMES
from compilespec.runtime.engine import Engine
from compilespec.runtime.keywords import FIELDS
from compilespec.tracing.placement import DEVICES, DTYPES
from tests.support.fake_executor import FakeExecutor

PREFIX = "compilespec: error: "
TIME_LIMIT_S = 2.0  # of this process: other tests may share the cores
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(FakeExecutor()) as engine:
        yield engine


@contextlib.contextmanager
def within_the_limit() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < TIME_LIMIT_S


# What is done with an engine, the class of the error, what its line says.
WITH_AN_ENGINE: dict[str, tuple[Callable[[Engine], Any], type[SpecError], str]] = {
    "chat messages": (
        lambda e: e.generate(CHAT), InvalidRequest,
        r'give engine\.chat\(messages\), or \{"messages": messages\} as the prompt$',
    ),
    "a padded batch": (
        lambda e: e.generate({"input_ids": [[3, 0]], "attention_mask": [[1, 0]]}), InvalidRequest,
        "without padding",
    ),
    "bytes": (lambda e: e.generate(b"hi"), InvalidRequest, r"give prompt\.decode\(\)$"),
    "a field of SamplingParams": (
        lambda e: e.generate([3], max_new_tokens=5), InvalidRequest,
        r"put it into SamplingParams\(max_new_tokens=5\)$",
    ),
    "another project's field": (
        lambda e: e.stream([3], max_tokens=5), InvalidRequest,
        r"put it into SamplingParams\(max_new_tokens=5\)$",
    ),
    "a field that means another thing": (
        lambda e: e.submit([3], do_sample=True), InvalidRequest,
        r"did you mean, in SamplingParams, temperature \(0 is greedy",
    ),
    "transformers' keywords": (
        lambda e: e.generate(input_ids=[[3]], attention_mask=[[1]]), InvalidRequest,
        r"did you mean prompts \(a tokenizer's output is taken as it is\)\?$",
    ),
    "params by another name": (
        lambda e: e.generate([3], sampling_params=SamplingParams()), InvalidRequest,
        r"did you mean params\?$",
    ),
    "an unknown keyword": (
        lambda e: e.submit([3], colour="red"), InvalidRequest,
        "it takes prompt, params, priority$",
    ),
    "positional parameters": (lambda e: SamplingParams(64), InvalidRequest, "max_new_tokens=64"),
    "max_tokens": (
        lambda e: SamplingParams(max_tokens=5), InvalidRequest, r"did you mean max_new_tokens\?$",
    ),
    "max_length": (
        lambda e: SamplingParams(max_length=5), InvalidRequest,
        r"did you mean max_new_tokens \(which does not count the prompt\)\?$",
    ),
    "top_n": (lambda e: SamplingParams(top_n=5), InvalidRequest, r"did you mean top_k\?$"),
    "stop_strings": (
        lambda e: SamplingParams(stop_strings=["a"]), InvalidRequest, r"did you mean stop\?$",
    ),
    "a slip": (lambda e: SamplingParams(temprature=1), InvalidRequest, "did you mean temperature"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_AN_ENGINE)
def test_with_an_engine(engine: Engine, name: str) -> None:
    call, kind, says = WITH_AN_ENGINE[name]
    with within_the_limit(), pytest.raises(kind, match=says) as caught:
        call(engine)
    assert "\n" not in str(caught.value)
    assert not engine.has_work


# Arguments of compile(), the class of the error, what its line says.  No target is loaded.
BY_COMPILE: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[SpecError], str]] = {
    "no model": ((None,), {}, InvalidOption, "an nn.Module, a directory .*; got None$"),
    "a number": ((3,), {}, InvalidOption, "model must be .*; got 3$"),
    "a name of the hub": (
        ("meta-llama/Llama-3.1-8B",), {}, ModelNotFound, "hf download meta-llama/Llama-3.1-8B$",
    ),
    "a method with a slip": (
        ("demo", "eagel3"), {}, UnknownMethod, r"did you mean eagle3\? known methods: none, ",
    ),
    "a method with a dash": (("demo", "eagle-3"), {}, UnknownMethod, r"did you mean eagle3\?"),
    "another project's method": (("demo", "NEXTN"), {}, UnknownMethod, r"did you mean mtp_eagle\?"),
    "no method": (("demo", "lookahead9"), {}, UnknownMethod, "methods: none, eagle3, .*auto$"),
    "a dtype's short name": (
        ("demo",), {"dtype": "bf16"}, InvalidOption, r"got 'bf16'; did you mean bfloat16\?$",
    ),
    "a dtype of integers": (
        ("demo",), {"dtype": torch.int8}, InvalidOption, "dtype must be one of .*; got 'int8'$",
    ),
    "a device's other name": (
        ("demo",), {"device": "gpu"}, InvalidOption, r"got 'gpu'; did you mean cuda\?$",
    ),
    "a device that is not there": (
        ("demo",), {"device": "cuda:63"}, InvalidOption, "CUDA devices; leave out device=",
    ),
    "vLLM's K": (
        ("demo",), {"num_speculative_tokens": 3}, InvalidOption, r"mean num_draft_tokens\?$",
    ),
    "vLLM's drafter": (("demo",), {"speculative_model": "x"}, InvalidOption, r"mean draft\?$"),
    "vLLM's length": (("demo",), {"max_model_len": 64}, InvalidOption, r"mean max_seq_len\?$"),
    "a batch size": (("demo",), {"batch_size": 4}, InvalidOption, r"mean max_batch_size\?$"),
    "a keyword with a slip": (
        ("demo",), {"max_batchsize": 4}, InvalidOption, r"mean max_batch_size\?$",
    ),
    "a share of the memory": (
        ("demo",), {"gpu_memory_utilization": 0.9}, InvalidOption,
        r"mean kv_cache_tokens \(a number of tokens\)\?$",
    ),
    "a request's parameter": (
        ("demo",), {"max_new_tokens": 4}, InvalidOption, r"SamplingParams\(max_new_tokens=...\)",
    ),
    "another method's option": (
        ("demo", "ngram"), {"aux_layers": (1,)}, InvalidOption,
        "'aux_layers'; the method takes max_ngram, min_ngram$",
    ),
    "an option with a slip": (("demo", "ngram"), {"max_gram": 3}, InvalidOption, "mean max_ngram"),
    "a backend": (("demo",), {"backend": "eagr"}, InvalidOption, r"inductor, eager;.* eager\?$"),
    "cudagraphs": (
        ("demo",), {"cudagraphs": "FULL_DECODE"}, InvalidOption, "mean full_decode_only",
    ),
    "acceptance": (("demo",), {"acceptance": "rejecton"}, InvalidOption, r"mean rejection\?$"),
    "a bucket": (("demo",), {"buckets": 4}, InvalidOption, "list of batch sizes .*; got 4$"),
    "a tokenizer's name": (
        ("demo",), {"tokenizer": "gpt2"}, InvalidOption, "tokenizer must be .*; got 'gpt2'$",
    ),
    "a drafter's number": (
        ("demo", "eagle3"), {"draft": 3}, InvalidOption, "draft must be a directory.*; got 3$",
    ),
    "a drafter for plain decoding": (
        ("demo",), {"draft": "x"}, InvalidOption, "leave out draft= or choose another method$",
    ),
    "quantize": (
        ("demo",), {"quantize": "int8wo"}, InvalidOption, r"mean int8_weight_only\?$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_COMPILE)
def test_by_compile(name: str) -> None:
    args, keywords, kind, says = BY_COMPILE[name]
    with within_the_limit(), pytest.raises(kind, match=says) as caught:
        compilespec.compile(*args, **keywords)
    assert "\n" not in str(caught.value)


# A command line, what its one line on stderr says after "compilespec: error: ".
BY_COMMAND = {
    "a command with a slip": ("generat --prompt x", r"did you mean generate\?"),
    "a command with another slip": ("genrate --prompt x", r"did you mean generate\?; see"),
    "a text for the model": (
        "generate hello", "^'hello' stands where MODEL does, .*: give a text .* as --prompt TEXT",
    ),
    "a text behind the model": ("generate --spec none demo hi", "no argument 'hi'; .* --prompt"),
    "two models": ("serve demo --model other", "^MODEL: expected one, got demo and other$"),
    "no model to talk to": ("chat --spec ngram", "^MODEL is needed: "),
    "a system without a chat": ("generate -p x --system y", "^--system is .*: give --chat, too"),
    "another project's flag": (
        "generate --prompt x --max-tokens 5", r"no argument --max-tokens; .* --max-new-tokens\?$",
    ),
    "a flag with a slip": (
        "generate --prompt x --temprature=1", r"--temprature; did you mean --temperature\?$",
    ),
    "a flag of nobody": ("bench --colour red", "no argument --colour; see compilespec --help$"),
    "a flag of vLLM": ("compile --max-model-len 64", r"did you mean --max-seq-len\?$"),
    "a method with a slip": ("generate --prompt x --spec eagel3", r"did you mean eagle3\?"),
    "a dtype's short name": ("bench --prompt x --dtype bf16", r"^--dtype must be .*bfloat16\?$"),
    "a device that is not there": (
        "generate --prompt x --device cuda:63", "^--device 'cuda:63' .*; leave out --device, or",
    ),
    "a device of another name": ("compile --device gpu", r"^--device must be .*mean cuda\?$"),
    "a device to look at": ("dump --device cuda:63 --list", "^--device 'cuda:63' cannot be used"),
    "a device for nothing": ("dump --meta --device cpu", "leave out --draft and --device$"),
    "a prompt to look at": ("dump --prompt x", "^--prompt is served by --bisect alone"),
    "a batch of none": ("dump --cost --batch-size 0", "^--batch-size must be .*; got 0$"),
    "a roofline": ("dump --cost --device h200", r"^--device must be 'cpu'.*; got 'h200'"),
    "no draft counts": (
        "generate --prompt x --num-draft-tokens 3;5",
        "argument --num-draft-tokens: expected a number, several such as 0,2,5, or auto; got '3;5'",
    ),
    "no drafts": (
        "generate --prompt x --num-draft-tokens 0", "^--num-draft-tokens must be a positive",
    ),
    "too few tokens": (
        "generate --prompt x --max-new-tokens 0", "^--max-new-tokens: expected an integer of at",
    ),
    "a seed": ("generate --prompt x --seed -1", "^--seed: expected an integer of at least 0"),
    "a backend": ("generate --prompt x --backend eagr", "argument --backend: .*'eagr' .*eager"),
    "cudagraphs": (
        "compile --cudagraphs always", "^--cudagraphs must be one of auto, .*; got 'always'$",
    ),
    "a method of several": ("bench --prompt x --methods ngram,magic", "unknown method 'magic'"),
    "a quantization": (
        "generate --prompt x --quantize fp8", r"^--quantize must be .*mean float8_dynamic\?$",
    ),
    "no model": ("generate --prompt x --model nowhere", "^nowhere does not exist; expected a dir"),
    "no drafter": (
        "generate --prompt x --spec eagle3 --draft nowhere", "^draft nowhere does not exist;",
    ),
    "a drafter for plain decoding": (
        "dump --spec none --draft x", "^--draft must go with a drafting method: give --spec, or",
    ),
    "drafts without a method": (
        "generate --prompt x --model nowhere --num-draft-tokens 3",
        "^--num-draft-tokens must go with a drafting method: give --spec, or",
    ),
    "no file": ("generate --prompt-file nowhere", "^--prompt-file nowhere: expected a UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_COMMAND)
def test_by_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, says = BY_COMMAND[name]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with within_the_limit():
        assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    start, said = err[: len(PREFIX)], err[len(PREFIX) :].rstrip("\n")
    assert start == PREFIX
    assert re.search(says, said), said


# Variables of the environment, what the one line says: before anything is loaded or traced.
MACHINES = {
    "no such compiler": ({"CXX": "/nowhere/g++"}, r"g.. is no program in PATH: .*backend.*eager"),
    "no compiler": ({"PATH": "/nowhere"}, r"no g.. in PATH: install g.. .*backend.*eager"),
    "no place": (
        {"COMPILESPEC_CACHE_DIR": "/dev/null/cache"},
        "^the cache directory /dev/null/cache cannot be written .*: set COMPILESPEC_CACHE_DIR to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ["generate --prompt x", "compile"])
@pytest.mark.parametrize("name", MACHINES)
def test_what_the_machine_lacks_is_said_at_once(
    name: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    variables, says = MACHINES[name]
    for variable, value in {"COMPILESPEC_CACHE_DIR": str(tmp_path), **variables}.items():
        monkeypatch.setenv(variable, value)
    with within_the_limit():
        assert main(command.split()) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert re.search(says, err.removeprefix(PREFIX)), err
    if "compiler" in name:  # and without one there is a way, after a warning about the kernels
        check_compiler("eager", torch.device("cpu"))


def test_a_python_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_build.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MissingDependency, match=r"no Python.h: install them .*python3-dev"):
        _build.check_compiler()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"compilespec {compilespec.__version__}\n"


@pytest.mark.parametrize(
    ("message", "with_flags"),
    [
        ("max_seq_len must be at most 9; got 10", "--max-seq-len must be at most 9; got 10"),
        ("SamplingParams.n: expected 1, got 0", "--n: expected 1, got 0"),
        ("give draft=X, or leave out draft=", "give --draft X, or leave out --draft"),
        ("draft x lacks model.draft.max_seq_len", "draft x lacks model.draft.max_seq_len"),
        ("/tmp/max_seq_len/x holds 'max_seq_len'", "/tmp/max_seq_len/x holds 'max_seq_len'"),
        ("lower n, or kv_cache_tokens=5 for n=2", "lower n, or kv_cache_tokens=5 for --n 2"),
        ("go on by resume=True, or give another", "go on by --resume, or give another"),
    ],
)  # fmt: skip
def test_errors_speak_of_the_commands_flags(message: str, with_flags: str) -> None:
    args = argparse.Namespace(run=None, max_seq_len=1, draft=None, n=1, resume=False)
    assert in_flags(message, args) == with_flags
    assert in_flags(message, argparse.Namespace()) == message


def test_names_of_elsewhere_stand_for_names_that_there_are() -> None:
    compiles = {*inspect.signature(compilespec.compile).parameters, "max_ngram", "min_ngram"}
    known = {
        "compile": compiles,
        "SamplingParams": set(FIELDS),
        "generate": set(inspect.signature(Engine.generate).parameters),
        "spec": set(method_names()),
        "dtype": set(DTYPES),
        "device": set(DEVICES),
        "quantize": set(NAMES),
    }
    assert set(ELSEWHERE) == set(known)
    for part, table in ELSEWHERE.items():
        assert not table.keys() & known[part], "what is right is no mistake"
        assert {ours.split(" ")[0] for ours in table.values()} <= known[part]


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """As in `compilespec methods --drafts | head -1`: here its end of the pipe is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "compilespec", "methods", "--drafts"]
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
