"""Weights of a GGUF file as they are stored: integers in groups, with scales and zero points.

Every type here is (q - zero) * scale for integers q of 4 or 8 bits in groups of 32 (Q6_K: 16).
Source: ggml's block layouts (ggml-common.h), read as in gguf-py's `quants`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SUPER = 256  # weights of a K-quant's super-block


class Grouped(NamedTuple):
    """A weight [N, K]: int8 [N, K], and scales and zero points, float32 [N, K / group]."""

    values: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scale.shape[1]

    def rows(self, index: Tensor) -> Grouped:
        return Grouped(self.values[index], self.scale[index], self.zero[index], self.bits)

    def wide(self) -> Tensor:
        """The weights, float32."""
        groups = self.values.float().unflatten(1, (-1, self.group))
        return ((groups - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)).flatten(1)


def read_blocks(kind: str, data: np.ndarray) -> Grouped:
    """The blocks [N, bytes of a row] of a type of `READERS`."""
    reader, block_bytes = READERS[kind]
    blocks = torch.from_numpy(np.array(data).view(np.uint8))
    return reader(blocks.reshape(len(blocks), -1, block_bytes))


def _floats(blocks: Tensor, first: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [N, B]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _halves(bytes_: Tensor) -> Tensor:
    """[..., X] bytes -> [..., 2X]: all low halves, then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _affine(q: Tensor, step: Tensor, least: Tensor, bits: int) -> Grouped:
    """Weights q * step + least, of unsigned q [N, groups, group] below 2^(bits of q)."""
    offset = 8 if bits == 4 else 0
    is_flat = step == 0  # a group of one number: (0 - -1) * least
    values = torch.where(is_flat.unsqueeze(-1), 0, q.to(torch.int16) - offset).to(torch.int8)
    zero = torch.where(is_flat, -1.0, -offset - least / step.where(~is_flat, torch.ones(())))
    return Grouped(values.flatten(1), torch.where(is_flat, least, step), zero, bits)


def _symmetric(q: Tensor, step: Tensor, bits: int) -> Grouped:
    return Grouped(q.to(torch.int8).flatten(1), step, torch.zeros_like(step), bits)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """The 32 bits from this byte of each block, times 16: [N, B, 32]."""
    bits = blocks[..., first : first + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Grouped:
    return _symmetric(_halves(blocks[..., 2:]).to(torch.int8) - 8, _floats(blocks, 0), 4)


def _q4_1(blocks: Tensor) -> Grouped:
    return _affine(_halves(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2), 4)


def _q5_0(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _symmetric(q.to(torch.int8) - 16, _floats(blocks, 0), 8)


def _q5_1(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _affine(q, _floats(blocks, 0), _floats(blocks, 2), 8)


def _q8_0(blocks: Tensor) -> Grouped:
    return _symmetric(blocks[..., 2:].view(torch.int8), _floats(blocks, 0), 8)


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
    return _affine(q.flatten(1, 3), *_super_steps(blocks), 4)


def _q5_k(blocks: Tensor) -> Grouped:
    q = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    fifth = blocks[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    return _affine((q | (fifth & 1) << 4).flatten(1, 2), *_super_steps(blocks), 8)


def _q6_k(blocks: Tensor) -> Grouped:
    low, high = (
        blocks[..., :128].unflatten(-1, (2, 2, 32)),
        blocks[..., 128:192].unflatten(-1, (2, 32)),
    )
    four = torch.cat([low & 15, low >> 4], -2)  # [N, B, 2, 4, 32]
    two = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    q = (four | two << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float()
    step = _floats(blocks, 208).unsqueeze(-1) * scales
    return _symmetric(q.flatten(2).unflatten(-1, (16, 16)).flatten(1, 2), step.flatten(1), 8)


READERS: Mapping[str, tuple[Callable[[Tensor], Grouped], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
