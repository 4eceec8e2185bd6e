"""Compiled graphs on disk, keyed by everything that shapes them: safe to share and to delete."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compilespec import _torch_compat
from compilespec.program import PhaseGraph

logger = logging.getLogger("compilespec")


def cache_directory() -> Path:
    """`COMPILESPEC_CACHE_DIR`, else `~/.cache/compilespec`."""
    return Path(os.environ.get("COMPILESPEC_CACHE_DIR") or Path.home() / ".cache" / "compilespec")


def artifact_key(graph: PhaseGraph, options: dict[str, Any]) -> str:
    """Hash of the graph's code, its inputs' layouts, its constants, the options, and the versions that lower it."""
    digest = hashlib.sha256()
    digest.update(torch.__version__.encode())
    digest.update(torch.backends.cpu.get_cpu_capability().encode())
    digest.update(json.dumps(options, sort_keys=True).encode())
    digest.update(graph.graph_module.code.encode())
    for value in graph.fakes:
        digest.update(f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}\n".encode())
    for name, buffer in sorted(graph.graph_module.named_buffers()):
        digest.update(name.encode() + buffer.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for name, value in sorted(vars(graph.graph_module).items()):
        if isinstance(value, Tensor):
            digest.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


class ArtifactCache:
    """One file an artifact.  A file that cannot be read is dropped with a warning and compiled again."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or cache_directory()) / "artifacts"

    def load(self, key: str) -> Any | None:
        path = self.directory / f"{key}.bin"
        if not path.exists():
            return None
        try:
            return _torch_compat.load_artifact(str(path))
        except Exception as error:  # a torn file, another machine's code: whatever it is, compiling repairs it
            logger.warning("dropping unreadable artifact %s (%s); compiling again", path.name, error)
            path.unlink(missing_ok=True)
            return None

    def save(self, key: str, artifact: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=key)
        os.close(handle)
        try:
            artifact.save(path=temporary, format="binary")
            os.replace(temporary, self.directory / f"{key}.bin")
        except Exception as error:  # the engine runs without a saved artifact; only the next start pays
            logger.warning("artifact %s was not saved: %s", key, error)
            Path(temporary).unlink(missing_ok=True)
