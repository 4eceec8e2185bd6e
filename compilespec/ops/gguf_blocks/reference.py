"""Weights of a GGUF file as they are stored: integers in groups, with scales and zero points.

Every type here is (q - zero) * scale for integers q of 4 or 8 bits in groups of 32 (Q6_K: 16).
Source: ggml's block layouts (ggml-common.h), read as in gguf-py's `quants`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compilespec.ops.grouped_linear.reference import pack_groups, pack_quad_bytes, pack_quad_nibbles

PARTS = ("values", "scale", "zero")
CHUNK = 2**20  # weights that are read at a time, so that what is between stays in the CPU's caches


class Grouped(NamedTuple):
    """A weight [N, K]: int8 [N, K], and scales and zero points, float32 [N, K / group]."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None  # None: all are 0

    def wide(self) -> Tensor:
        """The weights, float32."""
        groups = self.values.float().unflatten(1, (self.scale.shape[1], -1))
        shifted = groups if self.zero is None else groups - self.zero.unsqueeze(-1)
        return (shifted * self.scale.unsqueeze(-1)).flatten(1)


class BlockType(NamedTuple):
    """A type of GGUF blocks."""

    read: Callable[[Tensor], Grouped]  # uint8 [N, B, bytes]
    num_bytes: int  # of a block
    num_weights: int  # of a block
    bits: int  # of a value, as we hold it
    group: int = 32  # weights that share a scale
    is_symmetric: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of `PARTS` that it has."""
        return PARTS[:2] if self.is_symmetric else PARTS

    def depth(self, row_bytes: int) -> int:
        """Weights of a row."""
        return row_bytes // self.num_bytes * self.num_weights

    def part(self, name: str, blocks: Tensor) -> Tensor:
        """A tensor with the shape and dtype of one of `PARTS`."""
        depth = self.depth(blocks.shape[1])
        if name == "values":
            return torch.empty((len(blocks), depth), dtype=torch.int8, device=blocks.device)
        size = (len(blocks), depth // self.group)
        return torch.empty(size, dtype=torch.float32, device=blocks.device)

    def layout(self, name: str) -> Callable[[Tensor], Tensor]:
        """The layout of one of `PARTS` for `compilespec::packed_grouped_linear`."""
        if name != "values":
            return pack_groups
        return pack_quad_nibbles if self.bits == 4 else pack_quad_bytes


def pack_gguf_blocks_reference(blocks: Tensor, kind: str, part: str) -> Tensor:
    """A part of the weight of blocks, laid out for `compilespec::packed_grouped_linear`.

    Args:
        blocks: uint8 [N, bytes of a row].
        kind: of `TYPES`.
        part: "values", "scale" or, of a type that is not symmetric, "zero".
    """
    lay_out = TYPES[kind].layout(part)
    depth = TYPES[kind].depth(blocks.shape[1])
    return by_rows(lambda some: lay_out(getattr(read_blocks(kind, some), part)), blocks, depth)


def read_blocks(kind: str, blocks: Tensor) -> Grouped:
    """The weight of blocks, uint8 [N, bytes of a row], of a type of `TYPES`."""
    one = TYPES[kind]
    return one.read(blocks.unflatten(1, (-1, one.num_bytes)))


def by_rows(compute: Callable[[Tensor], Tensor], blocks: Tensor, depth: int) -> Tensor:
    """compute(blocks), some rows at a time; its first dimension is of rows, or of 16 rows each."""
    rows = max(1, CHUNK // depth // 16) * 16
    if len(blocks) <= rows:
        return compute(blocks)
    first = compute(blocks[:rows])
    per_part = rows // len(first)
    whole = first.new_empty((-(-len(blocks) // per_part), *first.shape[1:]))
    for start in range(0, len(blocks), rows):
        part = compute(blocks[start : start + rows])
        whole[start // per_part :][: len(part)] = part
    return whole


def embed_blocks(ids: Tensor, blocks: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding that is kept in blocks: [...] -> [..., K]."""
    rows = torch.nn.functional.embedding(ids, blocks)
    wide = read_blocks(kind, rows.flatten(0, -2)).wide()
    return wide.to(dtype).unflatten(0, ids.shape)


