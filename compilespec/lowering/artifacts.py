"""Compiled steps on disk, keyed by everything that shapes them: safe to share and to delete."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compilespec
from compilespec import _torch_compat
from compilespec.lowering.pieces import StitchPlan
from compilespec.program import InputSpec, PhaseGraph, SpecProgram

logger = logging.getLogger("compilespec")

Stored = tuple[Any, tuple[InputSpec, ...], tuple[str, ...]]  # callable, its inputs, its outputs


def cache_directory() -> Path:
    """`COMPILESPEC_CACHE_DIR`, else `~/.cache/compilespec`."""
    return Path(os.environ.get("COMPILESPEC_CACHE_DIR") or Path.home() / ".cache" / "compilespec")


def artifact_key(graph: PhaseGraph, program: SpecProgram, options: dict[str, Any]) -> str:
    """Hash of the spliced step, its inputs' layouts, integer weights and constants, all sizes, the
    options, and the code that lowers it.
    """
    digest = _environment_digest(options)
    digest.update(f"{graph.phase} {program.config} {program.buffers}\n".encode())
    digest.update(graph.spliced.code.encode())
    for node in graph.spliced.graph.find_nodes(op="placeholder"):
        weight = program.weights.get(node.meta["role"])
        if weight is not None:
            layout = (tuple(weight.shape), weight.stride(), weight.dtype, weight.device)
            digest.update(f"{node.name} {layout}\n".encode())
            # `bound_positions` reads the values of id tables; bytes are quantized weights
            if not weight.is_floating_point() and weight.dtype not in (torch.int8, torch.uint8):
                digest.update(_bytes(weight))
    for name, buffer in sorted(graph.spliced.named_buffers()):
        digest.update(name.encode() + _bytes(buffer))
    return digest.hexdigest()[:32]


def piece_file_key(structure: str, options: dict[str, Any]) -> str:
    """The key of a piece: its structure, the options, and the code that lowers it."""
    digest = _environment_digest(options)
    digest.update(f"piece {structure}".encode())
    return digest.hexdigest()[:32]


def _environment_digest(options: dict[str, Any]) -> Any:
    digest = hashlib.sha256()
    capability = torch.backends.cpu.get_cpu_capability()
    digest.update(f"{torch.__version__} {capability} {_source_digest()}\n".encode())
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest


@functools.cache
def _source_digest() -> str:
    """Any change of the package's code makes every artifact another one."""
    digest = hashlib.sha256()
    root = Path(compilespec.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp"), *root.rglob("*.h")]):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


class ArtifactCache:
    """Two files an artifact: the compiled step, and the names of its inputs and outputs, written
    last.

    What cannot be read is dropped with a warning and compiled again, also where the directory
    cannot be written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or cache_directory()) / "artifacts"

    def load(self, key: str) -> Stored | None:
        code, names = self._paths(key)
        try:
            if not names.exists():
                return None
            record = json.loads(names.read_text())
            call = _torch_compat.load_artifact(str(code))
            return call, _inputs_of(record), tuple(record["outputs"])
        except (
            Exception
        ) as error:  # a torn file, another machine's code: whatever it is, compiling repairs it
            _drop(f"artifact {code.name}", error, names, code)
            return None

    def save(
        self, key: str, compiled: Any, inputs: Sequence[InputSpec], outputs: Sequence[str]
    ) -> None:
        code, names = self._paths(key)
        record = _record(inputs, outputs)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                compiled.save(path=f"{scratch}/code", format="binary")
                Path(f"{scratch}/names").write_text(json.dumps(record))
                os.replace(f"{scratch}/code", code)
                os.replace(f"{scratch}/names", names)
        except (
            Exception
        ) as error:  # the engine runs without a saved artifact; only the next start pays
            logger.warning("artifact %s was not saved: %s", key, error)

    def load_plan(
        self, key: str
    ) -> tuple[StitchPlan, tuple[InputSpec, ...], tuple[str, ...]] | None:
        """How the pieces of a phase are put together; None where it is not known."""
        path = self._plan_path(key)
        try:
            if not path.exists():
                return None
            record = json.loads(path.read_text())
            plan = StitchPlan.from_json(record["plan"])
            return plan, _inputs_of(record), tuple(record["outputs"])
        except Exception as error:  # as above
            _drop(f"plan {path.name}", error, path)
            return None

    def save_plan(
        self, key: str, plan: StitchPlan, inputs: Sequence[InputSpec], outputs: Sequence[str]
    ) -> None:
        record = {**_record(inputs, outputs), "plan": plan.to_json()}
        path = self._plan_path(key)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                Path(f"{scratch}/plan").write_text(json.dumps(record))
                os.replace(f"{scratch}/plan", path)
        except OSError as error:
            logger.warning("plan %s was not saved: %s", key, error)

    def _plan_path(self, key: str) -> Path:
        return self.directory / f"{key}.plan.json"

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.directory / f"{key}.bin", self.directory / f"{key}.json"


def _drop(what: str, error: Exception, *files: Path) -> None:
    """Forget files that cannot be read; they stay where the directory cannot be written."""
    logger.warning("dropping unreadable %s (%s); compiling again", what, error)
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _record(inputs: Sequence[InputSpec], outputs: Sequence[str]) -> dict[str, Any]:
    return {"inputs": [dataclasses.asdict(spec) for spec in inputs], "outputs": list(outputs)}


def _inputs_of(record: dict[str, Any]) -> tuple[InputSpec, ...]:
    return tuple(
        InputSpec(**{**spec, "sources": tuple(spec["sources"])}) for spec in record["inputs"]
    )
