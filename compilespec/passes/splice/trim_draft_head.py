"""Cuts the drafter's head down to the tokens that it may propose."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from compilespec.errors import NotSupported
from compilespec.passes.aten.cleanup import drop_unused_inputs
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.passes.splice.narrow_rows import ELEMENTWISE
from compilespec.passes.splice.rows import take_rows
from compilespec.program import Derived
from compilespec.tracing.quantized_weights import rebuild
from compilespec.tracing.structure import LINEAR, argument, shape_of

KEPT_IDS = "draft.kept_ids"  # the input that holds the target's id of each row that is left


def trim_draft_head(step: Splice) -> int:
    """linear(x, head).argmax(-1) -> kept[linear(x, head[kept]).argmax(-1)], in every proposal of
    the drafter, `kept` being `ctx.draft_ids`.

    The vocabulary is followed from the product to where it ends: the index of an argmax is mapped
    through the table, a draw is given the table, so that its noise stays that of the target's ids,
    and a distribution is spread over them.  A head that the target reads as well stays whole there.

    Returns: proposals rewritten.  Numerics: exact, against products of as many rows.  Torch IR.
    Raises: NotSupported where a proposal is no argmax over such a product, or the head is
    quantized.
    Source: FR-Spec (Zhao et al. 2025), FastMTP (2025).
    """
    ctx = step.ctx
    assert ctx.draft_ids is not None
    paths = [path for node in _products(step.graph) if (path := _follow(node, ctx)) is not None]
    heads = {path.product.args[1] for path in paths if path.choices}
    choices = [node for path in paths for node in path.choices]
    lost = [node.name for node in step.graph.nodes if _is_proposal(node) and node not in choices]
    if lost or len(choices) != num_proposals(ctx):
        raise NotSupported(
            "draft_vocab_size= needs a drafter whose draft is the argmax over a product with its "
            f"head; {lost[0] if lost else 'a proposal'} of spec={ctx.capabilities.name!r} is none: "
            "leave it out"
        )
    table = node_of(step.weight(KEPT_IDS, ctx.draft_ids.to(ctx.config.device)))
    for path in paths:
        if path.product.args[1] in heads:  # also where nothing reads its logits
            _trim(step, path, table)
    drop_unused_inputs(step)
    return len(choices)


def num_proposals(ctx: PassContext) -> int:
    """Calls of the drafter that propose, in a graph."""
    count = ctx.config.num_draft_tokens
    return min(count, 1) if LOOPS[ctx.capabilities.kind].proposes_at_once else count


@dataclass
class _Path:
    """A product of the drafter, and what becomes of its columns."""

    product: fx.Node
    carried: list[fx.Node] = field(default_factory=list)  # with a column for each row of the head
    limits: list[fx.Node] = field(default_factory=list)  # cut off columns behind all ids
    rows: list[fx.Node] = field(default_factory=list)  # choose rows: see `take_rows`
    choices: list[fx.Node] = field(default_factory=list)  # argmaxes
    draws: list[fx.Node] = field(default_factory=list)
    bests: list[fx.Node] = field(default_factory=list)  # of a tree: its topk
    noises: list[fx.Node] = field(default_factory=list)  # what a tree's scores are drawn with
    sums: list[fx.Node] = field(default_factory=list)  # how sure a draft is, among its columns
    pads: list[fx.Node] = field(default_factory=list)  # distributions, padded to the target's ids

    def ends_at(self, node: fx.Node, source: fx.Node) -> bool:
        """Note a node at which the columns become ids of the target, or are cut."""
        for kind, is_kind in _ENDS.items():
            if is_kind(node, source):
                getattr(self, kind).append(node)
                return True
        return False


def _products(graph: fx.Graph) -> Iterator[fx.Node]:
    """Products with weights of the drafter's fragments."""
    for node in graph.nodes:
        if _fragment(node).startswith("draft") and node.target in LINEAR:
            yield node


