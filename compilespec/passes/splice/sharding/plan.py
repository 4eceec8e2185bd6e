"""What is cut among the ranks of a program, and how."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compilespec.program import BufferSpec

WAYS = ("columns", "rows", "whole")  # of a linear layer: its outputs, its inputs, neither


@dataclass(frozen=True)
class Cut:
    """One dimension of a tensor in equal pieces, of which rank r has number r * parts // size.

    Fewer parts than ranks: some ranks hold the same piece.
    """

    dim: int
    parts: int
    segments: tuple[int, ...] = ()  # lengths of stretches that are cut each by itself; (): one
    length: int = 0  # of the whole dimension, where the last piece is filled up with zeros

    def piece(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """What a rank holds of a whole tensor: a copy, in its own memory."""
        number = rank * self.parts // size
        if self.length:
            wanted = -(-self.length // self.parts)
            first = min(number * wanted, self.length)
            own = tensor.narrow(self.dim, first, min(wanted, self.length - first))
            shape = list(tensor.shape)
            shape[self.dim] = wanted - own.shape[self.dim]
            return torch.cat([own, tensor.new_zeros(shape)], self.dim)
        lengths = self.segments or (tensor.shape[self.dim],)
        pieces = [
            part.narrow(self.dim, number * (length // self.parts), length // self.parts)
            for part, length in zip(tensor.split(list(lengths), self.dim), lengths, strict=True)
        ]
        return (
            torch.cat(pieces, self.dim)
            if len(pieces) > 1
            else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a piece."""
        sizes = list(shape)
        sizes[self.dim] = -(-sizes[self.dim] // self.parts)
        return tuple(sizes)


@dataclass(kw_only=True)
class Sharding:
    """A program's cuts; its graphs share one, and the first of them decides.

    `cuts` holds every weight that was looked at: None says that it stays whole.
    """

    size: int
    rank: int = 0
    wanted: Mapping[str, str] = field(default_factory=dict)  # by pattern of module, one of WAYS
    vocab_size: int = 0  # rows of the head
    draft_size: int = 1  # 1: every rank has all of the drafter
    cuts: dict[str, Cut | None] = field(default_factory=dict)
    caches: dict[str, Cut] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by name of a piece, the whole weight's
    whole: dict[str, Tensor] = field(default_factory=dict)  # the weights that were cut
    why_whole: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # what was made whole while running
    settled: set[str] = field(default_factory=set)  # weights that an earlier graph decided on

    def way(self, weight: str) -> str | None:
        """What the user wants of "target.<module>.weight", or of a part of a quantized one."""
        module = re.sub(r"(\.weight)?\.\w+$", "", weight.split(".", 1)[-1])
        found = [way for name, way in self.wanted.items() if fnmatch.fnmatchcase(module, name)]
        return found[-1] if found else None

    def own(self, buffer: BufferSpec) -> BufferSpec:
        """A buffer of the program as a rank has it."""
        cut = self.caches.get(buffer.name)
        return buffer if cut is None else dataclasses.replace(buffer, shape=cut.local(buffer.shape))

    def may_cut(self, weight: str) -> bool:
        return weight.startswith("target.") or self.draft_size == self.size

    def pieces(self, rank: int) -> dict[str, Tensor]:
        """Every cut weight as a rank holds it, by the name of the piece."""
        return {
            name: self._cut_of(source).piece(self.whole[source], rank, self.size)
            for name, source in self.sources.items()
        }

    def _cut_of(self, source: str) -> Cut:
        cut = self.cuts[source]
        assert cut is not None
        return cut

    def describe(self) -> tuple[str, ...]:
        """Lines for `Engine.plan()`: how much is cut, and what is not."""
        cut = [name for name, value in self.cuts.items() if value is not None]
        lines = [f"tensor parallel over {self.size} ranks: {len(cut)} weights cut"]
        lines += [f"whole on every rank: {name} ({why})" for name, why in _grouped(self.why_whole)]
        return (*lines, *(f"{name}: {what}" for name, what in _grouped(self.notes)))


def _grouped(whys: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers that are alike, in one line: numbers in names become stars."""
    groups: dict[tuple[str, str], int] = {}
    for name, why in whys.items():
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        key = (".".join(parts), re.sub(r"\.\d+\b", ".*", why))
        groups[key] = groups.get(key, 0) + 1
    return [(f"{n} weights {name}" if n > 1 else name, why) for (name, why), n in groups.items()]
