"""Compiled steps on disk, keyed by everything that they depend on: safe to share and to delete."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.lowering.constants import Compiled, constants_of, to_record
from compilespec.lowering.stitching import StitchPlan
from compilespec.ops._build import cache_directory, toolchain, unwritable
from compilespec.ops.device import traits_of
from compilespec.program import InputSpec, PhaseGraph, SpecProgram

logger = logging.getLogger("compilespec")


class Interface(NamedTuple):
    """The facts of a step that are stored beside its code."""

    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    waits_for_host: str = ""


Stored = tuple[Any, Interface]  # a callable and its facts


@dataclass(frozen=True)
class ArtifactKey:
    """The parts that an artifact depends on; their string names its files."""

    parts: tuple[tuple[str, str], ...]

    @functools.cached_property
    def name(self) -> str:
        return _digest(json.dumps(self.parts).encode())[:32]

    def __str__(self) -> str:
        return self.name


def artifact_key(graph: PhaseGraph, program: SpecProgram, options: dict[str, Any]) -> ArtifactKey:
    """The key of a step: the spliced graph, its inputs' layouts, integer weights and constants, all
    sizes, the options, and the code that lowers it.
    """
    layouts = hashlib.sha256()
    for node in graph.spliced.graph.find_nodes(op="placeholder"):
        weight = program.weights.get(node.meta["role"])
        if weight is not None:
            layout = (tuple(weight.shape), weight.stride(), weight.dtype, weight.device)
            layouts.update(f"{node.name} {layout}\n".encode())
            # `bound_positions` reads the values of id tables; bytes are quantized weights
            if not weight.is_floating_point() and weight.dtype not in (torch.int8, torch.uint8):
                layouts.update(tensor_bytes(weight))
    sizes = dataclasses.asdict(program.config)
    model = sorted((name, tuple(w.shape)) for name, w in program.target.weights.items())
    return _key(
        {
            "model": _digest(repr(model).encode()),
            "step": f"{graph.phase}, {graph.key.kind}",
            **_environment(options, program.config.device),
            "method": program.method,
            **{name: str(size).removeprefix("torch.") for name, size in sizes.items()},
            "K of the step": str(graph.key.num_draft_tokens),
            "buffers": _digest(repr(program.buffers).encode()),
            "graph of the step": graph_digest(graph.spliced),
            "layout of weights": layouts.hexdigest(),
        }
    )


def graph_digest(gm: fx.GraphModule) -> str:
    """Hash the graph's code and its buffers.  Shapes and dtypes of its inputs, weights among them,
    do not count: the caller adds them to the key.
    """
    digest = hashlib.sha256(gm.code.encode())
    for name, buffer in sorted(gm.named_buffers()):
        digest.update(name.encode() + tensor_bytes(buffer))
    return digest.hexdigest()


def piece_file_key(structure: str, options: dict[str, Any], device: torch.device) -> ArtifactKey:
    """The key of a piece: its structure, the options, where it runs, and the code that lowers
    it.
    """
    return _key({**_environment(options, device), "device": str(device), "piece": structure})


def _key(parts: Mapping[str, str]) -> ArtifactKey:
    return ArtifactKey(tuple(parts.items()))


def _environment(options: dict[str, Any], device: torch.device) -> dict[str, str]:
    return {
        "torch version": torch.__version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        **(_gpu(device) if traits_of(device).is_cuda else {}),
        "compilespec's code": source_digest(),
        "compiler options": json.dumps(options, sort_keys=True),
    }


def _gpu(device: torch.device) -> dict[str, str]:
    """The parts of a key for machine code of a GPU: its architecture, its model where kernels were
    tuned by measurement, and Triton's version, which is not torch's.
    """
    found = torch.cuda.get_device_properties(device)
    triton = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
    return {
        "GPU": f"{found.name} (sm_{found.major}{found.minor})",
        "Triton version": "none" if triton is None else str(triton.__version__),
    }


# Parts that usually follow from others: reported only if none of the others differs.
_DERIVED = ("K of the step", "buffers", "graph of the step", "layout of weights")
_MAX_REPORTED_CHARS = 24  # longer values (digests, lists of options) are not worth reporting


def _difference(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """The parts in which two keys differ, with their old and new values."""
    names = _differing(stored, wanted)
    told = [name for name in names if name not in _DERIVED] or names
    changes = []
    for name in told:
        values = (stored.get(name, "nothing"), wanted.get(name, "nothing"))
        is_told = max(map(len, values)) <= _MAX_REPORTED_CHARS
        changes.append(f"{name} changed{' from {} to {}'.format(*values) if is_told else ''}")
    return ", ".join(changes) or "the artifact is gone or cannot be read"


def _differing(stored: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    return [name for name in {**wanted, **stored} if stored.get(name) != wanted.get(name)]


@functools.cache
def source_digest() -> str:
    """A digest of the package's code: any change of the code invalidates every artifact."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp"), *root.rglob("*.h")]):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor, on any device."""
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


