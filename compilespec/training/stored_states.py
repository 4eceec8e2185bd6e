"""Hidden states of the target on disk, so that later epochs need not run it.

`KeptStates` writes the teacher's results in bfloat16; `RecordedStates` is data with its states,
written by `spec="save_hidden_states"`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compilespec.errors import CheckpointError, InvalidOption
from compilespec.methods.save_hidden_states.saved_states import INDEX_FILE, SavedStates
from compilespec.training.batches import make_batch
from compilespec.training.data import Sample, digest
from compilespec.training.files import Journal, cut, read_records, writing
from compilespec.training.teacher import Said, States, Teacher

DTYPE = torch.bfloat16
SAID_BYTES = 8  # a float32 that is never 0, and an int32; zeros until known


class StateStore(Protocol):
    """The source of a lesson's hidden states."""

    def open(self, teacher: Teacher, aux_layers: tuple[int, ...]) -> None:
        """Prepare for a drafter that reads these hidden states; call it once, before `of`.

        Raises: SpecError where they cannot be had.
        """
        ...

    def of(self, samples: Sequence[Sample]) -> States:
        """The states of some samples, with zeros behind the end of each.  Raises:
        CheckpointError.
        """
        ...


class KeptStates:
    """States that the teacher computes once, in a file of rows beside an index of its sequences,
    and what it says there in another of `SAID_BYTES` a row.

    A sequence stands in the index only when its rows are on disk; the rest that a killed process
    left is cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, tuple[int, int]] = {}  # first row and length, by digest

    def open(self, teacher: Teacher, aux_layers: tuple[int, ...]) -> None:
        """Open the folder's files, or create them, and cut off rows that the index does not list.

        Raises: InvalidOption (it holds states of other aux layers or another width),
            CheckpointError (files that cannot be read or written).
        """
        self._teacher, self._width = teacher, teacher.info.hidden_size
        self._row = (len(aux_layers) + 1) * self._width
        index, content = self.folder / "index.jsonl", self.folder / "rows.bin"
        self._index = Journal(index)
        head = {"aux_layers": list(aux_layers), "width": self._width}
        records = [record for _, record in read_records(index)]
        if not records:
            self._index.append(head)
        elif records[0] != head:
            raise InvalidOption(
                f"{self.folder} keeps hidden states of {records[0]}, and this run needs {head}: "
                "give another output folder, or remove that one"
            )
        for record in records[1:]:
            self._places[record["sample"]] = (record["first"], record["length"])
        self._end = sum(length for _, length in self._places.values())
        with writing(content):
            content.touch()
            cut(content, self._end * self.row_bytes).close()
            self._rows = content.open("rb+", buffering=0)
            said = self.folder / "said.bin"
            said.touch()
            self._said = said.open("rb+", buffering=0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self._row * DTYPE.itemsize

    def of(self, samples: Sequence[Sample]) -> States:
        names = [digest(str(one.token_ids)) for one in samples]
        missing = {n: s for n, s in zip(names, samples, strict=True) if n not in self._places}
        if missing:
            self._compute(missing)
        each = [self._read(*self._places[name]) for name in names]
        said = [
            self._read_said(self._places[n][0], rows) for n, rows in zip(names, each, strict=True)
        ]
        device = self._teacher.info.device
        rows = pad_sequence(each, batch_first=True).to(device)
        columns = (
            pad_sequence(list(column), batch_first=True) for column in zip(*said, strict=True)
        )
        return States(
            rows[..., : -self._width],
            rows[..., -self._width :],
            Said(*(column.to(device) for column in columns)),
        )

    def _compute(self, missing: dict[str, Sample]) -> None:
        batch = make_batch(list(missing.values())).to(self._teacher.info.device)
        rows_BTR = torch.cat(self._teacher.states(batch.ids)[:2], -1).to("cpu", DTYPE)
        for rows, (name, sample) in zip(rows_BTR, missing.items(), strict=True):
            whole = rows[: len(sample)].contiguous().view(torch.uint8).numpy()
            with writing(self.folder):
                self._rows.seek(self._end * self.row_bytes)
                if self._rows.write(whole.data) != whole.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._rows.fileno())
            place = {"sample": name, "first": self._end, "length": len(sample)}
            self._index.append(place)
            self._places[name] = (self._end, len(sample))
            self._end += len(sample)

    def _read_said(self, first: int, rows: Tensor) -> Said:
        """The target's results after the rows from a place on; computed where they are unknown."""
        place, size = first * SAID_BYTES, len(rows) * SAID_BYTES
        self._said.seek(place)
        content = bytearray(self._said.read(size)).ljust(size, b"\0")
        known = torch.frombuffer(content, dtype=torch.int32).view(-1, 2)
        if bool(known[:, 0].all()):
            return Said(known[:, 0].clone().view(torch.float32), known[:, 1].long())
        said = self._teacher.says(rows[:, -self._width :].to(self._teacher.info.device))
        said = Said(*(one.cpu() for one in said))
        numbers = torch.stack([said.normalizer.view(torch.int32), said.best.int()], 1)
        with writing(self.folder):
            self._said.seek(place)
            if self._said.write(numbers.contiguous().numpy().tobytes()) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return said

    def _read(self, first: int, length: int) -> Tensor:
        self._rows.seek(first * self.row_bytes)
        content = bytearray(length * self.row_bytes)
        if self._rows.readinto(content) != len(content):
            raise CheckpointError(
                f"{self.folder} ends before what its index says: remove it, and start again"
            )
        return torch.frombuffer(content, dtype=DTYPE).view(length, self._row).float()


