"""The cost of one node of a step graph: FLOPs and bytes as sympy expressions.

Counted are products with and without weights, attention, and the rows that lookups read.
Element-wise work between them counts as fused into them: it adds neither FLOPs nor bytes, so the
sum is the minimum for a perfect fuser.  Requests count as greedy, without log-probabilities.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

import compilespec.ops
import compilespec.ops.host_process
import compilespec.ops.sample.draft_noise
import compilespec.ops.sample.path_penalties
import compilespec.ops.sample.probabilities
import compilespec.ops.suffix_match  # noqa: F401  (these register the operators)
from compilespec import _torch_compat
from compilespec.passes.graph.aliases import storage_root
from compilespec.passes.proofs.sizes import B, Expr, K, R, T
from compilespec.program import InputSpec

_aten = torch.ops.aten
C = sympy.Symbol("C", integer=True, positive=True)  # keys a token attends to, its own included
_BATCH = {"B": B, "T": T, "R": R}
_ZERO = sympy.Integer(0)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs (a multiply-add is two), and bytes by what they belong to."""

    flops: Expr = _ZERO
    weight_bytes: Expr = _ZERO
    cache_bytes: Expr = _ZERO
    activation_bytes: Expr = _ZERO
    sent_bytes: Expr = _ZERO  # sent by a rank to the others

    @property
    def num_bytes(self) -> Expr:
        """Bytes of memory."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: part + getattr(other, name) for name, part in vars(self).items()})

    def __mul__(self, factor: Expr) -> Cost:
        return Cost(**{name: part * factor for name, part in vars(self).items()})

    def expanded(self) -> Cost:
        return Cost(**{name: sympy.expand(part) for name, part in vars(self).items()})

    def at(self, values: Mapping[Expr, int]) -> Cost:
        """The numbers for given values of the symbols."""
        return Cost(**{name: part.subs(values) for name, part in vars(self).items()})


class NodeCosts:
    """The costs of one ATen graph's nodes.

    K is recognised in shapes by where it comes from: a dimension of K + 1 that depends on the
    verify positions is K + 1, another of the same size is a number.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Mapping[str, InputSpec], num_draft_tokens: int
    ) -> None:
        self._graph, self._inputs = graph, inputs
        self._num_verify = num_draft_tokens + 1
        self._symbols = _batch_symbols(graph, inputs)
        self._verifies: set[fx.Node] = set()  # nodes with a dimension of verify positions
        if num_draft_tokens and B in self._symbols.values():
            for node in graph.nodes:
                if self._has_verify_positions(node):
                    self._verifies.add(node)

    def __iter__(self) -> Iterator[tuple[fx.Node, Cost]]:
        for node in self._graph.nodes:
            rule = _rule_of(node)
            if rule is not None:
                yield node, rule(self, node).expanded()

    def uncounted(self) -> dict[str, int]:
        """Operators that are neither counted nor element-wise, views or small reductions."""
        found: dict[str, int] = {}
        for node in self._graph.nodes:
            if node.op == "call_function" and not _is_fused(node):
                name = str(node.target)
                found[name] = found.get(name, 0) + 1
        return found

    # --- sizes ---

    def shape(self, node: Any) -> list[Expr]:
        """The shape in B, T, R and K."""
        sizes = [self._size(size) for size in node.meta["val"].shape]
        if node in self._verifies:
            at = self._verify_dim(node)
            sizes[at] = sympy.expand(sizes[at] / self._num_verify) * (K + 1)
        return sizes

    def num_elements(self, node: Any) -> Expr:
        return sympy.prod(self.shape(node)) if node.meta["val"].dim() else sympy.Integer(1)

    def num_bytes(self, node: Any) -> Expr:
        return self.num_elements(node) * node.meta["val"].element_size()

    def is_weight(self, node: Any) -> bool:
        root = storage_root(node)
        spec = self._inputs.get(str(root.meta.get("role")))
        is_given = spec is not None and (spec.kind == "weight" or spec.name.startswith("adapter."))
        return root.op == "get_attr" or is_given

    @property
    def requests(self) -> Expr:
        """Requests of a packed prefill batch."""
        return R if R in self._symbols.values() else sympy.Integer(1)

    def _size(self, size: Any) -> Expr:
        if isinstance(size, int):
            return sympy.Integer(size)
        expr = _torch_compat.size_expression(size)
        return expr.xreplace(
            {s: self._symbols[str(s)] for s in expr.free_symbols if str(s) in self._symbols}
        )

    def _has_verify_positions(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if node.op == "placeholder":
            return str(node.meta.get("role")).endswith("S")  # tokens_RS
        if node.target is _aten.arange.default:
            return list(value.shape) == [self._num_verify]  # type: ignore[union-attr]
        if not any(operand in self._verifies for operand in node.all_input_nodes):
            return False
        if isinstance(value, (list, tuple)):  # of parts, each of which is looked at
            return True
        return isinstance(value, torch.Tensor) and self._verify_dim(node) is not None

    def _verify_dim(self, node: Any) -> Any:
        """The dimension of verify positions of a node: in [S*B, ..], [B, S, ..], [B, N, S, H], or
        the last one without a batch dimension.
        """
        sizes = [self._size(size) for size in node.meta["val"].shape]
        if not sizes:
            return None
        if sizes[0] != B and B in sizes[0].free_symbols:
            divides = all(
                term.as_coeff_Mul()[0] % self._num_verify == 0
                for term in sympy.Add.make_args(sizes[0])
            )
            return 0 if divides else None
        places = (1, 2) if sizes[0] == B else (len(sizes) - 1,)
        return next((at for at in places if sizes[at : at + 1] == [self._num_verify]), None)


def _batch_symbols(graph: fx.Graph, inputs: Mapping[str, InputSpec]) -> dict[str, Expr]:
    """The letter B, T or R of each tracing symbol, by the names of the batch inputs."""
    found: dict[str, Expr] = {}
    for node in graph.find_nodes(op="placeholder"):
        spec = inputs.get(str(node.meta.get("role")))
        if spec is not None and spec.kind == "batch" and spec.name[-1] in _BATCH:
            found[str(node.meta["val"].shape[0])] = _BATCH[spec.name[-1]]
    return found


# --- rules ---


def _product(costs: NodeCosts, node: fx.Node, left: Any, right: Any, flops: Expr) -> Cost:
    """A product of two tensors, either of which may be a weight."""
    weights = sum((costs.num_bytes(x) for x in (left, right) if costs.is_weight(x)), _ZERO)
    moved = sum((costs.num_bytes(x) for x in (left, right) if not costs.is_weight(x)), _ZERO)
    return Cost(flops=flops, weight_bytes=weights, activation_bytes=moved + costs.num_bytes(node))


def _matmul(costs: NodeCosts, node: fx.Node) -> Cost:
    """mm, bmm and their kin with an addend: [.., M, N] from an inner dimension."""
    args: Any = node.args
    at = 1 if node.target in (_aten.addmm.default, _aten.baddbmm.default) else 0
    left, right = args[at], args[at + 1]
    inner = costs.shape(left)[-1]
    return _product(costs, node, left, right, 2 * costs.num_elements(node) * inner)


def _rows_times_weight(costs: NodeCosts, node: fx.Node) -> Cost:
    """Packed and grouped products: every row with its group's matrix, and all matrices are read."""
    args: Any = node.args
    inner = costs.shape(args[0])[-1]
    return _product(costs, node, args[0], args[1], 2 * costs.num_elements(node) * inner)


def _fused_head(costs: NodeCosts, node: fx.Node) -> Cost:
    """A product whose results are not written."""
    args: Any = node.args
    return Cost(
        flops=2 * costs.num_elements(args[0]) * costs.shape(args[1])[0],
        weight_bytes=costs.num_bytes(args[1]),
        activation_bytes=costs.num_bytes(args[0]),
    )


def _rows_times_quantized(costs: NodeCosts, node: fx.Node) -> Cost:
    """A quantized product, which reads scales and zero points too."""
    parts = (x for x in (*node.args[2:3], *node.args[4:]) if isinstance(x, fx.Node))
    numbers = sum((costs.num_bytes(part) for part in parts), _ZERO)
    return _rows_times_weight(costs, node) + Cost(weight_bytes=numbers)


def _lookup(costs: NodeCosts, node: fx.Node) -> Cost:
    """Rows read from a table; what is selected from activations is fused."""
    if not costs.is_weight(node.args[0]) or not node.meta["val"].is_floating_point():
        return Cost()
    return _rows_read(costs, node)


def _rows_read(costs: NodeCosts, node: fx.Node) -> Cost:
    """Rows read from a table that is split among ranks: in the worst case a rank has all of
    them.
    """
    rows = costs.num_bytes(node)
    return Cost(weight_bytes=rows, activation_bytes=rows)


def _gather(costs: NodeCosts, node: fx.Node) -> Cost:
    """A rank's part goes to every other rank, and all parts are read."""
    part: Any = node.args[0]
    num_others = int(node.args[-1]) - 1  # type: ignore[arg-type]
    num_bytes = costs.num_bytes(part)
    return Cost(
        activation_bytes=num_bytes * (num_others + 1) + costs.num_bytes(node),
        sent_bytes=num_bytes * num_others,
    )


def _choose(costs: NodeCosts, node: fx.Node) -> Cost:
    """A rank reads its logits; its best value and the id of it go to every other rank."""
    logits: Any = node.args[0]
    num_others = int(node.args[-1]) - 1  # type: ignore[arg-type]
    num_bytes = sympy.prod(costs.shape(logits)[:-1]) * (logits.meta["val"].element_size() + 8)
    return Cost(activation_bytes=costs.num_bytes(logits), sent_bytes=num_bytes * num_others)


def _add_integers(costs: NodeCosts, node: fx.Node) -> Cost:
    """Each row's largest number, and sums of four bytes each, go to every other rank."""
    x: Any = node.args[0]
    num_others = int(node.args[-1]) - 1  # type: ignore[arg-type]
    num_bytes = costs.num_elements(node) * 4 + costs.num_bytes(x) / x.meta["val"].shape[-1]
    return _rows_times_quantized(costs, node) + Cost(
        activation_bytes=num_bytes * num_others, sent_bytes=num_bytes * num_others
    )


def _attention(costs: NodeCosts, node: fx.Node) -> Cost:
    """Each token against its C keys (or its window's); a request's keys are read once for all its
    tokens of the call, each token's own key and value are written.  Values that are parts of keys
    (latents) are neither read nor written again.
    """
    args: Any = node.args
    query, key, value, key_cache = args[:4]
    slot, window = args[5], int(args[10])
    num_heads, head_dim = query.meta["val"].shape[1], query.meta["val"].shape[3]
    num_kv_heads, value_dim = key.meta["val"].shape[1], node.meta["val"].shape[3]
    keys = sympy.Min(C, window) if window else C
    cell_dim = head_dim + (0 if value is None else value_dim)
    cell_bytes = num_kv_heads * cell_dim * key_cache.meta["val"].element_size()
    batch, tokens = costs.shape(slot)[0], costs.num_elements(slot)
    requests = costs.requests if batch == 1 else batch  # prefill packs all into one row
    moved = sum((costs.num_bytes(x) for x in (query, key, value) if x is not None), _ZERO)
    return Cost(
        flops=2 * tokens * num_heads * keys * (head_dim + value_dim),
        cache_bytes=cell_bytes * (requests * keys + tokens),
        activation_bytes=moved + costs.num_bytes(node),
    )


def _masked_attention(costs: NodeCosts, node: fx.Node) -> Cost:
    """Each token against all positions that a request can have; the mask is read, too."""
    args: Any = node.args
    query, key, value, key_cache = args[:4]
    slot, mask = args[5], args[13]
    num_heads, head_dim = query.meta["val"].shape[1], query.meta["val"].shape[3]
    num_kv_heads, value_dim = key.meta["val"].shape[1], node.meta["val"].shape[3]
    length = costs.shape(mask)[-1]
    cell_dim = head_dim + (0 if value is None else value_dim)
    cell_bytes = num_kv_heads * cell_dim * key_cache.meta["val"].element_size()
    requests, tokens = costs.shape(slot)[0], costs.num_elements(slot)
    moved = sum((costs.num_bytes(x) for x in (query, key, value, mask) if x is not None), _ZERO)
    return Cost(
        flops=2 * tokens * num_heads * length * (head_dim + value_dim),
        cache_bytes=cell_bytes * (requests * length + tokens),
        activation_bytes=moved + costs.num_bytes(node),
    )


def _cached_keys(costs: NodeCosts, node: fx.Node) -> Cost:
    """What the tokens have is written; all that their requests have is read, and copied."""
    args: Any = node.args
    read, written = costs.num_bytes(node), costs.num_bytes(args[0])
    return Cost(cache_bytes=read + written, activation_bytes=read + written)


def _write_path(costs: NodeCosts, node: fx.Node) -> Cost:
    """Writes a tree's accepted rows: reads their keys and values; attention has counted the
    write.
    """
    args: Any = node.args
    moved = (costs.num_bytes(x) for x in args[:2] if x is not None)
    return Cost(activation_bytes=sum(moved, _ZERO))


def _penalties(costs: NodeCosts, node: fx.Node) -> Cost:
    """A copy of the logits."""
    source: Any = node.args[0]
    return Cost(activation_bytes=costs.num_bytes(source) + costs.num_bytes(node))


def _noise(costs: NodeCosts, node: fx.Node) -> Cost:
    return Cost(activation_bytes=costs.num_bytes(node))


def _distributions(costs: NodeCosts, node: fx.Node) -> Cost:
    """The logits of every row are read, and its distribution written."""
    logits: Any = node.args[0]
    return Cost(activation_bytes=costs.num_bytes(logits) + costs.num_bytes(node))


def _draws(costs: NodeCosts, node: fx.Node) -> Cost:
    """Weights or scores are read; what is taken of them is a number a row."""
    scores: Any = node.args[0]
    return Cost(activation_bytes=costs.num_bytes(scores))


def _nothing(costs: NodeCosts, node: fx.Node) -> Cost:
    return Cost()


def _recurrence(costs: NodeCosts, node: fx.Node) -> Cost:
    """A request's state is read and written once a call; each token decays it, changes it and reads
    it.  The inputs kept of drafts that may be rejected are written, and half of them read again.
    """
    args: Any = node.args
    query, key, value, _, beta, state, recent, row = args[:8]
    batch, tokens = costs.shape(row)[0], costs.num_elements(row)
    requests = costs.requests if batch == 1 else batch
    one_state = sympy.prod(costs.shape(state)[1:])
    drafts = K * batch if K in costs.shape(row)[-1].free_symbols else _ZERO
    kept_bytes = costs.shape(recent)[2] * recent.meta["val"].element_size()
    replayed = drafts / 2  # the mean of K drafts, all counts equally likely
    moved = sum((costs.num_bytes(x) for x in (query, key, value)), _ZERO)
    return Cost(
        flops=(tokens + replayed) * one_state * (5 if beta is None else 7),
        cache_bytes=2 * requests * one_state * state.meta["val"].element_size()
        + (drafts + replayed) * kept_bytes,
        activation_bytes=moved + costs.num_bytes(node),
    )


def _convolution(costs: NodeCosts, node: fx.Node) -> Cost:
    """Each token reads W inputs of its channel, W-1 of a request's first token from its ring."""
    args: Any = node.args
    x, weight, _, recent, row = args[:5]
    channels, width = costs.shape(weight)[-2:]
    batch, tokens = costs.shape(row)[0], costs.num_elements(row)
    requests = costs.requests if batch == 1 else batch
    cell_bytes = channels * recent.meta["val"].element_size()
    return Cost(
        flops=2 * tokens * channels * width,
        weight_bytes=costs.num_bytes(weight),
        cache_bytes=cell_bytes * (requests * (width - 1) + tokens),
        activation_bytes=costs.num_bytes(x) + costs.num_bytes(node),
    )


_LOOKUPS = (
    _aten.embedding.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.gather.default,
)
# Look-ups of token ids and writes of a piece of state: no more than element-wise work.
_SMALL = (
    torch.ops.compilespec.take_shard.default,
    torch.ops.compilespec.roll_window.default,
    torch.ops.compilespec.ngram_match.default,
    torch.ops.compilespec.suffix_match.default,
)
# They read, or send, logits only of requests that sample or ask for log-probabilities.
_NOT_FOR_GREEDY = (
    torch.ops.compilespec.sample.default,
    torch.ops.compilespec.sample_shard.default,
    torch.ops.compilespec.draw.default,
    torch.ops.compilespec.draw_shard.default,
    torch.ops.compilespec.note_logprobs.default,
    torch.ops.compilespec.note_logprobs_shard.default,
)
RULES: dict[Any, Callable[[NodeCosts, fx.Node], Cost]] = {
    **dict.fromkeys(
        (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _matmul
    ),
    **dict.fromkeys(_LOOKUPS, _lookup),
    _aten._grouped_mm.default: _rows_times_weight,
    torch.ops.compilespec.argmax_linear.default: _fused_head,
    torch.ops.compilespec.row_argmax.default: _draws,
    torch.ops.compilespec.row_topk.default: _draws,
    torch.ops.compilespec.head_linear.default: _rows_times_weight,
    torch.ops.compilespec.packed_linear.default: _rows_times_weight,
    torch.ops.compilespec.quantized_linear.default: _rows_times_quantized,
    torch.ops.compilespec.int4_linear.default: _rows_times_quantized,
    torch.ops.compilespec.dynamic_int8_linear.default: _rows_times_quantized,
    torch.ops.compilespec.packed_quantized_linear.default: _rows_times_quantized,
    torch.ops.compilespec.packed_dynamic_int8_linear.default: _rows_times_quantized,
    torch.ops.compilespec.grouped_linear.default: _rows_times_quantized,
    torch.ops.compilespec.packed_grouped_linear.default: _rows_times_quantized,
    torch.ops.compilespec.paged_attention.default: _attention,
    torch.ops.compilespec.masked_attention.default: _masked_attention,
    torch.ops.compilespec.cached_keys.default: _cached_keys,
    torch.ops.compilespec.write_cache.default: _write_path,
    torch.ops.compilespec.draft_noise.default: _noise,
    torch.ops.compilespec.filtered_probs.default: _distributions,
    torch.ops.compilespec.draw_weighted.default: _draws,
    torch.ops.compilespec.uniform_noise.default: _noise,
    torch.ops.compilespec.penalise_paths.default: _penalties,
    torch.ops.compilespec.cached_recurrence.default: _recurrence,
    torch.ops.compilespec.cached_conv.default: _convolution,
    torch.ops.compilespec.all_reduce.default: _gather,
    torch.ops.compilespec.all_gather.default: _gather,
    torch.ops.compilespec.argmax_shard.default: _choose,
    torch.ops.compilespec.dynamic_int8_shard.default: _add_integers,
    torch.ops.compilespec.embed_shard.default: _rows_read,
    torch.ops.compilespec.host_process.default: _penalties,
    **dict.fromkeys((*_SMALL, *_NOT_FOR_GREEDY), _nothing),
}

_GROUPED_FALLBACK = "transformers.grouped_mm_fallback.default"  # registered when it is first used


def _rule_of(node: fx.Node) -> Callable[[NodeCosts, fx.Node], Cost] | None:
    if node.op != "call_function":
        return None
    return _rows_times_weight if str(node.target) == _GROUPED_FALLBACK else RULES.get(node.target)


# Views, constants, small reductions and in-place writes of state: no more than element-wise work.
_FUSED_NAMES = """
    _log_softmax _softmax _to_copy _unsafe_view alias all amax amin any arange argmax argmin cat
    chunk clone constant_pad_nd copy_ cumprod cumsum detach empty empty_like expand fill_ flip
    floor_divide
    full full_like histc index_add index_put index_put_ lift_fresh_copy max mean min
    native_layer_norm new_full new_ones new_zeros one_hot ones ones_like permute repeat
    reshape roll scalar_tensor scatter scatter_ scatter_add select slice sort split
    split_with_sizes squeeze stack sum sym_numel sym_size t topk transpose unbind unsqueeze
    var_mean view zeros zeros_like
"""
_FUSED = frozenset(_FUSED_NAMES.split())


def _is_fused(node: fx.Node) -> bool:
    target: Any = node.target
    if _rule_of(node) is not None or getattr(target, "__module__", "") == "_operator":
        return True
    if target is operator.getitem or torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    name = str(target).split(".")[1] if str(target).startswith("aten.") else ""
    return name in _FUSED
