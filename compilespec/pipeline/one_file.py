"""A compiled model in one file: the checkpoint, what the caches hold of it, and how it is started.

The file is an uncompressed zip: `manifest.json` names the digest of every other entry.  `model/`
and `draft/` are the checkpoints as they were, `cache/` has the traces and plans as JSON, and the
libraries of the steps and of our kernels.  Nothing in it is a pickle, but libraries are machine
code: `load` opens them for those who trust the builder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

from compilespec.errors import CheckpointError, InvalidOption, ModelNotFound
from compilespec.errors.suggest import not_there
from compilespec.lowering.artifacts import machine_digest, source_digest
from compilespec.methods.registry import get_method
from compilespec.ops import _build
from compilespec.ops._levels import VARIABLE, cpu_features, fitting
from compilespec.ops.device import traits_of
from compilespec.pipeline.entry import compile
from compilespec.progress import Progress
from compilespec.runtime.engine import Engine
from compilespec.tracing.places import find_model

logger = logging.getLogger("compilespec")

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
COPIED_BYTES = 1 << 20
KEPT = ("artifacts", "kernels", "traces")  # folders of the cache
# Inductor's own form of an artifact is a pickle; a step that is one library does not need it.
LEFT_OUT = {".bin", ".lock", ".part"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts that a file states about itself."""

    format: int
    compilespec: str
    """A digest of the code."""
    torch: str
    python: str
    cpu: tuple[str, ...]
    """The features that the machine code may use, by the names of /proc/cpuinfo."""
    level: str
    """The level of CPU features of the kernels."""
    model: str
    """The model's path in the file."""
    spec: str
    keywords: Mapping[str, Any]
    """Of `compile()`; paths are those in the file."""
    plan: Mapping[str, Any]
    """The engine's plan where it was built."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Greedy tokens after this prompt, where it was built."""
    licences: tuple[str, ...]
    files: Mapping[str, str]
    """SHA-256 by entry."""


# --- building ---


def write(
    output: Path,
    model: str | Path,
    spec: str,
    keywords: Mapping[str, Any],
    *,
    cache: Path,
    engine: Engine,
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
) -> Manifest:
    """Write a file of an engine that was compiled with these keywords and this cache directory.

    Raises: InvalidOption for a keyword that has no form in a file.
    """
    if get_method(spec).capabilities.chooses:
        raise InvalidOption(
            f"spec={spec!r} chooses anew at every start: build with the method that it chose here, "
            f"{engine.plan()['method']!r}"
        )
    if not traits_of(engine.geometry.config.device).is_cpu:
        raise InvalidOption("a file is for the CPU alone: leave device= out")
    place = find_model(model)
    keywords, sources = dict(keywords), {}
    draft = keywords.pop("draft", None)
    plain = _plain(keywords)
    if place.gguf_file is not None:
        sources[f"model/{place.gguf_file}"] = place.path
    else:
        sources.update(_below(place.directory, "model"))
    if draft is not None:
        sources.update(_below(Path(draft), "draft"))
        plain["draft"] = "draft"
    for folder in KEPT:
        sources.update(_below(cache / folder, f"cache/{folder}"))
    features = cpu_features()
    manifest = Manifest(
        format=FORMAT, compilespec=source_digest(), torch=torch.__version__, python=_python(),
        cpu=tuple(sorted(features)), level=kernel_level(), spec=spec, keywords=plain,
        model="model" if place.gguf_file is None else f"model/{place.gguf_file}",
        plan=json.loads(json.dumps(engine.plan(), default=str)), prompt=prompt, tokens=tokens,
        licences=tuple(n for n in sources if "licen" in n.lower() or "notice" in n.lower()),
        files={name: _digest(path) for name, path in sorted(sources.items())},
    )  # fmt: skip
    passing = output.with_name(f"{output.name}.part")
    with zipfile.ZipFile(passing, "w", zipfile.ZIP_STORED) as file:
        file.writestr(MANIFEST, json.dumps(vars(manifest)))
        for name, path in sorted(sources.items()):
            file.write(path, name)
    os.replace(passing, output)
    return manifest


def _below(folder: Path, name: str) -> dict[str, Path]:
    """The files of a folder, by their names in the file."""
    if not folder.is_dir():
        return {}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name[:5] != "cache" or path.suffix not in LEFT_OUT)
    }


def _plain(keywords: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in keywords.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(part, str | int | float | Path) for part in parts):
            raise InvalidOption(f"{name}= has no form in a file: leave it out, or use compile()")
        if isinstance(value, str | Path) and Path(value).exists():
            raise InvalidOption(
                f"{name}={str(value)!r} is a place on this machine: leave it out, or use compile()"
            )
    return dict(keywords)


def kernel_level() -> str:
    """The name of the level that kernels of a file are compiled for; "" where there is none."""
    levels = fitting(cpu_features())
    return os.environ.get(VARIABLE) or (levels[0].name if levels else "")


# --- loading ---


