"""Files that are complete or absent: records appended one by one, and files that are replaced."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from compilespec.errors import CheckpointError, InvalidOption

LOCK = "lock"


class Journal:
    """A JSONL file that grows by whole records; each is on disk when `append` returns.

    A record that a killed process left half-written is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._file.truncate(end_of_records(path))
            self._file.seek(0, os.SEEK_END)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.  Raises: CheckpointError; the file is then as it was before."""
        line = f"{json.dumps(record, ensure_ascii=False)}\n".encode()
        end = self._file.tell()
        try:
            with writing(self.path):
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
        except CheckpointError:
            self._file = cut(self.path, end)
            raise

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write several."""
        for record in records:
            self.append(record)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep a folder to this process; the system frees it when the process ends in any way.

    Raises: InvalidOption where another process has it; CheckpointError.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidOption(
                f"{folder} is being written by another process: wait for it to end, or give "
                "another output folder"
            ) from error
        yield


def cut(path: Path, size: int) -> Any:
    """The file, open for appending and `size` bytes long again; what its buffer held is gone."""
    file = path.open("ab", buffering=0)
    file.truncate(size)
    return file


def end_of_records(path: Path) -> int:
    """The number of bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size > 0:
            step = min(size, 1 << 16)
            file.seek(size - step)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                return size - step + found + 1
            size -= step
    return 0


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a JSONL file with their line numbers, from 1; blank lines are skipped, and so
    is an incomplete last line, which is being written.

    Raises: CheckpointError for anything else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except ValueError:
                        if not line.endswith("\n"):
                            return
                        raise
                    if not isinstance(record, dict):
                        raise ValueError(f"expected an object, got {line.strip():.40}")
                    yield number, record
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON lines ({error}); expected one JSON object a line"
        ) from error


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in its place, on disk.

    Raises: CheckpointError; what stood at `path` is then untouched.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replace` with a text."""
    replace(path, lambda part: part.write_text(text, encoding="utf-8"))


class writing:  # noqa: N801  (used like a function, in a with statement)
    """Turns an error of writing into a CheckpointError that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{self.path} cannot be written ({error.strerror or error}); what was there "
                "before is kept: free some space or give another folder, and start again"
            ) from error
