"""Trees of drafts in plain Python: each node is drafted at the end of a chain of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.ops.sample import layout
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import AttentionCall, Case, Tokens
from compilespec.passes.references.fragments import run_fragment
from compilespec.passes.references.placement import place_tokens
from compilespec.program import PAD, TreeShape

Best = Callable[[Sequence[int]], list[tuple[float, int]]]  # after a path: (score, id), best first


@dataclass(frozen=True, kw_only=True)
class Node:
    """A draft: its tokens from the root on, and the log-probability of the path."""

    path: tuple[int, ...]
    place: tuple[int, ...]  # ranks in a static tree, places among continuations in a dynamic one
    score: float = 0.0


def grow(shape: TreeShape, best: Best) -> tuple[list[int], list[int]]:
    """The drafts of a request and the parents of the rows."""
    nodes = _static(shape, best) if shape.choices else _dynamic(shape, best)
    rows = {(): 0} | {node.place: row for row, node in enumerate(nodes, 1)}
    return [node.path[-1] for node in nodes], [0, *(rows[node.place[:-1]] for node in nodes)]


def _static(shape: TreeShape, best: Best) -> list[Node]:
    nodes: dict[tuple[int, ...], Node] = {(): Node(path=(), place=())}
    for place in shape.choices:
        before = nodes[place[:-1]].path
        _, token = best(before)[place[-1]]
        nodes[place] = Node(path=(*before, token), place=place)
    return [nodes[place] for place in shape.choices]


def _dynamic(shape: TreeShape, best: Best) -> list[Node]:
    drafted: list[Node] = []
    level = [Node(path=(), place=())]
    for _ in range(shape.depth):
        found = [
            Node(
                path=(*node.path, token), place=(*node.place, len(drafted) + at),
                score=node.score + score,
            )
            for number, node in enumerate(level)
            for at, (score, token) in enumerate(
                best(node.path)[: shape.top_k], number * shape.top_k
            )
        ]  # fmt: skip
        drafted += found
        level = sorted(found, key=lambda node: -node.score)[: shape.top_k]
    order = sorted(range(len(drafted)), key=lambda place: -drafted[place].score)
    return [drafted[place] for place in sorted(order[: shape.num_nodes])]


def rank_tokens(
    ctx: PassContext, case: Case, row: int, drawn: int, argument: str, head_1D: Tensor
) -> list[tuple[float, int]]:
    """(log-probability, target id) of what may come at position `drawn`, best first: of the
    drafter's logits, of a sampled request with temperature and noise.
    """
    _, logits_1V, *ids = run_fragment(ctx.draft["propose"], {argument: head_1D})
    scores_V = logits_1V[0].to(torch.promote_types(logits_1V.dtype, torch.float32))
    known = torch.arange(len(scores_V)) if not ids else ids[0]
    reals, words = case.inputs["sampling_RF"][row], case.inputs["sampling_RI"][row].tolist()
    if not ctx.greedy_only and float(reals[layout.TEMPERATURE]) >= layout.MIN_TEMPERATURE:
        bits = noise_bits(
            known.clamp(min=0), seed_low=words[layout.SEED_LOW], seed_high=words[layout.SEED_HIGH],
            sample=words[layout.SAMPLE], position=drawn, stream=layout.STREAM_DRAW,
        )  # fmt: skip
        scores_V = scores_V / reals[layout.TEMPERATURE].to(scores_V.dtype) + gumbel(bits)
    scores_V = scores_V.masked_fill(known < 0, float("-inf")).log_softmax(0)
    pairs = sorted(zip(scores_V.tolist(), known.tolist(), strict=True), key=lambda pair: -pair[0])
    return [(score, token if score > float("-inf") else PAD) for score, token in pairs]


def level_calls(
    ctx: PassContext, case: Case, rows: Sequence[int], first: Sequence[int]
) -> list[AttentionCall]:
    """What the attention of each level must be given: its nodes, and keys that are not written."""
    shape, calls, num_keys = ctx.config.tree, [], 0
    assert shape is not None
    inner = {place[:-1] for place in shape.choices}
    config = dataclasses.replace(ctx.config, tree=None)
    for depth in range(1, shape.depth):
        count = shape.top_k or sum(len(place) == depth for place in inner)
        num_keys += count
        placed = place_tokens(
            config, case.inputs, [[row] * count for row in rows],
            [[position + depth - 1] * count for position in first],
        )  # fmt: skip
        slot = placed.slot.new_full((len(rows), num_keys), -1)
        tokens = Tokens(position=placed.position, row=placed.row, slot=slot)
        for layer in range(ctx.draft["forward"].num_attention_layers):
            calls.append(AttentionCall(cache=f"cache.draft.{layer}.key", tokens=tokens))
    return calls
