"""Hidden states of a call, handed to the drafter's recorder request by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from compilespec.program import TapSink
from compilespec.runtime.executor import PrefillChunk


class Taps:
    """Cuts the hidden states of a call by state rows."""

    def __init__(self, sink: TapSink) -> None:
        self._sink = sink

    def add_chunks(self, chunks: Sequence[PrefillChunk], hidden_TE: Tensor) -> None:
        """Hand on the states of a prefill call: the chunks' tokens, packed; padded ones at the
        end.
        """
        counts = [len(chunk.tokens) for chunk in chunks]
        self._add([chunk.row for chunk in chunks], hidden_TE[: sum(counts)].split(counts))

    def add_rows(self, rows: Sequence[int], hidden_BSE: Tensor) -> None:
        """Hand on the states of a decode call: the window of each row; padded ones at the end."""
        self._add(rows, hidden_BSE[: len(rows)])

    def close(self) -> None:
        """Close the recorder."""
        self._sink.close()

    def _add(self, rows: Sequence[int], states: Iterable[Tensor]) -> None:
        for row, hidden_SE in zip(rows, states, strict=True):
            self._sink.add(row, hidden_SE)