def load(
    path: str | Path,
    *,
    trust: bool = False,
    progress: Callable[[Progress], object] | Literal[False] | None = None,
) -> Engine:
    """Start the engine of a file that `compilespec build` wrote.

    Nothing is compiled or traced where torch, Python, compilespec and the CPU's features are those
    of the builder.  On a CPU that lacks some, a warning says so and the steps are compiled here.

    Args:
        trust: the file holds machine code, which runs with your rights: say that you know its
            builder.
        progress: as for `compile`.
    Raises: InvalidOption (no `trust`), ModelNotFound, CheckpointError (damaged, of another format,
        or built for another torch, Python or compilespec).
    """
    path = Path(path)
    if not trust:
        raise InvalidOption(
            f"{path} holds machine code, which runs with your rights: pass trust=True if you know "
            "who built it"
        )
    if not path.is_file():
        raise ModelNotFound(f"{not_there(path)}; expected a file of `compilespec build`")
    with _opened(path) as file:
        manifest, name = _read_manifest(file, path)
        _check_fits(manifest, path)
        folder = _unpack(file, manifest, name)
    keywords = dict(manifest.keywords)
    if "draft" in keywords:
        keywords["draft"] = folder / keywords["draft"]
    return compile(folder / manifest.model, manifest.spec, progress=progress, **keywords)


def read_manifest(path: Path) -> Manifest:
    """Read the facts that a file states about itself; nothing is run.  Raises: as `load`."""
    with _opened(path) as file:
        return _read_manifest(file, path)[0]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file; what cannot be read of it is a CheckpointError."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; build it again") from error


def _read_manifest(file: zipfile.ZipFile, path: Path) -> tuple[Manifest, str]:
    """The manifest, and its digest."""
    if file.getinfo(MANIFEST).file_size > MAX_MANIFEST_BYTES:
        raise ValueError("its manifest is too large")
    text = file.read(MANIFEST)
    record = json.loads(text)
    if record["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {record['format']}, and this compilespec reads {FORMAT}: build it "
            "again"
        )
    for name in ("cpu", "prompt", "tokens", "licences"):
        record[name] = tuple(record[name])
    names = {MANIFEST, *record["files"]}
    if set(file.namelist()) != names or len(file.namelist()) != len(names):
        raise ValueError("its entries are not those of its manifest")
    for name in names:
        parts = PurePosixPath(name).parts
        if ".." in parts or name.startswith("/") or "\\" in name:
            raise ValueError(f"an entry leaves the folder: {name!r}")
    return Manifest(**record), hashlib.sha256(text).hexdigest()[:32]


def _check_fits(manifest: Manifest, path: Path) -> None:
    here = {"torch": torch.__version__, "python": _python(), "compilespec": source_digest()}
    for name, value in here.items():
        built = getattr(manifest, name)
        if built == value:
            continue
        said = "its code differs" if name == "compilespec" else f"{built}, and this is {value}"
        raise CheckpointError(f"{path} was built with another {name} ({said}): build it again")


def _unpack(file: zipfile.ZipFile, manifest: Manifest, name: str) -> Path:
    """Check every entry, and put what is missing into the cache.

    Returns: the folder of the checkpoints.
    """
    cache = _build.cache_directory()
    folder = cache / "files" / name
    lacking = sorted(set(manifest.cpu) - cpu_features())
    if lacking:
        logger.warning(
            "the file was built for a CPU with %s, which this one lacks: its steps are compiled "
            "here", ", ".join(lacking[:6]),
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for entry, digest in manifest.files.items():
        is_cache = entry.startswith("cache/")
        target = cache / entry.removeprefix("cache/") if is_cache else folder / entry
        if is_cache and lacking:
            continue
        _extract(file, entry, digest, target)
    if _build.kernels_untried() and not lacking and manifest.level:
        os.environ.setdefault(VARIABLE, manifest.level)
    return folder


def _extract(file: zipfile.ZipFile, entry: str, digest: str, target: Path) -> None:
    """Write an entry, whole or not at all, unless it is there; its digest is checked always."""
    is_there = target.is_file() and target.stat().st_size == file.getinfo(entry).file_size
    found = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as scratch:
        passing = Path(scratch) / "entry"
        with file.open(entry) as source, passing.open("wb") as sink:
            for data in _pieces(source):
                found.update(data)
                if not is_there:
                    sink.write(data)
        if found.hexdigest() != digest:
            raise ValueError(f"{entry} is not what was built")
        if is_there:
            return
        if entry.startswith("cache/artifacts/") and entry.endswith(".json"):
            _belong_here(passing)
        os.replace(passing, target)


def _pieces(source: Any) -> Iterator[bytes]:
    while data := source.read(COPIED_BYTES):
        yield data


def _belong_here(record_file: Path) -> None:
    """Mark a library's record as one of this machine: that it fits was checked."""
    record = json.loads(record_file.read_text())
    if isinstance(record, dict) and "library" in record:
        record["library"]["machine"] = machine_digest()
        record_file.write_text(json.dumps(record))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
