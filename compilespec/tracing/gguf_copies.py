"""What was read of GGUF files, in the cache: the next start reads it directly.

A copy is a folder in Hugging Face layout, written whole or not at all, and named by all that it
depends on.  Its weights are dequantised, and as large as the model in memory, so few are kept; or
it names the blocks that stay in the file, and holds the other weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilespec.errors import CheckpointError
from compilespec.ops._build import cache_directory
from compilespec.tracing.checkpoint_files import reason
from compilespec.tracing.quiet import no_progress_bars

logger = logging.getLogger("compilespec")

FORMAT = 2  # files of a copy
MAX_KEPT = 4  # number of copies that are kept, the last used
HEAD_BYTES = 32 << 20  # bytes of the file: header, vocabulary and the first tensors
RECORD = "copy.json"


def directory() -> Path:
    """The folder of the copies."""
    return cache_directory() / "gguf"


@dataclass(frozen=True)
class GgufCopy:
    """The copy of a file's model in a dtype (None: the file's own), which may not exist."""

    source: Path
    folder: Path

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype | None, *, keeps_blocks: bool = False) -> GgufCopy:
        path = path.resolve()
        stat = path.stat()
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
        libraries = [version(name) for name in ("gguf", "transformers", "tokenizers")]
        facts = [FORMAT, str(path), stat.st_size, stat.st_mtime_ns, head, str(dtype), libraries]
        facts.append(keeps_blocks)
        return cls(path, directory() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32])

    def find(self) -> Path | None:
        """The folder, if every file in it is unchanged; a damaged one is dropped."""
        if not self.folder.exists():
            return None
        try:
            record = json.loads((self.folder / RECORD).read_text())
            whole = {name: _checksum(self.folder / name) for name in record["files"]}
            if whole != record["files"]:
                raise ValueError("its files have changed")
            with contextlib.suppress(OSError):
                os.utime(self.folder / RECORD)  # it was used
            return self.folder
        except Exception as error:  # damage may raise anything
            self.drop(str(error))
            return None

    def drop(self, why: str) -> None:
        logger.warning("dropping the converted copy of %s (%s); converting again", self.source, why)
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self, size: int, *writers: Callable[[Path], object]) -> Path | None:
        """Write the copy, if it takes at most half of the free disk, and delete the others that are
        not needed: those of changed and deleted files, and the least recently used.

        Args:
            size: bytes of its weights.
            writers: each writes files into a folder.
        Returns: the folder, None where it could not be written.
        """
        try:
            directory().mkdir(parents=True, exist_ok=True)
            _clean()
            free = shutil.disk_usage(directory()).free
            if size > free / 2:
                logger.warning(
                    "the converted %s is not kept: it takes %.1f GB, and %.1f GB are free in %s; "
                    "the next start converts it again",
                    self.source.name, size / 1e9, free / 1e9, directory(),
                )  # fmt: skip
                return None
            with tempfile.TemporaryDirectory(dir=directory()) as scratch:
                made = Path(scratch) / "copy"
                made.mkdir()
                with no_progress_bars():
                    for write in writers:
                        write(made)
                files = {str(path.relative_to(made)): _checksum(path) for path in _files(made)}
                record = {"source": str(self.source), "files": files}
                (made / RECORD).write_text(json.dumps(record))
                os.replace(made, self.folder)
        except Exception as error:  # the model is there, and the next start converts it again
            logger.warning("the converted %s was not kept: %s", self.source.name, error)
            return None
        return self.folder


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a copy, as it was kept: model classes would rebuild some parts, and Qwen's
    adds a normalizer that a GGUF file does not name.  Raises: CheckpointError.

    Raises: CheckpointError.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library has no own error class
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason(error)}") from error


def _clean() -> None:
    """Delete unused copies, and make room for one."""
    used: list[tuple[float, Path]] = []
    for folder in directory().iterdir():
        try:
            record = json.loads((folder / RECORD).read_text())
            source, when = Path(record["source"]), (folder / RECORD).stat().st_mtime
        except Exception:  # another start is writing it, or it is damaged, which `find` sees
            continue
        if not source.exists() or source.stat().st_mtime > when:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            used.append((when, folder))
    for _, folder in sorted(used, reverse=True)[MAX_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksum(path: Path) -> list[int]:
    """The file's size, the sum of its words of eight bytes, and the sum of the remaining bytes."""
    content = np.fromfile(path, np.uint8) if path.stat().st_size < 8 else np.memmap(path, mode="r")
    num_words = len(content) // 8
    words, rest = content[: num_words * 8].view(np.int64), content[num_words * 8 :]
    return [len(content), int(words.sum(dtype=np.int64)), int(rest.sum(dtype=np.int64))]