def _follow(product: fx.Node, ctx: PassContext) -> _Path | None:
    """Where the columns of a product go; None if a node needs all of them."""
    path, frontier, seen = _Path(product), [product], {product}
    while frontier:
        node = frontier.pop()
        path.carried.append(node)
        for user in node.users:
            if user in seen or path.ends_at(user, node):
                continue
            if "rows" in user.meta:
                path.rows.append(user)
            elif _is_limit(user, ctx):
                path.limits.append(user)
            elif (noise := _added_noise(user, node)) is not None:
                path.noises.append(noise)
            elif not _carries(user, node, ctx):
                return None
            seen.add(user)
            frontier.append(user)
    return path


def _trim(step: Splice, path: _Path, table: fx.Node) -> None:
    """Compute only the columns of the table's ids, and map what is chosen among them."""
    ids, product = step.ctx.draft_ids, path.product
    assert ids is not None
    x, weight, bias = product.args[0], product.args[1], argument(product, 2, "bias")
    product.args, product.kwargs = (x, _kept(step, weight), _kept(step, bias)), {}
    for node in path.carried:
        if "example" in node.meta:
            shape, dtype = node.meta["example"]
            node.meta["example"] = ((*shape[:-1], len(ids)), dtype)
    for node in path.rows:
        source: Any = node.args[0]
        with step.before(node):
            _replace(step, node, node_of(take_rows(step, step.value(source), node.meta["rows"])))
    for node in path.limits:
        _replace(step, node, node.args[0])
    _map_ends(step, path, table, len(ids))


def _map_ends(step: Splice, path: _Path, table: fx.Node, num_ids: int) -> None:
    """Let ids of the target come out of where the columns end."""
    for node in path.draws:
        node.args = (*node.args[:2], table, *node.args[3:])
    for node in path.noises:
        node.args = (*node.args[:2], table, num_ids, *node.args[4:])
    for node in path.bests:
        for index in [user for user in node.users if user.args[1] == 1]:
            _map(step, index, table)
    for node in path.pads:
        probs, ids = step.values((node.args[0], table))
        with step.before(node):
            spread = spread_over_ids(probs, ids, vocab_size=step.config.vocab_size)
        _replace(step, node, node_of(spread))
    for node in path.choices:
        _map(step, node, table)


def _map(step: Splice, node: fx.Node, table: fx.Node) -> None:
    """Whoever reads an index reads the id that the table has there."""
    readers = list(node.users)
    with step.after(node):
        chosen = step.value(table)[step.value(node)]
    for reader in readers:
        reader.replace_input_with(node, node_of(chosen))


def _kept(step: Splice, weight: Any) -> fx.Node | None:
    """The input of the weight's rows that stay, gathered once however many graphs read it."""
    if weight is None:
        return None
    if weight.target is rebuild:
        raise NotSupported(
            "draft_vocab_size= cannot cut a quantized head; leave the head out with "
            "draft_quantize=compilespec.Quantize(..., skip='lm_head'), or draft_vocab_size= out"
        )
    role, ids, weights = str(weight.meta["role"]), step.ctx.draft_ids, step.ctx.weights
    assert ids is not None
    name = f"{role}.kept"
    if name not in weights:
        derived = Derived(source=role, make=lambda whole: whole.detach()[ids.to(whole.device)])
        step.ctx.derived[name], weights[name] = derived, derived.make(weights[role])
    return node_of(step.weight(name, weights[name]))


def spread_over_ids(probs_N: Tensor, ids_N: Tensor, *, vocab_size: int) -> Tensor:
    """Probabilities of some of the target's ids, [..., N], over all of them: [..., V]."""
    zeros_V = functional.pad(torch.zeros_like(probs_N[..., :1]), (0, vocab_size - 1))
    return zeros_V.index_add(-1, ids_N, probs_N)


def _replace(step: Splice, old: fx.Node, new: Any) -> None:
    old.replace_all_uses_with(new)
    step.graph.erase_node(old)


# --- what nodes do with the vocabulary, their last dimension ---


def _fragment(node: fx.Node) -> str:
    return str((node.meta.get("custom") or {}).get("fragment", ""))


def _is_proposal(node: fx.Node) -> bool:
    """True where a node chooses the draft, in a captured "propose"."""
    return _fragment(node).endswith(".propose") and node.target in ("argmax", torch.argmax)


