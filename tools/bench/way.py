"""What ways of generating share.

A way is built from a `Setup`, warms up on every batch it will be timed on, and then maps a batch of
prompts to their new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn


class Unavailable(Exception):
    """A way cannot run on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all ways share."""

    model_dir: Path
    model: nn.Module
    """The transformers model, in the dtype of its config."""
    max_new_tokens: int
    max_batch_size: int
    num_threads: int
    draft: Path | None = None
    backend: str = "inductor"
    max_seq_len: int | None = None
    dtype: torch.dtype | None = None
    """The dtype to use instead of the config's."""


class Way(Protocol):
    """One way of generating."""

    name: str
    max_batch_size: int
    """Largest batch that it can run; 1 for ways that take a single prompt."""

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int | None = None
    ) -> list[list[int]]:
        """The greedy continuation of each prompt, exactly max_new_tokens ids.

        Args: max_new_tokens: None: the setup's.
        """
        ...

    def stats(self) -> dict[str, object]:
        """Further values to record after a run."""
        ...

    def close(self) -> None: ...
