"""The parts of a prompt beside token ids: embeddings of some rows, rotary positions."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenRows:
    """Rows of a prompt, or of a chunk of it, that are embeddings."""

    places: Sequence[int]  # their places, rising
    rows: Tensor  # [N, D], on the CPU; features of layers may lie behind, [N, D + E]

    def between(self, start: int, end: int) -> GivenRows | None:
        """The rows of a chunk, with places counted from its first token; None if there are none."""
        first, stop = (bisect.bisect_left(self.places, place) for place in (start, end))
        if first == stop:
            return None
        places = [place - start for place in self.places[first:stop]]
        return GivenRows(places=places, rows=self.rows[first:stop])


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeOffsets:
    """Rotary positions minus token positions: for a prompt's tokens, and after it."""

    of_prompt: Sequence[Sequence[int]]  # by axis: time, height, width
    after: int

    def between(self, start: int, end: int) -> tuple[list[int], ...]:
        """The offsets of a chunk, by axis."""
        count = len(self.of_prompt[0])
        num_after = max(0, end - max(start, count))
        return tuple([*axis[start:end], *[self.after] * num_after] for axis in self.of_prompt)


def all_rows(rows_TD: Tensor) -> GivenRows:
    """A whole prompt of embeddings."""
    return GivenRows(places=range(len(rows_TD)), rows=rows_TD)


def write_rows(
    embeds_PD: Tensor, start: int, given: GivenRows, deep_PE: Tensor | None = None
) -> None:
    """Copy a chunk's rows to the places of its tokens in a call, neighbours in one copy.  On CUDA
    the copies run on the stream.

    Args:
        deep_PE: the place of features of layers, 0 for rows without them.
    """
    first, width = 0, embeds_PD.shape[1]
    for _, group in itertools.groupby(enumerate(given.places), lambda pair: pair[1] - pair[0]):
        count = len(list(group))
        place = start + given.places[first]
        rows = given.rows[first : first + count]
        embeds_PD[place : place + count].copy_(rows[:, :width])
        if deep_PE is not None and rows.shape[1] > width:
            deep_PE[place : place + count].copy_(rows[:, width:])
        elif deep_PE is not None:
            deep_PE[place : place + count].zero_()
        first += count
