"""Stage "trace": one whole FX graph of an unmodified forward.

Hugging Face models reach attention through transformers' attention interface; plain modules call
`scaled_dot_product_attention(is_causal=True)`.  Both become the stateless marker
`compilespec::attention`, with the model's scale, window, soft cap and sinks.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import NoPositionInput, TraceError
from compilespec.program import ROPE_OFFSETS, ROPE_ROWS, Traced, TracedInput
from compilespec.tracing.attention import mark_plain_attention, marked_attention
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.images import rope_module

_POSITION_NAMES = ("position_ids", "positions", "input_pos")


def trace_target(model: nn.Module, *, name: str = "target", offsets: bool = False) -> Traced:
    """Capture a causal LM once, at [B, T] with symbolic sizes, which covers every phase's shapes.

    Args:
        offsets: whether rotary positions may differ from the tokens' own, where images are taken.
    Returns: a graph with arguments `input_ids` and `position_ids` (int32) and one output, the
    logits; with offsets, of a model whose tokens have three rotary positions, also with
    `rope_offsets` (int32, [3, B, T]), what those are more than the tokens' own.
    Raises: TraceError (graph break; names module, line and cause), NoPositionInput,
    UnsupportedModel (not causal, an encoder-decoder, images beside text), UnsupportedState.
    """
    device = next(model.parameters()).device
    arguments: dict[str, tuple[Tensor, tuple[int, ...]]]
    ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=device)
    positions = (
        torch.arange(EXAMPLE_SHAPE[1], dtype=torch.int32, device=device)
        .expand(EXAMPLE_SHAPE)
        .contiguous()
    )
    arguments = {"input_ids": (ids, (0, 1)), "position_ids": (positions, (0, 1))}
    if offsets and rope_module(model) is not None:
        zeros = torch.zeros((ROPE_ROWS, *EXAMPLE_SHAPE), dtype=torch.int32, device=device)
        arguments[ROPE_OFFSETS] = (zeros, (1, 2))
    with marked_attention(model) as is_transformers:
        call, takes_positions = _target_call(model, is_transformers, ROPE_OFFSETS in arguments)
        traced = trace_call(model, call, arguments, name=name)
    mark_plain_attention(traced.graph_module, model)
    if not takes_positions:
        traced = _rewrite_arange(traced, model)
    if traced.num_attention_layers == 0:
        raise TraceError(
            f"{type(model).__name__} has no attention that can be cached: expected calls through "
            "transformers' attention interface or scaled_dot_product_attention(is_causal=True), "
            "found none"
        )
    return traced


# --- transformers' attention interface ---


# --- calling the model ---


def _target_call(
    model: nn.Module, is_transformers: bool, has_offsets: bool
) -> tuple[Callable[..., Tensor], bool]:
    """A function (input_ids, position_ids) -> logits over the unmodified model, and whether it
    passes the positions.
    """
    if has_offsets:

        def call_with_offsets(
            input_ids: Tensor, position_ids: Tensor, rope_offsets: Tensor
        ) -> Tensor:
            positions = position_ids.unsqueeze(0) + rope_offsets
            return _logits_of(
                model(
                    input_ids=input_ids, position_ids=positions, use_cache=False, return_dict=True
                )
            )

        return call_with_offsets, True
    if is_transformers:

        def call_transformers(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return _logits_of(
                model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    use_cache=False,
                    return_dict=True,
                )
            )

        return call_transformers, True
    parameters = list(inspect.signature(model.forward).parameters)
    position_name = next((n for n in _POSITION_NAMES if n in parameters), None)

    def call_plain(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if position_name is None:
            return _logits_of(model(input_ids))
        return _logits_of(model(input_ids, **{position_name: position_ids}))

    return call_plain, position_name is not None


def _logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


# --- plain modules ---


def _rewrite_arange(traced: Traced, model: nn.Module) -> Traced:
    """Replace aranges over the token dimension: they are the positions if a module takes none."""
    gm = traced.graph_module
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ids = next(node for node in placeholders if node.meta["role"] == "input_ids")
    aranges = [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and node.target is torch.arange
    ]
    over_tokens = [
        node
        for node in aranges
        if node.meta["example_value"].shape[0] == ids.meta["example_value"].shape[1]
    ]
    if not over_tokens:
        raise NoPositionInput(
            f"{type(model).__name__}.forward takes no position_ids and computes no torch.arange "
            "over its tokens, so its positions cannot be set; add a position_ids argument"
        )
    with gm.graph.inserting_after(placeholders[-1]):
        positions = gm.graph.placeholder("position_ids")
    positions.meta = {
        "role": "position_ids",
        "example_value": ids.meta["example_value"],
        "custom": {"pass": "trace"},
    }
    for node in over_tokens:
        # [B, T] replaces [T]; broadcasting over a leading batch dimension works as before.
        with gm.graph.inserting_before(node):
            value = gm.graph.call_method("to", (positions, node.meta["example_value"].dtype))
        value.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    gm.recompile()
    inputs = (*traced.inputs, TracedInput(name="position_ids", kind="argument"))
    return dataclasses.replace(traced, inputs=inputs)


# --- naming ---


# --- errors ---