class RecordedStates:
    """A folder of `spec="save_hidden_states"` as data: its sequences, and their states.

    Raises: CheckpointError; InvalidOption if its last hidden states are those before the norm.
    """

    def __init__(self, folder: Path) -> None:
        self._saved = SavedStates(folder)
        self._listing = self._saved.listing
        if self._listing["last_hidden"] != "post_norm":
            raise InvalidOption(
                f"{folder} holds the last hidden states before the final norm; a head is trained "
                "on those behind it: save them with last_hidden='post_norm'"
            )
        self._numbers = {sample: number for number, sample in self._read_samples()}

    def samples(self) -> Sequence[Sample]:
        return list(self._numbers)

    def open(self, teacher: Teacher, aux_layers: tuple[int, ...]) -> None:
        """Raises: InvalidOption where a drafter of this target reads other states."""
        info, listing, folder = teacher.info, self._listing, self._saved.directory
        expected = {"aux_layers": list(aux_layers), "hidden_size": info.hidden_size}
        found = {name: listing[name] for name in expected}
        if found != expected:
            raise InvalidOption(f"{folder} holds states of {found}; the drafter reads {expected}")
        largest = max(max(one.token_ids) for one in self._numbers)
        if largest >= info.vocab_size:
            raise InvalidOption(
                f"{folder} holds token id {largest}, and this model's end at {info.vocab_size - 1}:"
                " were the states saved from another model?"
            )
        self._device = info.device

    def of(self, samples: Sequence[Sample]) -> States:
        records = [self._saved[self._numbers[one]] for one in samples]
        aux, last = (
            pad_sequence([record[name].float() for record in records], batch_first=True)
            for name in ("hidden_states", "normed_last_hidden_states")
        )
        return States(aux.to(self._device), last.to(self._device))

    def _read_samples(self) -> Iterator[tuple[int, Sample]]:
        for number, record in enumerate(self._saved):
            ids, written = record["input_ids"].tolist(), record["loss_mask"].nonzero()
            start = max(1, int(written[0])) if len(written) else 1
            if len(ids) > start + 1:
                yield number, Sample(token_ids=tuple(ids), start=start)


def is_recorded(path: Path) -> bool:
    """True for a folder that `spec="save_hidden_states"` wrote."""
    return (path / INDEX_FILE).is_file()
