"""Trees of drafts in plain Python: what each row sees, which path is accepted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Attention, Before, Case, Tokens, Values
from compilespec.passes.references.dense_attention import dense_attention
from compilespec.passes.references.placement import Placement, place_chain, place_tokens
from compilespec.program import ProgramConfig


def path_attention(
    caches: MutableMapping[str, Tensor],
    owner: str,
    config: ProgramConfig,
    inputs: Mapping[str, Tensor],
    placed: Placement,
) -> Attention:
    """Each row of a tree at the end of its own chain, over a copy of the caches."""

    def attend(layer: int, args: tuple[Any, ...]) -> Tensor:
        query, key, value, *options = args
        batch, num_heads, num_rows, _ = query.shape
        out = query.new_zeros((batch, num_rows, num_heads, value.shape[3]))
        for b, tree in enumerate(placed.paths):
            row, start = int(placed.row_index[b]), int(placed.start[b])
            for s, path in enumerate(tree):
                own = {name: cache.clone() for name, cache in caches.items()}
                chain = place_tokens(
                    config, inputs, [[row if placed.live[b] else -1] * len(path)],
                    [[start + d for d in range(len(path))]],
                )  # fmt: skip
                parts = (part[b : b + 1, :, path] for part in (query, key, value))
                attend_chain = dense_attention(own, owner, chain, inputs["block_table_RM"])
                out[b, s] = attend_chain(layer, (*parts, *options))[0, -1]
        return out

    return attend


def unwritten(tokens: Tokens) -> Tokens:
    """Tokens that write nothing."""
    return dataclasses.replace(tokens, slot=torch.full_like(tokens.slot, -1))


def topology(placed: Placement, max_depth: int) -> dict[str, Tensor]:
    """The roles `depth` and `path`."""
    depths = [[len(path) - 1 for path in tree] for tree in placed.paths]
    paths = [[[*path, *[-1] * (max_depth + 1 - len(path))] for path in t] for t in placed.paths]
    return {
        name: torch.tensor(value, dtype=torch.int32, device=placed.start.device)
        for name, value in (("depth", depths), ("path", paths))
    }


def accepted_path(
    paths: Sequence[Sequence[int]], ids: Sequence[int], choices: Sequence[int]
) -> Sequence[int]:
    """The longest path, the first of equal ones, of which each draft is the choice before it."""
    accepted = [
        path
        for path in paths
        if all(ids[node] == choices[parent] for parent, node in itertools.pairwise(path))
    ]
    return max(accepted, key=len)


def keep_path(before: Before, ctx: PassContext, case: Case) -> Values:
    """The accepted rows' keys and values at their positions, and a chain of those rows."""
    values = before(case.inputs)
    chain = place_chain(ctx.config, case)
    taken, counts = values.roles["taken"].tolist(), values.roles["num_emitted"].tolist()
    buffers = {name: tensor.clone() for name, tensor in values.buffers.items()}
    op = torch.ops.compilespec.paged_attention.default
    for node in before.graph.find_nodes(op="call_function", target=op):
        for new, cache in ((node.args[1], node.args[3]), (node.args[2], node.args[4])):
            if cache is None:
                continue
            cells = buffers[cache.meta["role"]].flatten(0, 1)
            for b, count in enumerate(counts):
                for d in range(count):
                    slot = int(chain.tokens.slot[b, d])
                    if slot >= 0:
                        cells[slot] = values.nodes[str(new)][b, :, taken[b][d]]
    taps = {
        name: torch.stack([tap[b, rows] for b, rows in enumerate(taken)])
        for name, tap in values.roles.items()
        if name.startswith("aux.")
    }
    places = {name: chain.roles()[name] for name in ("position", "row", "slot")}
    return dataclasses.replace(values, roles={**values.roles, **places, **taps}, buffers=buffers)
