"""The facts of an attention call that are fixed when it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.program import BufferSpec


@dataclass(frozen=True, kw_only=True)
class Form:
    """The facts of an attention call that no step changes."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    block_size: int
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_latent: bool = False
    has_paths: bool = False

    def __str__(self) -> str:
        extras = (
            f"window of {self.window}" if self.window else "",
            f"scores capped at {self.softcap:g}" if self.softcap else "",
            "sinks" if self.has_sinks else "",
            "paths of a tree" if self.has_paths else "",
        )
        width = f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            width += f" and {self.value_dim}"
        parts = (f"{'latents' if self.is_latent else 'heads'} of {width}",
                 f"blocks of {self.block_size}", *filter(None, extras))  # fmt: skip
        return ", ".join(parts)


def form_of(
    key_cache: Tensor | BufferSpec,
    value_cache: Tensor | BufferSpec | None,
    window: int,
    softcap: float,
    *,
    has_sinks: bool,
    value_dim: int,
    has_paths: bool,
) -> Form:
    """The form of a call of `paged_attention` with these arguments."""
    return Form(
        dtype=key_cache.dtype,
        head_dim=key_cache.shape[3],
        value_dim=value_dim if value_cache is None else value_cache.shape[3],
        block_size=key_cache.shape[1],
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
        is_latent=value_cache is None,
        has_paths=has_paths,
    )
