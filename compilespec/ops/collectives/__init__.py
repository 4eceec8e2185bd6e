"""The messages between ranks of a tensor-parallel job inside a step.

Each operator gathers the ranks' parts (`group.py`) and goes on in rank order, so that every rank
gets the same bits, and a row's bits do not depend on the rows beside it: libraries' reductions cut
tensors anywhere, and the order of their sums follows from the cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.collectives.choices import (
    argmax_shard,
    draw_shard,
    note_logprobs_shard,
    sample_shard,
)
from compilespec.ops.collectives.group import Group, acting, current
from compilespec.ops.collectives.reference import (
    concatenate_ranks,
    embed_own_rows,
    sum_of_ranks,
    take_own,
)
from compilespec.ops.quantized_linear.integer_product import (
    integer_product,
    quantize_rows,
    scale_dots,
)

__all__ = [
    "Group",
    "acting",
    "all_gather",
    "all_reduce",
    "argmax_shard",
    "current",
    "draw_shard",
    "dynamic_int8_shard",
    "embed_shard",
    "note_logprobs_shard",
    "sample_shard",
    "take_shard",
]


def _all_reduce(x: Tensor, size: int) -> Tensor:
    return sum_of_ranks(current(size).gather(x))


def _all_gather(x: Tensor, dim: int, length: int, size: int) -> Tensor:
    return concatenate_ranks(current(size).gather(x), dim, length)


def _embed_shard(ids: Tensor, weight: Tensor, size: int) -> Tensor:
    return embed_own_rows(ids, weight, current(size).rank)


def _take_shard(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    return take_own(x, dim, parts, current(size).rank * parts // size)


def _dynamic_int8_shard(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, size: int
) -> Tensor:
    group = current(size)
    largest = torch.stack(group.gather(x.abs().amax(-1, keepdim=True))).amax(0)
    ints, row_scale = quantize_rows(x, largest)
    dots = integer_product(ints.flatten(0, -2), weight).view(*x.shape[:-1], -1)
    return scale_dots(sum_of_ranks(group.gather(dots)), row_scale, scale, bias, x.dtype)


def _gathered(x: Tensor, dim: int, length: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _taken(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // parts
    return x.new_empty(shape)


all_reduce = define_op(
    _all_reduce,
    lambda x, size: x.new_empty(x.shape),
    has_kernel=False,
)
all_gather = define_op(
    _all_gather,
    _gathered,
    has_kernel=False,
)
embed_shard = define_op(
    _embed_shard,
    lambda ids, weight, size: weight.new_empty((*ids.shape, weight.shape[1])),
    has_kernel=False,
)
dynamic_int8_shard = define_op(
    _dynamic_int8_shard,
    lambda x, weight, scale, bias, size: x.new_empty((*x.shape[:-1], weight.shape[0])),
    has_kernel=False,
)
take_shard = define_op(
    _take_shard,
    _taken,
    has_kernel=False,
)
