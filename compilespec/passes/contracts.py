"""What must hold after every pass; the runner checks it, in milliseconds.

A contract is data beside the pass list: a statement, and a function that yields its violations.
`EVERYWHERE` holds after every pass of its level; a pass's `ensures` hold from that pass on.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec._torch_compat import OpOverload
from compilespec.passes.aten.linears import find_linears
from compilespec.passes.context import PassContext
from compilespec.passes.graph.aliases import storage_root
from compilespec.program import LONG_ROPE, ROPE_OFFSETS, markers

# The target's inputs: `read_state` takes the first two, `read_rope_offsets` and `read_long_rope`
# the others.
ARGUMENTS = ("input_ids", "position_ids", ROPE_OFFSETS, LONG_ROPE)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_SIZES = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.getitem)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """`problems` yields each violation, and nothing if the contract holds."""

    says: str
    problems: Callable[[fx.GraphModule, PassContext], Iterable[str]]


def broken(
    contracts: Iterable[Contract], gm: fx.GraphModule, ctx: PassContext
) -> Iterator[tuple[Contract, str]]:
    """Every violation, with its contract."""
    for contract in contracts:
        for problem in contract.problems(gm, ctx):
            yield contract, problem


# --- after every pass ---


def _unaccounted(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    roles = Counter(node.meta.get("role") for node in gm.graph.nodes if node.op == "placeholder")
    for role, count in roles.items():
        if role not in ctx.inputs and role not in ARGUMENTS:
            yield f"placeholder {role!r} is fed by nothing"
        if count > 1:
            yield f"{count} placeholders are {role!r}"
    yield from (f"input {name!r} has no placeholder" for name in ctx.inputs if name not in roles)


def _unnamed_outputs(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    node = gm.graph.output_node()
    names, results = node.meta.get("names"), node.args[0]
    if names is None:  # a graph that is not a step
        return
    if not isinstance(results, tuple | list) or len(results) != len(names):
        yield f"the outputs {results} are called {', '.join(names)}"


def _lost_writes(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    last_read = {storage_root(a): i for node, i in order.items() for a in node.all_input_nodes}
    for node, root in writes(gm.graph):
        if root.op == "placeholder":
            if root.meta.get("role") not in ctx.buffers:
                yield f"{node.name} writes {root.name}, which is neither state nor cache"
        elif last_read[root] <= order[node] and not node.users:
            yield f"{node.name} writes {root.name}, which nothing reads after it"


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node, the node whose storage it writes), for every in-place operation."""
    for node in graph.nodes:
        written: Iterable[Any] = ()
        is_method = node.op == "call_method" and node.target.endswith("_")
        if is_method or node.target in _IN_PLACE:
            written = node.args[:1]
        elif node.op == "call_function":
            written = [node.args[i] for i in _torch_compat.mutated_arguments(node.target)]
        for argument in written:
            if isinstance(argument, fx.Node):
                yield node, storage_root(argument)


def written_buffers(graph: fx.Graph) -> Counter[str]:
    """The number of operations that write each placeholder, by role."""
    return Counter(
        str(root.meta.get("role")) for _, root in writes(graph) if root.op == "placeholder"
    )