def _is_choice(node: fx.Node, source: fx.Node) -> bool:
    """An argmax over the vocabulary, of which only the index itself is read."""
    return (
        _is_proposal(node)
        and argument(node, 1, "dim") in (-1, len(shape_of(source) or ()) - 1)
        and not argument(node, 2, "keepdim", False)
        and _is_the_draft(node)
    )


def _is_the_draft(node: fx.Node) -> bool:
    """True where the captured call gives out the index as it is, but for its dtype."""
    readers = [user for user in node.users if _fragment(user).endswith(".propose")]
    return all(user.target in ("to", "int", "type") and _is_the_draft(user) for user in readers)


def _is_draw(node: fx.Node, source: fx.Node) -> bool:
    is_draw = node.target is torch.ops.compilespec.draw.default
    return is_draw and node.args[0] is source and node.args[2] is None


def _is_best(node: fx.Node, source: fx.Node) -> bool:
    return node.target == "topk" and argument(node, 2, "dim") == -1 and not _fragment(node)


def _added_noise(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """The noise by ids that a node adds, if it does."""
    if node.target is not operator.add or len(node.all_input_nodes) != 2:
        return None
    (other,) = (one for one in node.all_input_nodes if one is not source)
    while other.target in ("unsqueeze", "to"):
        other = other.all_input_nodes[0]
    is_noise = other.target is torch.ops.compilespec.draft_noise.default
    return other if is_noise and other.args[2] is None else None


def _is_pad(node: fx.Node, source: fx.Node) -> bool:
    return node.target is functional.pad and not _fragment(node)


def _is_sum(node: fx.Node, source: fx.Node) -> bool:
    return node.target in (torch.amax, torch.logsumexp) and not _fragment(node)


def _is_limit(node: fx.Node, ctx: PassContext) -> bool:
    """True where a node cuts off columns that are no ids of the target: x[:, :V]."""
    index = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, tuple) or not all(isinstance(part, slice) for part in index):
        return False
    last, ids = index[-1], ctx.draft_ids
    is_whole = all(part == slice(None) for part in index[:-1])
    is_prefix = last.start in (None, 0) and last.step in (None, 1) and isinstance(last.stop, int)
    rank = len(shape_of(node) or ())
    return bool(is_whole and is_prefix and len(index) == rank and int(ids.max()) < last.stop)  # type: ignore[union-attr]


def _carries(node: fx.Node, source: fx.Node, ctx: PassContext) -> bool:
    """True where each column of the result is computed from that column, and numbers of its row."""
    if node.target in ("log_softmax", "softmax", torch.softmax, functional.softmax):
        return argument(node, 1, "dim") == -1
    if node.target == "unflatten":
        return bool(node.args[1] == 0)
    if node.target == "repeat_interleave":
        return bool(node.args[2] == 0)
    if node.target in _MOVES:  # dimensions 0 and 1, before the last
        dims = node.args[1:2] if node.target == "select" else node.args[1:]
        if node.target == "flatten":
            dims = (argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1))
        rank = len(shape_of(source) or (0, 0, 0))
        return rank > 2 and bool(dims) and all(dim in (0, 1) for dim in dims)
    if node.target == "view_as":
        return node.args[0] is source and node.args[1] is source
    if node.op not in ("call_function", "call_method") or node.target not in ELEMENTWISE:
        return False
    others = [other for other in node.all_input_nodes if other is not source]
    return all(_is_narrow(other, ctx) for other in others)


def _is_narrow(node: fx.Node, ctx: PassContext) -> bool:
    """True where an operand holds one number a row, or one for all."""
    weight: Tensor | None = ctx.weights.get(str(node.meta.get("role")))
    shape = shape_of(node) if weight is None else tuple(weight.shape)
    if shape is None:  # made by a pass
        return not _fragment(node) and node.op != "placeholder"
    return not shape or shape[-1] == 1


_MOVES = ("flatten", "squeeze", "unsqueeze", "transpose", "select")
_ENDS: Mapping[str, Any] = {
    "choices": _is_choice,
    "draws": _is_draw,
    "bests": _is_best,
    "sums": _is_sum,
    "pads": _is_pad,
}
