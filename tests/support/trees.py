"""Trees of tokens in plain Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tests.support.attention import Case, Pool

PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4, 6)  # of a tree of nine rows, the root first


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root to each node, itself included."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else ()), node])
    return paths


class Tree:
    """Nodes over a pool's requests: the queries, keys and values of node i are those that the pool
    has for position context + i, at any depth of the node.
    """

    def __init__(self, case: Case) -> None:
        self.case = dataclasses.replace(case, num_tokens=len(PARENTS))
        self.pool = Pool(self.case)
        self.paths = paths_of(PARENTS)
        self.depths = [len(path) - 1 for path in self.paths]

    def arguments(self, *, earlier: int = 0) -> list:
        """Of all nodes; with `earlier`, the first ones' keys are given, and no queries."""
        context, batch = self.case.context, self.case.batch
        arguments = list(self.pool.arguments(self.pool.decode()))
        position = torch.tensor([[context + d for d in self.depths]] * batch, dtype=torch.int32)
        width = max(map(len, self.paths)) + 1
        path = [[*path, *[-1] * (width - len(path))] for path in self.paths]
        path_BSP = torch.tensor([path] * batch, dtype=torch.int32)
        arguments[5] = torch.full_like(arguments[5], -1)
        arguments[7] = position
        arguments = [*arguments[:13], self.case.value_dim if self.case.latent else 0, path_BSP]
        arguments[0] = arguments[0][:, :, earlier:]
        for index in (6, 7, 14):
            arguments[index] = arguments[index][:, earlier:]
        return arguments


def parents_of_rows(mask: Sequence[Sequence[int]]) -> list[int]:
    """The parent of each row of an ancestor mask (a row sees its ancestors and itself); 0 of the
    root.
    """
    return [max((j for j in range(i) if row[j]), default=0) for i, row in enumerate(mask)]
