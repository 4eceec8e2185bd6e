"""The target's markers, over the dense history of each request in a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Attention, Case, Mixers
from compilespec.passes.references.dense_attention import dense_attention
from compilespec.passes.references.kept_masks import mask_parts
from compilespec.passes.references.placement import place_call
from compilespec.passes.references.trees import path_attention
from compilespec.passes.splice.expansion import Expansion
from compilespec.program import MASK_PLACE, marker_kind


def keeps_masks(graph: fx.Graph) -> bool:
    """True where masks have one dimension of keys in the cache: nothing runs without histories."""
    for node in graph.nodes:
        kind = marker_kind(node)
        if kind in ("cached", "all_positions") or (
            kind == "attention" and len(node.args) > MASK_PLACE
        ):
            return True
    return False


def history_mixers(ctx: PassContext, case: Case) -> Mixers:
    """Attention, and what masks are made of: no pass had a hand in them.

    Attention is over latents where the marker's keys are latents.
    """
    placed, table = place_call(ctx.config, case), case.inputs["block_table_RM"]
    caches = {name: case.inputs[name].clone() for name in ctx.buffers if ".target." in name}
    expanded = dict(caches)
    expand_latents(ctx, expanded)

    def attention_over(buffers: dict[str, Tensor]) -> Attention:
        if placed.paths:
            return path_attention(buffers, "target", ctx.config, case.inputs, placed)
        return dense_attention(buffers, "target", placed.tokens, table)

    over_latents, over_keys = attention_over(caches), attention_over(expanded)

    def attend(layer: int, args: tuple[Any, ...]) -> Tensor:
        key, cache = args[1], caches[f"cache.target.{layer}.key"]
        is_cached = cache.shape[2:] == (key.shape[1], key.shape[3])
        return (over_latents if is_cached else over_keys)(layer, args)

    return {"attention": attend, **mask_parts(caches, ctx.config, placed.tokens, table)}


def expand_latents(ctx: PassContext, caches: dict[str, Tensor]) -> None:
    """Replace the target's latents by keys and values, for a graph that knows no latents."""
    for place, expansion in ctx.latents.items():
        if isinstance(expansion, Expansion) and place.startswith("target."):
            latents, weight = caches[f"cache.{place}.key"], ctx.weights[expansion.weight]
            key, value = expansion.expand(latents.squeeze(2), weight)
            caches[f"cache.{place}.key"], caches[f"cache.{place}.value"] = key, value
