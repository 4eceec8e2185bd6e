"""A compiled model in one file: written, loaded in another cache, refused where it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import CheckpointError, InvalidOption, ModelNotFound
from compilespec.ops import _build
from compilespec.pipeline import one_file
from tests.support.models import save_byte_model

PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
OPTIONS = {"backend": "eager", "max_batch_size": 2, "max_seq_len": 64, "num_draft_tokens": (0, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_byte_model(path, num_layers=2, max_positions=64)
    (path / "LICENSE").write_text("as you like")
    return path


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of an interpreted engine; its cache holds a library of no machine."""
    folder = tmp_path_factory.mktemp("built")
    cache = folder / "cache"
    (cache / "artifacts").mkdir(parents=True)
    (cache / "artifacts" / "a.so").write_bytes(b"\x7fELF" + bytes(range(256)) * 8)
    (cache / "artifacts" / "a.bin").write_bytes(b"a pickle")
    record = {"library": {"content": "c", "machine": "0" * 64}}
    (cache / "artifacts" / "a.json").write_text(json.dumps(record))
    path = folder / "tiny.cspec"
    with compilespec.compile(model, "ngram", **OPTIONS) as engine:
        tokens = tuple(engine.generate([list(PROMPT)], PARAMS)[0].token_ids)
        one_file.write(path, model, "ngram", OPTIONS, cache=cache, engine=engine, prompt=PROMPT,
                       tokens=tokens)  # fmt: skip
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine's cache: an empty one."""
    monkeypatch.setenv(_build.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def changed(path: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another manifest."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == one_file.MANIFEST:
                record = json.loads(data)
                change(record)
                data = json.dumps(record).encode()
            new.writestr(name, data)
    return to


def test_it_starts_with_the_builders_tokens(built: Path, cache: Path) -> None:
    manifest = one_file.read_manifest(built)
    assert manifest.licences == ("model/LICENSE",)
    assert manifest.plan["method"] == "ngram"
    assert not any(name.endswith(".bin") for name in manifest.files)
    for _ in range(2):  # unpacked, and found
        with compilespec.load(built, trust=True) as engine:
            assert engine.geometry.config.draft_counts == (0, 2)
            output = engine.generate([list(PROMPT)], PARAMS)[0]
            assert tuple(output.token_ids) == manifest.tokens
            assert engine.generate(["abc"], PARAMS)[0].text is not None
    record = json.loads((cache / "artifacts" / "a.json").read_text())
    assert record["library"] == {"content": "c", "machine": one_file.machine_digest()}
    assert (cache / "artifacts" / "a.so").is_file()


def test_who_does_not_trust_runs_nothing(built: Path, cache: Path) -> None:
    with pytest.raises(InvalidOption, match=r"holds machine code, .* pass trust=True"):
        compilespec.load(built)
    assert not cache.exists()


@pytest.mark.parametrize("entry", [
    one_file.MANIFEST, "model/model.safetensors", "model/config.json", "cache/artifacts/a.so",
    "cache/artifacts/a.json",
])  # fmt: skip
def test_a_bit_that_flipped_is_refused(built: Path, tmp_path: Path, entry: str) -> None:
    data = bytearray(built.read_bytes())
    with zipfile.ZipFile(built) as file:
        content = file.read(entry)
    place = bytes(data).index(content) + len(content) // 2
    data[place] ^= 1
    path = tmp_path / "torn.cspec"
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"torn\.cspec is damaged: .*; build it again"
    ) as told:
        compilespec.load(path, trust=True)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("size", [0, 100, -100])
def test_a_file_that_was_cut_is_refused(built: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.cspec"
    path.write_bytes(built.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cut\.cspec is damaged"):
        compilespec.load(path, trust=True)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("format", 9, "has format 9, and this compilespec reads 1"),
    ("torch", "2.0.0", "was built with another torch .2.0.0, and this is "),
    ("python", "3.9", "was built with another python"),
    ("compilespec", "0" * 64, "was built with another compilespec .its code differs"),
    ("files", {}, "its entries are not those of its manifest"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    built: Path, tmp_path: Path, name: str, value: Any, said: str
) -> None:
    path = changed(built, tmp_path / "other.cspec", lambda record: record.update({name: value}))
    with pytest.raises(CheckpointError, match=said):
        compilespec.load(path, trust=True)


def test_an_entry_outside_the_folder_is_refused(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.cspec"
    changed(built, path, lambda record: record["files"].update({"../out": "0"}))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("../out", b"x")
    with pytest.raises(CheckpointError, match=r"an entry leaves the folder: '\.\./out'"):
        compilespec.load(path, trust=True)


def test_on_a_lesser_cpu_the_steps_are_compiled_there(
    built: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(built, tmp_path / "c.cspec", lambda record: record.update(cpu=["avx9"]))
    with compilespec.load(path, trust=True) as engine:
        tokens = engine.generate([list(PROMPT)], PARAMS)[0].token_ids
    assert tuple(tokens) == one_file.read_manifest(path).tokens
    assert "built for a CPU with avx9, which this one lacks" in caplog.text
    assert not (cache / "artifacts" / "a.so").exists()


UNWRITTEN: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("ngram", {"draft_tree": DraftTree(top_k=2, depth=2, num_nodes=3)}, "draft_tree= has no form"),
    ("ngram", {"adapters": "/"}, "adapters='/' is a place on this machine"),
    ("auto", {}, "spec='auto' chooses anew at every start: build with .* 'ngram'"),
)


def test_what_cannot_be_written_is_refused(built: Path, model: Path, tmp_path: Path) -> None:
    with compilespec.load(built, trust=True) as engine:
        for spec, keywords, said in UNWRITTEN:
            with pytest.raises(InvalidOption, match=said):
                one_file.write(tmp_path / "x.cspec", model, spec, keywords, cache=tmp_path,
                               engine=engine, prompt=(), tokens=())  # fmt: skip
    assert not list(tmp_path.glob("*.cspec*"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="expected a file of `compilespec build`"):
        compilespec.load(tmp_path / "none.cspec", trust=True)


def test_the_command_builds_what_starts_without_a_compiler(tmp_path: Path) -> None:
    path = tmp_path / "demo.cspec"
    command = [sys.executable, "-m", "compilespec", "build", "demo", "--spec", "eagle3", "-o",
               str(path), "--json"]  # fmt: skip
    told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert told["tokens"] == 24
    alone = {**os.environ, "PATH": "", "CXX": "no-compiler"}
    code = (
        "import sys, compilespec\n"
        "engine = compilespec.load(sys.argv[1], trust=True)\n"
        "print(engine.generate(['The river'])[0].text)\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=alone, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.strip().endswith("False")
