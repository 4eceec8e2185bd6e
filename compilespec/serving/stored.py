"""Stored responses: answers that later requests continue, in memory or in a folder."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import orjson

from compilespec.errors import InvalidOption

logger = logging.getLogger("compilespec")

ID = re.compile(r"resp_[0-9a-f]{32}")


class StoredResponses:
    """Records of JSON by their ids, within a number of bytes: the oldest ones go first.

    Args:
        max_bytes: of all records together; a larger record is not kept.
        folder: a file for each record, which outlives the server; None: in memory.
    Raises: InvalidOption for a folder that cannot be made.
    """

    def __init__(self, max_bytes: int, folder: str | None = None) -> None:
        self._max_bytes = max_bytes
        self._folder = None if folder is None else Path(folder)
        self._lock = threading.Lock()
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by id, the oldest first
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = [(path.stat(), path) for path in self._folder.glob("resp_*.json")]
        except OSError as error:
            raise InvalidOption(f"stored_responses_dir: {error}; name another folder") from error
        for stat, path in sorted(found, key=lambda pair: pair[0].st_mtime_ns):
            if ID.fullmatch(path.stem):
                self._sizes[path.stem] = stat.st_size
        self._make_room()

    def put(self, name: str, record: dict[str, Any]) -> bool:
        """Keep a record; it takes the place of the oldest ones where there is no room.  Returns
        False where it is too large, or its file cannot be written, which the log says.
        """
        data = orjson.dumps(record)
        with self._lock:
            if len(data) > self._max_bytes:
                return False
            if self._folder is None:
                self._records[name] = data
            elif not _write(self._path(name), data):
                return False
            self._sizes[name] = len(data)
            self._make_room()
        return True

    def get(self, name: str) -> dict[str, Any] | None:
        """A record; None where there is none, or none that can be read."""
        with self._lock:
            if not ID.fullmatch(name):
                return None
            try:
                data = (
                    self._records.get(name)
                    if self._folder is None
                    else self._path(name).read_bytes()
                )
                record = None if data is None else orjson.loads(data)
            except (OSError, orjson.JSONDecodeError):
                return None
            return record if isinstance(record, dict) else None

    def remove(self, name: str) -> bool:
        """True if there was such a record."""
        with self._lock:
            return bool(ID.fullmatch(name)) and self._drop(name)

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "only records in a folder have a path"
        return self._folder / f"{name}.json"

    def _drop(self, name: str) -> bool:
        was_there = self._sizes.pop(name, None) is not None
        if self._folder is None:
            return self._records.pop(name, None) is not None
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()
            was_there = True
        return was_there

    def _make_room(self) -> None:
        while sum(self._sizes.values()) > self._max_bytes:
            self._drop(next(iter(self._sizes)))


def _write(path: Path, data: bytes) -> bool:
    """Write a file, whole or not at all; False where that fails."""
    passing = path.with_suffix(f".{os.getpid()}.part")
    try:
        passing.touch(mode=0o600)
        passing.write_bytes(data)
        passing.replace(path)
    except OSError as error:
        logger.warning("a response was not stored: %s", error)
        with contextlib.suppress(OSError):
            passing.unlink(missing_ok=True)
        return False
    return True
