"""Tokens chosen by all ranks, where each has the logits of some ids.

A row costs what its request needs: its best value and id, the numbers behind the bounds of filters
(`ops/sample/parts.py`), and all logits only for log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.collectives.group import Group, current
from compilespec.ops.collectives.reference import argmax_of_ranks, concatenate_ranks
from compilespec.ops.sample import layout, note_logprobs
from compilespec.ops.sample.parts import RankPart, draw_of_parts, sample_of_parts


def _argmax_shard(logits: Tensor, length: int, size: int) -> tuple[Tensor, Tensor]:
    group = current(size)
    part = _part(group, logits, length)
    own = part.own(logits)
    if own.shape[-1] == 0:
        best = logits.new_full(logits.shape[:-1], -torch.inf)
        ids = torch.zeros_like(best, dtype=torch.int64)
    else:
        ids = own.argmax(-1)
        best = own.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    pairs = [_unpacked(pair, best) for pair in group.gather(_packed(best, ids + part.first))]
    return argmax_of_ranks(*zip(*pairs, strict=True))


def _packed(best: Tensor, ids: Tensor) -> Tensor:
    """Values and ids as the bytes of one message."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (best, ids)])


def _unpacked(pair: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = pair.split([like.nbytes, pair.numel() - like.nbytes])
    return best.clone().view(like.dtype).view(like.shape), ids.clone().view(torch.int64).view(
        like.shape
    )


def _part(group: Group, logits: Tensor, length: int) -> RankPart:
    return RankPart(group.rank * logits.shape[-1], length, group.gather)


def _sample_shard(
    logits: Tensor, greedy: Tensor, ids: Tensor | None, row: Tensor, drawn: Tensor, real: Tensor,
    whole: Tensor, bias: Tensor, context: Tensor, mask: Tensor, length: int, size: int,
) -> Tensor:  # fmt: skip
    part = _part(current(size), logits, length)
    return sample_of_parts(logits, greedy, ids, row, drawn, real, whole, bias, context, mask, part)


def _draw_shard(
    logits: Tensor, greedy: Tensor, row: Tensor, drawn: Tensor, real: Tensor, whole: Tensor,
    length: int, size: int,
) -> Tensor:  # fmt: skip
    part = _part(current(size), logits, length)
    return draw_of_parts(logits, greedy, row, drawn, real, whole, part)


def _note_logprobs_shard(
    logits: Tensor, chosen: Tensor, row: Tensor, whole: Tensor, logprob: Tensor,
    logprob_id: Tensor, length: int, size: int,
) -> Tensor:  # fmt: skip
    group = current(size)
    if not bool((whole[row, layout.LOGPROBS] > 0).any()):
        return logprob.new_zeros(chosen.shape)
    full = concatenate_ranks(group.gather(logits), logits.dim() - 1, length)
    return note_logprobs(full, chosen, row, whole, logprob, logprob_id)


argmax_shard = define_op(
    _argmax_shard,
    lambda logits, length, size: (
        logits.new_empty(logits.shape[:-1], dtype=torch.int64),
        logits.new_empty(logits.shape[:-1]),
    ),
    has_kernel=False,
)
sample_shard = define_op(
    _sample_shard,
    lambda logits, greedy, *rest: greedy.new_empty(greedy.shape),
    writes=("context",),
    has_kernel=False,
)
draw_shard = define_op(
    _draw_shard,
    lambda logits, greedy, *rest: greedy.new_empty(greedy.shape),
    has_kernel=False,
)
note_logprobs_shard = define_op(
    _note_logprobs_shard,
    lambda logits, chosen, row, whole, logprob, *rest: logprob.new_empty(chosen.shape),
    writes=("logprob", "logprob_id"),
    has_kernel=False,
)
