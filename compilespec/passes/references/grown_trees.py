"""Trees of drafts in plain Python: each node is drafted at the end of its own chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


def grow(shape: TreeShape, best: Best, *, is_drawn: bool) -> tuple[list[int], list[int]]:
    """The drafts of a request and the parents of the rows.  Of a static tree whose children are
    drawn, siblings are the first draws, at any rank.
    """
    nodes = _static(shape, best, is_drawn) if shape.choices else _dynamic(shape, best)
    rows = {(): 0} | {node.place: row for row, node in enumerate(nodes, 1)}
    return [node.path[-1] for node in nodes], [0, *(rows[node.place[:-1]] for node in nodes)]


def _static(shape: TreeShape, best: Best, is_drawn: bool) -> list[Node]:
    nodes: dict[tuple[int, ...], Node] = {(): Node(path=(), place=())}
    for place in shape.choices:
        before = nodes[place[:-1]].path
        siblings = [one for one in shape.choices if one[:-1] == place[:-1]]
        _, token = best(before)[siblings.index(place) if is_drawn else place[-1]]
        nodes[place] = Node(path=(*before, token), place=place)
    return [nodes[place] for place in shape.choices]


def _dynamic(shape: TreeShape, best: Best) -> list[Node]:
    drafted: list[Node] = []
    nodes = [Node(path=(), place=())]
    for _ in range(shape.depth):
        found = [
            Node(
                path=(*node.path, token), place=(*node.place, len(drafted) + at),
                score=node.score + score,
            )
            for number, node in enumerate(nodes)
            for at, (score, token) in enumerate(
                best(node.path)[: shape.top_k], number * shape.top_k
            )
        ]  # fmt: skip
        drafted += found
        nodes = sorted(found, key=lambda node: -node.score)[: shape.top_k]
    order = sorted(range(len(drafted)), key=lambda place: -drafted[place].score)
    return [drafted[place] for place in sorted(order[: shape.num_nodes])]


def are_drawn(ctx: PassContext) -> bool:
    """True where the children of a node are draws without replacement."""
    assert ctx.config.tree is not None
    return ctx.acceptance.reads_draft_probs and bool(ctx.config.tree.choices)


def is_sampled(ctx: PassContext, case: Case, row: int) -> bool:
    if ctx.greedy_only:
        return False
    return float(case.inputs["sampling_RF"][row, layout.TEMPERATURE]) >= layout.MIN_TEMPERATURE


def scored_tokens(
    ctx: PassContext, case: Case, row: int, call: str, arguments: Mapping[str, Tensor], *,
    columns: Tensor | None, kept_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The logits of a call that proposes after a row, of a sampled request at its temperature, and
    their ids.

    columns: those of its last product; None: all.
    """
    _, logits_1V, *ids = run_fragment(ctx.draft[call], dict(arguments), {}, columns)
    ids = ids if kept_ids is None else [kept_ids]
    scores_V = logits_1V[0].to(torch.promote_types(logits_1V.dtype, torch.float32))
    known = torch.arange(len(scores_V)) if not ids else ids[0]
    if is_sampled(ctx, case, row):
        scores_V = scores_V / case.inputs["sampling_RF"][row, layout.TEMPERATURE].to(scores_V.dtype)
    return scores_V, known


def rank_tokens(
    ctx: PassContext, case: Case, row: int, drawn: int, depth: int, scored: tuple[Tensor, Tensor]
) -> list[tuple[float, int]]:
    """(log-probability, target id) of what may come at position `drawn` and this depth, best first;
    with the noise by which it is drawn, if it is.
    """
    scores_V, known = scored
    is_coupled = ctx.acceptance.function is None
    if is_sampled(ctx, case, row) and (is_coupled or are_drawn(ctx)):
        words = case.inputs["sampling_RI"][row].tolist()
        bits = noise_bits(
            known.clamp(min=0), seed_low=words[layout.SEED_LOW], seed_high=words[layout.SEED_HIGH],
            sample=words[layout.SAMPLE], position=drawn,
            stream=layout.STREAM_DRAW if is_coupled else layout.STREAM_DRAFT + 8 * depth,
        )  # fmt: skip
        scores_V = scores_V + gumbel(bits)
    scores_V = scores_V.masked_fill(known < 0, float("-inf")).log_softmax(0)
    pairs = sorted(zip(scores_V.tolist(), known.tolist(), strict=True), key=lambda pair: -pair[0])
    return [(score, token if score > float("-inf") else PAD) for score, token in pairs]


def depth_calls(
    ctx: PassContext, case: Case, rows: Sequence[int], first: Sequence[int]
) -> list[AttentionCall]:
    """What the attention of each depth must be given: its nodes, and keys that are not written."""
    shape, calls, num_keys = ctx.config.tree, [], 0
    assert shape is not None
    if "forward" not in ctx.draft:
        return []
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


def child_distributions(
    ctx: PassContext, drafts: Sequence[int],
    after: Callable[[Sequence[int]], tuple[Tensor, Tensor]], vocab_size: int, *, sampled: bool,
) -> Tensor:  # fmt: skip
    """What the children of each inner node of a static tree were drawn from, [I, V]; 0 for greedy
    requests.  `after` gives logits and ids after a path.
    """
    shape = ctx.config.tree
    assert shape is not None
    tokens = dict(zip(shape.choices, drafts, strict=True))
    inner = [place for place in ((), *shape.choices) if any(p[:-1] == place for p in shape.choices)]
    rows = []
    for place in inner:
        scores_V, ids_V = after([tokens[place[:d]] for d in range(1, len(place) + 1)])
        probs_V = scores_V.new_zeros(vocab_size)
        if sampled:
            own_V = scores_V.masked_fill(ids_V < 0, float("-inf")).softmax(0)
            for token, chance in zip(ids_V.tolist(), own_V, strict=True):
                probs_V[token] += chance if token >= 0 else 0
        rows.append(probs_V)
    return torch.stack(rows)
