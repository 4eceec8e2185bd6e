"""Texts of requests that ended, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence

from compilespec.program import PAD
from compilespec.runtime.host_writes import HostWrites

BUFFER = "past_ML"


class PastTexts:
    """The texts in the rows of the buffer; a new one replaces the oldest."""

    def __init__(self, host: HostWrites) -> None:
        """Args: host: of buffers that have `past_ML`."""
        self._host = host
        num_texts, self._max_tokens = host.buffers[BUFFER].shape
        self._texts: list[tuple[int, ...]] = [()] * num_texts
        self._oldest = 0

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a text, or the end of a long one; a known text keeps its row."""
        text = tuple(tokens[-self._max_tokens :])
        if len(text) < 2 or text in self._texts:  # nothing follows a single token
            return
        padding = [PAD] * (self._max_tokens - len(text))
        self._host.write(BUFFER, self._oldest, [*text, *padding])
        self._texts[self._oldest] = text
        self._oldest = (self._oldest + 1) % len(self._texts)
