"""Rows of a block that see the cache from a first position on, and each other by lists."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.support.attention import Case, Pool

SEEN = ((0, 1, 2, 3, 4), (2, 0), (2, 1, 0), (3,), (4, 0, 1, 2, 3))  # by row, in any order
FIRSTS = (0, 3, -7, 10_000, 1)  # before the cache, behind it


class BlockRows:
    """Queries, keys and values of row i are those that the pool has for position context + i."""

    def __init__(self, case: Case) -> None:
        self.case = dataclasses.replace(case, num_tokens=len(SEEN))
        self.pool = Pool(self.case)

    def arguments(self) -> list:
        """Of `paged_attention`; the last row of the last request is padded."""
        batch, count = self.case.batch, len(SEEN)
        arguments = list(self.pool.arguments(self.pool.decode()))
        arguments[5] = torch.full_like(arguments[5], -1)
        arguments[6][-1, -1] = -1
        arguments[7] = torch.full_like(arguments[7], self.case.context - 1)
        path = [[*rows, *[-1] * (count + 1 - len(rows))] for rows in SEEN]
        return [
            *arguments[:13], self.case.value_dim if self.case.latent else 0,
            torch.tensor([path] * batch, dtype=torch.int32),
            torch.tensor([FIRSTS] * batch, dtype=torch.int32),
        ]  # fmt: skip

    def wanted(self) -> Tensor:
        """Softmax over the keys that each row sees, [B, S, N, Hv], in float64."""
        case, context = self.case, self.case.context
        rows = []
        for b, request in enumerate(self.pool.requests):
            for s, (first, seen) in enumerate(zip(FIRSTS, SEEN, strict=True)):
                at = [*range(min(max(first, 0), context), context), *(context + i for i in seen)]
                key, value = (x[:, at].double() for x in (request.key, request.value))
                key, value = (x.repeat_interleave(case.group, 0) for x in (key, value))
                query = request.query[:, context + s].double() * case.head_dim**-0.5
                weight = torch.einsum("nh,njh->nj", query, key).softmax(-1)
                out = torch.einsum("nj,njh->nh", weight, value)
                is_padded = b == case.batch - 1 and s == len(SEEN) - 1
                rows.append(torch.zeros_like(out) if is_padded else out)
        return torch.stack(rows).unflatten(0, (case.batch, len(SEEN)))
