"""Weights that stay in the blocks of a GGUF file: what they are, and their layouts for products."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.gguf_blocks import reference
from compilespec.ops.gguf_blocks.reference import (
    PARTS,
    TYPES,
    by_rows,
    embed_blocks,
    read_blocks,
)

__all__ = ["PARTS", "TYPES", "by_rows", "embed_blocks", "pack_gguf_blocks", "read_blocks"]


def _fake(blocks: Tensor, kind: str, part: str) -> Tensor:
    return TYPES[kind].layout(part)(TYPES[kind].part(part, blocks))


pack_gguf_blocks = define_op(reference.pack_gguf_blocks_reference, _fake, has_kernel=True)
