"""Turns attention over keys and values that a latent expands to into attention over the latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import compilespec.ops.head_linear  # noqa: F401  (registers the operator)
from compilespec.passes.graph.nodes import copy_origin, snapshot
from compilespec.passes.splice.add_adapters import may_be_adapted
from compilespec.passes.splice.builder import Splice, Writer, node_of
from compilespec.passes.splice.expansion import Expansion
from compilespec.passes.splice.latents import Latent, NoProof, WeightOf, find_latent
from compilespec.program import AdapterShape, Traced, markers
from compilespec.tracing.quantized_weights import is_quantized

Found = dict[str, Expansion | str]  # by owner and layer, "target.3": how it expands, or why not


def absorb_latents(step: Splice) -> int:
    """attention(q, [c W_k^T | r], c W_v^T) -> attention([q_c W_k | q_r], [c | r], c) W_v^T, for
    every layer of the target whose keys and values are proved to be that (`latents.py`).

    Then a token's cache entry is its latent c and its rope key r, once for all heads: values are
    the beginning of the keys.  Returns: layers rewritten.  Numerics: rounding (the same sums of
    products in another order).  Torch IR.
    """

    def weight_of(node: fx.Node) -> Tensor | None:
        role = str(node.meta.get("role"))
        is_whole = node.op == "placeholder" and not may_be_adapted(step.config.adapters, role)
        return step.ctx.weights.get(role) if is_whole else None

    shared = dict.fromkeys(step.ctx.drafter.kv_layers, "a drafter reads its keys and values")
    found = _absorb_all(step.gm, "target", weight_of, shared)
    step.ctx.latents.update(found)
    return sum(isinstance(entry, Expansion) for entry in found.values())


def absorb_calls(
    calls: Mapping[str, Traced], adapters: AdapterShape | None = None
) -> tuple[dict[str, Traced], Found]:
    """The captured calls of a drafter, over latents where that is proved; others as they are.

    Args: adapters: may change products of the target, which its own copy then keeps, too.
    """
    absorbed, all_found = dict(calls), {}
    for name, traced in calls.items():
        gm = fx.GraphModule(traced.graph_module, snapshot(traced.graph_module.graph))
        names = dict(zip(gm.graph.find_nodes(op="placeholder"), traced.inputs, strict=True))

        def weight_of(
            node: fx.Node, names: Mapping[fx.Node, Any] = names, traced: Traced = traced
        ) -> Tensor | None:
            name = names[node].name if node in names else ""
            weight = traced.weights.get(name)
            is_whole = not is_quantized(weight) and not may_be_adapted(adapters, name)
            return weight if is_whole else None

        found = _absorb_all(gm, f"drafter {name}", weight_of, {})
        all_found.update(found)
        if any(isinstance(entry, Expansion) for entry in found.values()):
            gm.recompile()
            absorbed[name] = dataclasses.replace(traced, graph_module=gm, expanded=traced)
    return absorbed, all_found


def describe_latents(found: Found) -> Iterator[str]:
    """What `Engine.plan()` says of each owner: the layers by what became of them."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, entry in found.items():
        owner, layer = place.rsplit(".", 1)
        if isinstance(entry, str):
            text = f"cached as keys and values, because {entry}"
        else:
            text = (
                f"cached as latents, {entry.num_cached} numbers a token instead of "
                f"{entry.num_expanded}"
            )
        groups.setdefault((owner, text), []).append(int(layer))
    for (owner, text), layers in groups.items():
        yield f"{owner}, {_enumerate(layers)}: {text}"


def _enumerate(layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first}"
    if last - first + 1 == len(layers):
        return f"layers {first} to {last}"
    return f"layers {', '.join(map(str, layers))}"


# --- one graph ---


def _absorb_all(
    gm: fx.GraphModule, owner: str, weight_of: WeightOf, kept: Mapping[int, str]
) -> Found:
    found: Found = {}
    for layer, marker in enumerate(markers(gm)):
        try:
            latent = find_latent(marker, weight_of)
        except NoProof as reason:
            found[f"{owner}.{layer}"] = str(reason)
            continue
        if latent is None:
            continue
        if layer in kept:
            found[f"{owner}.{layer}"] = kept[layer]
            continue
        _absorb(gm, marker, latent)
        found[f"{owner}.{layer}"] = latent.expansion
    return found


def _absorb(gm: fx.GraphModule, marker: fx.Node, latent: Latent) -> None:
    """Put attention over latents in the marker's place, and take out what expanded them."""
    code, graph, expansion = Writer(gm), gm.graph, latent.expansion
    known = set(graph.nodes)
    query, _, _, *options = code.values(marker.args)
    source, weight, *shared = code.values((latent.latent, latent.weight, *latent.shared))
    with code.before(marker):
        new_query, key, value = narrow(query, source, weight, *shared, expansion=expansion)
        inner = torch.ops.compilespec.attention.default(new_query, key, value, *options)
        output = widen(inner, weight, expansion=expansion)
    begin, end = expansion.value
    for made, shape in (
        (key, (None, 1, None, expansion.num_cached)),
        (value, (None, 1, None, expansion.rank)),
        (inner, (None, None, expansion.num_heads, expansion.rank)),
        (output, (None, None, expansion.num_heads, end - begin)),
    ):
        node_of(made).meta["example"] = (shape, latent.dtype)
    for node in graph.nodes:
        if node not in known:
            copy_origin(marker, node)
            node.meta["custom"] = {**node.meta["custom"], "pass": "absorb_latents"}
    marker.replace_all_uses_with(node_of(output))
    graph.erase_node(marker)
    expanded = set(latent.nodes)
    for node in [node for node in reversed(graph.nodes) if node in expanded]:
        if not node.users:
            graph.erase_node(node)


def narrow(
    query_BNTH: Tensor, latent: Tensor, weight: Tensor, *shared: Tensor, expansion: Expansion
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, N, T, H], keys [B, 1, T, H] and values [B, 1, T, rank], where H is the rank and
    what the heads share.
    """
    query_BTNH, end = query_BNTH.transpose(1, 2), 0
    parts: list[Tensor] = []
    for size, is_product in expansion.parts:
        begin, end = end, end + size
        part = query_BTNH[..., begin:end]
        if is_product:
            parts.insert(0, _head_linear(part, _heads(weight, expansion, expansion.key)))
        else:
            parts.append(part)
    query = torch.cat(parts, -1).transpose(1, 2)
    key = latent.reshape(query_BNTH.size(0), 1, query_BNTH.size(2), expansion.rank)
    key = torch.cat([key, *shared], -1)
    return query, key, key[..., : expansion.rank]


def widen(mixed_BTNR: Tensor, weight: Tensor, *, expansion: Expansion) -> Tensor:
    """Weighted latents of each head to its weighted values, [B, T, N, Hv]."""
    matrix = _heads(weight, expansion, expansion.value).transpose(1, 2)
    return _head_linear(mixed_BTNR, matrix)


def _heads(weight: Tensor, expansion: Expansion, columns: tuple[int, int]) -> Tensor:
    """Each head's rows of the product's weight, [N, columns, rank]."""
    rows = weight.view(expansion.num_heads, expansion.width, expansion.rank)
    return rows[:, slice(*columns)]


def _head_linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.compilespec.head_linear.default(x, weight)
    return product
