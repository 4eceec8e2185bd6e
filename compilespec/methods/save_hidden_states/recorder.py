"""Writes the hidden states that calls output to shards on disk.

A directory holds `index.json` and `states-00000.safetensors`, ...  A shard holds the records
`{number}.{name}`, numbered through all shards, under the names that speculators' trainers read:

    input_ids                    int64 [T]
    hidden_states                [T, A*D]   hs[k] of `aux_layers` side by side
    verifier_last_hidden_states  [T, D]     hs[n], before the final norm
    loss_mask                    int64 [T]  1 where the token was generated

With `last_hidden="post_norm"` the third is named `normed_last_hidden_states`, so that a trainer
that applies the norm itself fails instead of training on the wrong values.  Row t holds what the
target computed at position t; nothing is shifted.  The last token of a request is left out: it was
never fed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compilespec.errors import CheckpointError
from compilespec.methods.save_hidden_states.saved_states import (
    FORMAT,
    INDEX_FILE,
    prompt_digest,
    read_index,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of a record; all records of a directory share one layout."""

    aux_layers: tuple[int, ...]
    """hs indices of `hidden_states`, in order."""

    last_hidden: Literal["pre_norm", "post_norm"]
    """True where the last hidden state is taken before or after the final norm."""

    hidden_size: int
    """D."""

    dtype: torch.dtype
    """The target's dtype, in which the states are saved."""

    @property
    def last_name(self) -> str:
        pre_norm = self.last_hidden == "pre_norm"
        return "verifier_last_hidden_states" if pre_norm else "normed_last_hidden_states"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "aux_layers": list(self.aux_layers),
            "last_hidden": self.last_hidden,
            "hidden_size": self.hidden_size,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


class Recorder:
    """Takes the hidden states of running rows, keeps those of finished requests, writes shards.

    Memory: the states of the running requests, and less than `shard_tokens` finished ones (plus one
    request).  Records that are not in a shard yet are lost if the process dies; `close` writes
    them.

    Raises: CheckpointError when `directory` holds something else, or records of another layout.
    """

    def __init__(self, directory: Path, layout: Layout, *, shard_tokens: int) -> None:
        self.directory, self.layout, self.shard_tokens = directory, layout, shard_tokens
        self._shards = self._continue()
        self._running: dict[int, list[Tensor]] = {}  # by state row
        self._finished: list[dict[str, Tensor]] = []
        self._notes: list[dict[str, Any]] = []  # metadata of the finished requests' records
        self._num_pending = 0  # tokens of the finished requests

    def add(self, row: int, hidden_SE: Tensor) -> None:
        """Take the hidden states of a row's next S tokens."""
        self._running.setdefault(row, []).append(hidden_SE.detach().to("cpu", copy=True))

    def finish(self, request: Any, reason: str) -> None:
        """Make a record of a request that ended, unless it was aborted or failed."""
        states = self._running.pop(request.row, None)
        if states is None or reason not in ("stop", "length"):
            return
        num_tokens, num_prompt = request.num_tokens - 1, len(request.prompt_token_ids)
        hidden_TE = torch.cat(states)[:num_tokens]
        assert len(hidden_TE) == num_tokens, "a state for every token that was fed"
        ids = [*request.prompt_token_ids, *request.output_token_ids][:num_tokens]
        width = len(self.layout.aux_layers) * self.layout.hidden_size
        record = {
            "input_ids": torch.tensor(ids, dtype=torch.int64),
            "hidden_states": hidden_TE[:, :width].contiguous(),
            self.layout.last_name: hidden_TE[:, width:].contiguous(),
            "loss_mask": (torch.arange(num_tokens) >= num_prompt).to(torch.int64),
        }
        self._finished.append(record)
        self._notes.append(
            {"num_tokens": num_tokens, "prompt": prompt_digest(request.prompt_token_ids)}
        )
        self._num_pending += num_tokens
        if self._num_pending >= self.shard_tokens:
            self.flush()

    def forget(self, request: Any) -> None:
        """Drop the states of a preempted request: they will be computed again, in another row."""
        self._running.pop(request.row, None)

    def flush(self) -> None:
        """Write the finished requests as a shard, then the index; each file appears whole.

        Raises: CheckpointError; the records are kept, and written with the next shard.
        """
        if not self._finished:
            return
        try:
            self._write_shard()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.directory}: {len(self._finished)} records cannot be written ({error}); "
                "they are kept: fix the cause, then close the engine (again)"
            ) from error

    def close(self) -> None:
        """Write the remaining records.  Raises: CheckpointError; another call tries again."""
        self._running.clear()
        self.flush()

    def describe(self) -> str:
        layers = ", ".join(f"hs[{k}]" for k in self.layout.aux_layers)
        return (
            f"saves {layers} and the last hidden state ({self.layout.last_hidden}) to "
            f"{self.directory}, shards of {self.shard_tokens} tokens"
        )

    def _continue(self) -> list[dict[str, Any]]:
        """The shards that the directory's index lists; others are leftovers of a killed run."""
        try:
            held = list(self.directory.iterdir()) if self.directory.exists() else []
        except OSError as error:
            raise CheckpointError(
                f"output_dir must be a directory that can be read, or a new one; got "
                f"{self.directory} ({error.strerror})"
            ) from error
        if not held:
            return []
        if not (self.directory / INDEX_FILE).exists():
            left = [path for path in held if "states-" not in path.name]
            if left:
                raise CheckpointError(
                    f"{self.directory} holds {left[0].name} and no {INDEX_FILE}; give output_dir= "
                    "its own directory"
                )
            return []
        index = read_index(self.directory)
        _check_same(index, self.layout.as_json(), self.directory)
        shards: list[dict[str, Any]] = list(index["shards"])
        return shards

    def _write_shard(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        first = sum(shard["num_records"] for shard in self._shards)
        tensors = {
            f"{first + index}.{name}": tensor
            for index, record in enumerate(self._finished)
            for name, tensor in record.items()
        }
        name = f"states-{len(self._shards):05}.safetensors"
        shard = {"file": name, "num_records": len(self._finished), "num_tokens": self._num_pending}
        metadata = {"format": "pt", "records": json.dumps(self._notes)}
        scratch = self.directory / f".{name}.part"
        save_file(tensors, scratch, metadata=metadata)
        os.replace(scratch, self.directory / name)
        self._write_index([*self._shards, shard])
        self._shards.append(shard)
        self._finished, self._notes, self._num_pending = [], [], 0

    def _write_index(self, shards: list[dict[str, Any]]) -> None:
        index = {
            **self.layout.as_json(),
            "num_records": sum(shard["num_records"] for shard in shards),
            "num_tokens": sum(shard["num_tokens"] for shard in shards),
            "shards": shards,
        }
        scratch = self.directory / f".{INDEX_FILE}.part"
        scratch.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self.directory / INDEX_FILE)


def _check_same(index: Mapping[str, Any], mine: Mapping[str, Any], directory: Path) -> None:
    for key, value in mine.items():
        if index.get(key) != value:
            raise CheckpointError(
                f"{directory} holds records with {key} {index.get(key)!r}, got {value!r}; give "
                "another output_dir="
            )