def _floats(blocks: Tensor, first: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [N, B]."""
    low, high = blocks[..., first].int(), blocks[..., first + 1].int()
    exponent, fraction = high >> 2 & 31, (high & 3) << 8 | low
    size = (fraction + torch.where(exponent > 0, 1024, 0)).float()
    number = torch.ldexp(size, exponent.clamp(min=1) - 25)
    return torch.where(high > 127, -number, number)


def _halves(bytes_: Tensor) -> Tensor:
    """[..., X] bytes -> [..., 2X]: all low halves, then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _affine(q: Tensor, step: Tensor, least: Tensor, offset: int = 0) -> Grouped:
    """Weights q * step + least, of unsigned q [N, groups, group]; we hold q - offset."""
    is_flat = step == 0  # a group of one number: (0 - -1) * least
    values = (q.view(torch.int8) - offset).masked_fill(is_flat.unsqueeze(-1), 0)
    zero = torch.where(is_flat, -1.0, -offset - least / torch.where(is_flat, 1.0, step))
    return Grouped(values.flatten(1), torch.where(is_flat, least, step), zero)


def _symmetric(q: Tensor, step: Tensor) -> Grouped:
    return Grouped(q.flatten(1), step, None)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """The 32 bits from this byte of each block, times 16: [N, B, 32]."""
    bits = blocks[..., first : first + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Grouped:
    return _symmetric(_halves(blocks[..., 2:]).view(torch.int8) - 8, _floats(blocks, 0))


def _q4_1(blocks: Tensor) -> Grouped:
    return _affine(_halves(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2), 8)


def _q5_0(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _symmetric(q.view(torch.int8) - 16, _floats(blocks, 0))


def _q5_1(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _affine(q, _floats(blocks, 0), _floats(blocks, 2))


def _q8_0(blocks: Tensor) -> Grouped:
    return _symmetric(blocks[..., 2:].contiguous().view(torch.int8), _floats(blocks, 0))


def _super_steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Steps and least values of the eight groups of K-quants' super-blocks, [N, groups]."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1).float()
    least = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1).float()
    step, down = _floats(blocks, 0).unsqueeze(-1), _floats(blocks, 2).unsqueeze(-1)
    return (step * scale).flatten(1), (-down * least).flatten(1)


def _q4_k(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    return _affine(q.flatten(1, 3), *_super_steps(blocks), 8)


def _q5_k(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    fifth = blocks[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    return _affine((q | (fifth & 1) << 4).flatten(1, 2), *_super_steps(blocks))


def _q6_k(blocks: Tensor) -> Grouped:
    low, high = (
        blocks[..., :128].unflatten(-1, (2, 2, 32)),
        blocks[..., 128:192].unflatten(-1, (2, 32)),
    )
    four = torch.cat([low & 15, low >> 4], -2)  # [N, B, 2, 4, 32]
    two = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    q = (four | two << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    step = _floats(blocks, 208).unsqueeze(-1) * scales
    return _symmetric(q.flatten(2).unflatten(-1, (16, 16)).flatten(1, 2), step.flatten(1))


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_q4_0, 18, 32, bits=4, is_symmetric=True),
    "Q4_1": BlockType(_q4_1, 20, 32, bits=4),
    "Q5_0": BlockType(_q5_0, 22, 32, bits=8, is_symmetric=True),
    "Q5_1": BlockType(_q5_1, 24, 32, bits=8),
    "Q8_0": BlockType(_q8_0, 34, 32, bits=8, is_symmetric=True),
    "Q4_K": BlockType(_q4_k, 144, 256, bits=4),
    "Q5_K": BlockType(_q5_k, 176, 256, bits=8),
    "Q6_K": BlockType(_q6_k, 210, 256, bits=8, group=16, is_symmetric=True),
}
