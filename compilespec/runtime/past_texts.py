"""Texts of requests that ended, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence

from compilespec.program import PAD
from compilespec.runtime.host_writes import HostWrites

BUFFER = "past_ML"


class PastTexts:
    """Which text each row of the buffer holds; a new one takes the place of the oldest."""

    def __init__(self, host: HostWrites) -> None:
        """Args: host: of buffers that have `past_ML`."""
        self._host = host
        num_texts, self._max_tokens = host.buffers[BUFFER].shape
        self._texts: list[tuple[int, ...]] = [()] * num_texts
        self._oldest = 0

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a text, of a long one the end; one that is known stays where it is."""
        text = tuple(tokens[-self._max_tokens :])
        if len(text) < 2 or text in self._texts:  # nothing follows a single token
            return
        padding = [PAD] * (self._max_tokens - len(text))
        self._host.write(BUFFER, self._oldest, [*text, *padding])
        self._texts[self._oldest] = text
        self._oldest = (self._oldest + 1) % len(self._texts)
