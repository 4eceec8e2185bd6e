"""What each operation makes of operands that are cut; unknown ones want them whole."""

from __future__ import annotations

from torch import Tensor, fx

from compilespec.passes.splice.sharding import (
    adapters,
    attention,
    choices,
    products,
    quantized,
    views,
)
from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused, Shard
from compilespec.passes.splice.sharding.views import dim_argument, op_name

POINTWISE = frozenset(
    (
        "abs", "add", "add_", "bfloat16", "clamp", "clamp_", "clone", "contiguous", "cos", "div",
        "div_", "double", "dropout", "erf", "exp", "float", "gelu", "half", "isnan", "log",
        "log1p", "logsigmoid", "masked_fill", "maximum", "minimum", "mul", "mul_", "neg", "pow",
        "relu", "relu_", "rsqrt", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square",
        "sub", "sub_", "tanh", "to", "truediv", "type_as", "where"
    )
)  # fmt: skip
ALONG = frozenset(
    (
        "mean", "sum", "var", "softmax", "log_softmax", "cumsum", "amax", "amin", "topk",
        "argmax", "logsumexp"
    )
)  # fmt: skip
OTHER_DIMS = frozenset(
    (
        "index_select", "repeat_interleave", "roll", "flip"
    )
)  # fmt: skip


def rule_of(flow: Flow, node: fx.Node) -> Placed:
    """How a node's value is cut.  Raises: Refused."""
    if node.op == "output":
        return _whole(flow, node)
    name = op_name(node)
    for rules in (
        products.RULES,
        quantized.RULES,
        attention.RULES,
        adapters.RULES,
        choices.RULES,
        views.RULES,
    ):
        if name in rules:
            return rules[name](flow, node)
    if not any(_is_cut(flow, x, node) for x in node.all_input_nodes):
        return None
    if name in POINTWISE:
        return pointwise(flow, node)
    if name in ALONG:
        return along(flow, node)
    if name in OTHER_DIMS:
        return other_dims(flow, node)
    if name in ("layer_norm", "rms_norm"):
        return normed(flow, node)
    if name == "getattr" or not isinstance(flow.values.get(node), Tensor | tuple):
        return None  # a size, a device
    return _whole(flow, node)


def _is_cut(flow: Flow, x: fx.Node, user: fx.Node) -> bool:
    return flow.of(x, user) is not None or isinstance(flow.placed.get(x), tuple)


def _whole(flow: Flow, node: fx.Node) -> Placed:
    cut = [x for x in node.all_input_nodes if flow.of(x, node) is not None]
    if cut:
        raise Refused(f"{op_name(node)} needs it whole", *cut)
    return None


def pointwise(flow: Flow, node: fx.Node) -> Shard:
    """Operands meet where broadcasting brings them together."""
    found = [(x, s) for x in flow.tensors(node) if (s := flow.of(x, node)) is not None]
    places = {(s.cut.dim - len(flow.shape(x)), s.cut.parts, s.cut.segments) for x, s in found}
    first, shard = found[0]
    if len(places) > 1:
        parts = min(s.cut.parts for _, s in found)
        raise Refused(
            f"{op_name(node)} of values that are cut in different ways",
            *(x for x, _ in found),
            parts=parts,
        )
    right = shard.cut.dim - len(flow.shape(first))
    for x in flow.tensors(node):
        if flow.of(x, node) is None and len(flow.shape(x)) >= -right and flow.shape(x)[right] != 1:
            if flow.propose(x, right, shard.cut):
                continue
            raise Refused(f"{op_name(node)} with a value that is whole", *(x for x, _ in found))
    return shard.at(right + len(flow.shape(node)), *(s for _, s in found))


def along(flow: Flow, node: fx.Node) -> Placed:
    """What works along dimensions: they must be whole, but for an argmax of a head's logits."""
    x = node.args[0]
    shard = flow.of(x, node)
    assert isinstance(x, fx.Node)
    assert shard is not None
    name, ndim = op_name(node), len(flow.shape(x))
    wanted = dim_argument(node, 2 if name == "topk" else 1)
    if wanted is None:
        raise Refused(f"{name} over all dimensions", x)
    dims = [dim % ndim for dim in (wanted if isinstance(wanted, tuple | list) else (wanted,))]
    if shard.cut.dim in dims:
        if name == "argmax" and choices.is_own_logits(flow, x, node):
            flow.edits[node] = lambda: choices.argmax_of_ranks(flow, node, x)
            return None
        raise Refused(f"{name} along the dimension that is cut", x)
    result = flow.values[node]
    first = result if isinstance(result, Tensor) else result[0]
    drops = first.dim() < ndim
    dim = shard.cut.dim - (sum(d < shard.cut.dim for d in dims) if drops else 0)
    placed = shard.at(dim)
    return placed if isinstance(result, Tensor) else (placed,) * len(result)


def other_dims(flow: Flow, node: fx.Node) -> Shard:
    """What moves whole slices along one dimension: another one may be cut."""
    x, dim = node.args[0], dim_argument(node, 2 if op_name(node) == "repeat_interleave" else 1)
    assert isinstance(x, fx.Node)
    shard = flow.of(x, node)
    if shard is None or not isinstance(dim, int) or dim % len(flow.shape(x)) == shard.cut.dim:
        raise Refused(f"{op_name(node)} along the dimension that is cut", *flow.tensors(node))
    return shard


def normed(flow: Flow, node: fx.Node) -> Shard:
    """A norm over the last dimensions: others may be cut."""
    x, sizes = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    assert isinstance(sizes, tuple | list)
    shard = flow.of(x, node)
    if shard is None or shard.cut.dim >= len(flow.shape(x)) - len(sizes):
        raise Refused(f"{op_name(node)} over the dimension that is cut", *flow.tensors(node))
    return shard