def _foreign_operators(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op == "call_method" or (
            node.op == "call_function"
            and not isinstance(node.target, OpOverload)
            and node.target not in _SIZES
            and not getattr(node.target, "__module__", "").startswith(("torch.sym", "_operator"))
            and not str(node.target).startswith("<function sym_")
        ):
            yield f"{node.name} = {node.target}"
        elif node.op == "call_function" and "val" not in node.meta and _gives_something(node):
            yield f"{node.name} has no shape"


def _gives_something(node: fx.Node) -> bool:
    target = node.target
    return not isinstance(target, OpOverload) or bool(target._schema.returns)


# --- from one pass on ---


def plays(*roles: str) -> Contract:
    """Exactly one node plays each role."""

    def problems(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
        counts = Counter(node.meta.get("role") for node in gm.graph.nodes)
        yield from (f"{counts[r]} nodes play {r!r}" for r in roles if counts[r] != 1)

    return Contract(says=f"one node plays each of {', '.join(roles)}", problems=problems)


def gives(*names: str) -> Contract:
    """The graph's outputs begin with these, in this order; "a|b" is one or the other."""
    wanted = [name.split("|") for name in names]

    def problems(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
        found = gm.graph.output_node().meta.get("names", ())
        begins = zip(wanted, found, strict=False)
        if len(found) < len(wanted) or any(name not in one for one, name in begins):
            yield f"outputs are {', '.join(found)}"

    return Contract(says=f"the outputs begin with {', '.join(names)}", problems=problems)


def writes_buffers(*names: str) -> Contract:
    """Each buffer is written exactly once."""

    def problems(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
        found = written_buffers(gm.graph)
        yield from (f"{name} is written {found[name]} times" for name in names if found[name] != 1)

    return Contract(says=f"one node writes each of {', '.join(names)}", problems=problems)


def _arguments(*names: str) -> Callable[[fx.GraphModule, PassContext], Iterator[str]]:
    """Make a check that yields each of these inputs of the target that the graph still has."""

    def problems(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.meta.get("role") in names:
                yield f"placeholder {node.name}"

    return problems


def _stateless_attention(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    yield from (f"{node.name} is stateless" for node in markers(gm))


def _stateless_keys(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    found = markers(gm, "cached", "all_positions")
    yield from (f"{node.name} has no cache" for node in found)


def _deep_rows(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    yield from (f"{node.name} has no rows" for node in markers(gm, "deep_rows"))


def _stateless_recurrence(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    found = markers(gm, "recurrence", "causal_conv")
    yield from (f"{node.name} has no state" for node in found)


def _target_caches(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    ops = (
        torch.ops.compilespec.paged_attention.default,
        torch.ops.compilespec.masked_attention.default,
    )
    used = [
        tuple(str(cache.meta.get("role")) for cache in node.args[3:5] if cache is not None)
        for node in gm.graph.nodes
        if node.target in ops
        and not str((node.meta.get("custom") or {}).get("fragment")).startswith("draft")
    ]
    mine = [pair for pair in used if pair[0].startswith("cache.target.")]
    wanted = [
        tuple(f"cache.target.{layer}.{half}" for half in ("key", "value"))
        for layer in range(ctx.num_attention_layers)
    ]
    for pair, other in zip(mine, wanted, strict=False):
        if pair != other[: len(pair)]:
            yield f"{' and '.join(pair)} where {' and '.join(other)} belong"
            return
    if len(mine) != len(wanted):
        yield f"{len(mine)} calls for {len(wanted)} layers"


def _kept_paths(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    attends, keeps = (
        [node.args[at] for node in gm.graph.find_nodes(op="call_function", target=op)]
        for op, at in (
            (torch.ops.compilespec.paged_attention.default, 3),
            (torch.ops.compilespec.write_cache.default, 2),
        )
    )
    mine = [cache for cache in attends if str(cache.meta.get("role")).startswith("cache.target.")]
    if mine != keeps:
        yield f"{len(keeps)} caches are written, {len(mine)} are read"


def _aux_roles(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    names = (f"aux.{index}" for index in range(len(ctx.drafter.aux_layers)))
    yield from plays(*names).problems(gm, ctx)


def _plain_products(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    from compilespec.passes.aten.linears import PACKABLE

    if ctx.traits.packs_weights:
        for linear in find_linears(gm, ctx):
            if linear.weight.meta["val"].dtype in PACKABLE:
                yield f"{linear.node.name} multiplies by {linear.weight.meta['role']}"


def _draws_of_rows(gm: fx.GraphModule, ctx: PassContext) -> Iterator[str]:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.compilespec.draw.default):
        if node.args[2] is None:
            yield f"{node.name} takes rows for ids"


ACCOUNTED = Contract(says="every placeholder is a declared input", problems=_unaccounted)
NAMED = Contract(says="every output has a name", problems=_unnamed_outputs)
WRITES_REACH = Contract(
    says="writes go to state and caches, or are read later", problems=_lost_writes
)
ONLY_ATEN = Contract(
    says="only ATen and compilespec operators, each with a shape", problems=_foreign_operators
)
NO_ARGUMENTS = Contract(
    says="ids and positions come from the state", problems=_arguments(*ARGUMENTS[:2])
)
NO_OFFSETS = Contract(says="rotary offsets come from the host", problems=_arguments(ROPE_OFFSETS))
NO_LENGTHS = Contract(says="long requests are told by the state", problems=_arguments(LONG_ROPE))
NO_STATELESS = Contract(says="no stateless attention is left", problems=_stateless_attention)
NO_STATELESS_KEYS = Contract(says="no mask is made without a cache", problems=_stateless_keys)
NO_DEEP_ROWS = Contract(says="features of images come from the host", problems=_deep_rows)
NO_STATELESS_RECURRENCE = Contract(
    says="no recurrence without a state is left", problems=_stateless_recurrence
)
KEPT_PATHS = Contract(says="each target layer keeps the accepted path", problems=_kept_paths)
OWN_CACHES = Contract(says="each target layer has its own caches", problems=_target_caches)
TAPPED = Contract(says="one node plays each aux role", problems=_aux_roles)
DRAWN_BY_ID = Contract(says="draws from a cut head know its ids", problems=_draws_of_rows)
ALL_PACKED = Contract(says="every product of a weight is packed", problems=_plain_products)

EVERYWHERE: Mapping[Literal["torch", "aten"], tuple[Contract, ...]] = {
    "torch": (ACCOUNTED, NAMED, WRITES_REACH),
    "aten": (ACCOUNTED, NAMED, WRITES_REACH, ONLY_ATEN),
}


# --- metadata ---


def misdescribed(graph: fx.Graph, author: str) -> Iterator[str]:
    """Nodes that the pass `author` made, and their users, whose recorded shape is wrong.

    Each is run on the fake values of its arguments.  ATen.
    """
    new = [
        node
        for node in graph.nodes
        if node.op == "call_function" and (node.meta.get("custom") or {}).get("pass") == author
    ]
    for node in dict.fromkeys([*new, *(user for made in new for user in made.users)]):
        if node.op == "call_function":
            want = _infer(node)
            if want is not None and form(want) != form(node.meta.get("val")):
                yield f"{node.name} is described as {form(node.meta.get('val'))}, is {form(want)}"


def _infer(node: fx.Node) -> Any:
    """The value of a node on its arguments' fake values; None if no argument is a tensor."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    target: Any = node.target
    with tensors[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return target(*args, **kwargs)


def form(value: Any) -> str:
    """A value's dtype and sizes as text: comparing symbols would add guards."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(form(part) for part in value)})"
    return str(value)