class ArtifactCache:
    """Two files per artifact: the compiled step, and its constants and the names of its inputs and
    outputs, written last.  The keys of each model's steps, part by part, are stored beside them.

    A step that is one C++ function has its library as a third file, which is opened without
    Inductor: importing Inductor takes longer than opening all libraries.

    A file that cannot be read is dropped with a warning and compiled again, even if the directory
    cannot be written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or cache_directory()) / "artifacts"
        self._is_told = False  # that it cannot be written

    def load(self, key: ArtifactKey) -> Stored | None:
        files = self._paths(key)
        try:
            if not files.names.exists():
                return None
            record = json.loads(files.names.read_text())
            artifact = _torch_compat.load_artifact(str(files.code))
            library = _torch_compat.cpp_entry(artifact)
            compiled = Compiled(artifact, constants_of(record["constants"]), library)
            return compiled, _interface_of(record)
        except (
            Exception
        ) as error:  # a truncated file, another machine's code: compiling again repairs it
            _drop(f"artifact {files.code.name}", error, *files)
            return None

    def open_library(self, key: ArtifactKey) -> Compiled | None:
        """Open the library of a step that is one C++ function; None where it is not stored,
        incomplete, or compiled for another machine.
        """
        files = self._paths(key)
        try:
            if not files.library.exists():
                return None
            record = json.loads(files.names.read_text())
            if record["library"] != _library_record(files.library):
                return None
            constants = constants_of(record["constants"])
            ctypes.CDLL(str(files.library))
        except Exception as error:  # `load` asks for the other files, and repairs what is torn
            logger.debug("library %s was not opened: %s", files.library.name, error)
            return None
        return Compiled(None, constants, files.library)

    def save(self, key: ArtifactKey, compiled: Compiled, interface: Interface) -> None:
        files = self._paths(key)
        record = {**_record(interface), "constants": to_record(compiled.constants)}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                compiled.artifact.save(path=f"{scratch}/code", format="binary")
                if compiled.library is not None:
                    shutil.copyfile(compiled.library, f"{scratch}/library")
                    record["library"] = _library_record(Path(f"{scratch}/library"))
                    os.replace(f"{scratch}/library", files.library)
                Path(f"{scratch}/names").write_text(json.dumps(record))
                os.replace(f"{scratch}/code", files.code)
                os.replace(f"{scratch}/names", files.names)
        except (
            Exception
        ) as error:  # the engine runs without a saved artifact; the next start compiles again
            self._not_saved(f"artifact {key}", error)

    def is_empty(self) -> bool:
        """True where no earlier start left anything here."""
        return not self.directory.is_dir()

    def load_plan(self, key: ArtifactKey) -> tuple[StitchPlan, Interface] | None:
        """Load the plan of a phase's pieces; None if it is not stored."""
        path = self._plan_path(key)
        try:
            if not path.exists():
                return None
            record = json.loads(path.read_text())
            return StitchPlan.from_json(record["plan"]), _interface_of(record)
        except Exception as error:  # as above
            _drop(f"plan {path.name}", error, path)
            return None

    def save_plan(self, key: ArtifactKey, plan: StitchPlan, interface: Interface) -> None:
        record = {**_record(interface), "plan": plan.to_json()}
        path = self._plan_path(key)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                Path(f"{scratch}/plan").write_text(json.dumps(record))
                os.replace(f"{scratch}/plan", path)
        except OSError as error:
            self._not_saved(f"plan {key}", error)

    def _not_saved(self, what: str, error: Exception) -> None:
        """Warn, once where the directory is to blame."""
        cause = unwritable(error) if isinstance(error, OSError) else error
        level = logging.DEBUG if self._is_told else logging.WARNING
        self._is_told = isinstance(error, OSError)
        logger.log(level, "%s was not saved, the next start compiles it again: %s", what, cause)

    def keep_key(self, key: ArtifactKey) -> None:
        """Store the parts of a step's key, for `why_new` of later keys."""
        path = self._keys_of(key) / f"{key}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                Path(f"{scratch}/key").write_text(json.dumps(dict(key.parts)))
                os.replace(f"{scratch}/key", path)
        except OSError as error:  # the artifact was not saved either, which was logged
            logger.debug("key %s was not saved: %s", key, error)

    def why_new(self, key: ArtifactKey) -> str:
        """The difference between a step's key and the nearest one of the same step and model, in
        words.
        """
        wanted = dict(key.parts)
        keys = [parts for path in self._stored_keys(key) if (parts := _parts_of(path))]
        if not keys:
            return "first time for this model"
        same_step = [stored for stored in keys if stored.get("step") == wanted["step"]]
        if not same_step:
            return "first time for this step of the model"
        return _difference(min(same_step, key=lambda k: len(_differing(k, wanted))), wanted)

    def _stored_keys(self, key: ArtifactKey) -> list[Path]:
        """The stored keys of the same model."""
        try:
            return sorted(self._keys_of(key).glob("*.json"))
        except OSError:
            return []

    def _keys_of(self, key: ArtifactKey) -> Path:
        return self.directory / "keys" / dict(key.parts)["model"][:32]

    def _plan_path(self, key: ArtifactKey) -> Path:
        return self.directory / f"{key}.plan.json"

    def _paths(self, key: ArtifactKey) -> _Files:
        return _Files(*(self.directory / f"{key}.{kind}" for kind in ("json", "bin", "so")))


