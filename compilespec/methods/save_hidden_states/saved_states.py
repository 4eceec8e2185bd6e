"""Reading saved hidden states back, one record at a time."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError, safe_open
from torch import Tensor

from compilespec.errors import CheckpointError

FORMAT = "compilespec hidden states 1"
INDEX_FILE = "index.json"


class SavedStates(Sequence[dict[str, Tensor]]):
    """The records of a directory as the sample that speculators' trainers expect: `input_ids`,
    `hidden_states`, `verifier_last_hidden_states`, `loss_mask` (see `recorder`).

    Raises: CheckpointError if the directory holds no records or a shard cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.listing = read_index(self.directory)
        counts = [shard["num_records"] for shard in self.listing["shards"]]
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, number: int) -> dict[str, Tensor]: ...

    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Tensor]]: ...

    def __getitem__(self, number: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if isinstance(number, slice):
            return [self[index] for index in range(len(self))[number]]
        number = range(len(self))[number]
        shard = self.listing["shards"][bisect.bisect_right(self._ends, number)]
        prefix = f"{number}."
        with _opened(self.directory / shard["file"]) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def prompt_digests(self) -> set[str]:
        """`prompt_digest` of every record: the prompts that a continued run can skip."""
        return {record["prompt"] for record in self._notes()}

    def _notes(self) -> Iterator[dict[str, Any]]:
        for shard in self.listing["shards"]:
            with _opened(self.directory / shard["file"]) as file:
                yield from json.loads(file.metadata()["records"])


def prompt_digest(token_ids: Sequence[int]) -> str:
    """A name for a prompt's tokens."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:32]


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a directory.  Raises: CheckpointError."""
    path = directory / INDEX_FILE
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = index["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not an index of saved hidden states ({type(error).__name__})"
        ) from error
    if not known:
        raise CheckpointError(f"{path}: expected format {FORMAT!r}, got {index['format']!r}")
    return index


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
