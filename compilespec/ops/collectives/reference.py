"""The definition of the collectives, of the ranks' parts in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ...: the same bits on every rank, for any shape."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def concatenate_ranks(parts: Sequence[Tensor], dim: int, length: int) -> Tensor:
    """The parts side by side; padding past `length` is cut off."""
    return torch.cat(list(parts), dim).narrow(dim, 0, length).contiguous()


def argmax_of_ranks(best: Sequence[Tensor], ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest of the ranks' largest logits, and its id; the first one of equals.  NaN is larger
    than all numbers, as for `torch.argmax`.

    Args:
        ids: int64, beside the values: an index in a narrow floating type would be rounded.
    """
    winner = torch.stack(list(best)).argmax(0, keepdim=True)
    of_winner = (torch.stack(list(x)).gather(0, winner).squeeze(0) for x in (ids, best))
    return next(of_winner), next(of_winner)


def embed_own_rows(ids: Tensor, weight_VD: Tensor, rank: int) -> Tensor:
    """The rows of ids that this rank's part of the table holds; zeros for the others, so that the
    sum over ranks is the row itself, bit for bit.
    """
    own = ids.long() - rank * weight_VD.shape[0]
    is_own = (own >= 0) & (own < weight_VD.shape[0])
    rows = weight_VD[torch.where(is_own, own, 0)]
    return torch.where(is_own.unsqueeze(-1), rows, torch.zeros_like(rows))


def take_own(x: Tensor, dim: int, parts: int, piece: int) -> Tensor:
    """One of `parts` equal pieces of a dimension of a tensor that every rank has whole."""
    length = x.shape[dim] // parts
    own = x.narrow(dim, piece * length, length)
    return own.clone(memory_format=torch.contiguous_format)