class _Files(NamedTuple):
    """The paths of an artifact's files."""

    names: Path
    code: Path
    library: Path


def _library_record(library: Path) -> dict[str, str]:
    """The contents of a library's record, and what it was compiled for: torch, the CPU, the
    compiler, Python.
    """
    return {"content": _digest(library.read_bytes()), "machine": machine_digest()}


def machine_digest() -> str:
    """A digest of what a library is compiled for here."""
    return _digest("\0".join((*toolchain(), platform.python_version())).encode())


def _parts_of(path: Path) -> dict[str, str]:
    """The parts of a stored key; empty if it cannot be read, which only loses a reason."""
    try:
        return {str(name): str(value) for name, value in json.loads(path.read_text()).items()}
    except Exception:  # as above
        return {}


def _drop(what: str, error: Exception, *files: Path) -> None:
    """Delete files that cannot be read, if the directory can be written."""
    logger.warning("dropping unreadable %s (%s); compiling again", what, error)
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _record(interface: Interface) -> dict[str, Any]:
    inputs = [dataclasses.asdict(spec) for spec in interface.inputs]
    return {**interface._asdict(), "inputs": inputs}


def _interface_of(record: dict[str, Any]) -> Interface:
    inputs = tuple(
        InputSpec(**{**spec, "sources": tuple(spec["sources"])}) for spec in record["inputs"]
    )
    return Interface(inputs, tuple(record["outputs"]), str(record["waits_for_host"]))
