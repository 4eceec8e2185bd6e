"""Stage "trace": one whole FX graph of an unmodified forward.

Hugging Face models reach attention through transformers' attention interface; plain modules call
`scaled_dot_product_attention(is_causal=True)`.  Both become the stateless marker
`compilespec::attention`, with the model's scale, window, soft cap and sinks.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import NoPositionInput, TraceError, UnsupportedModel
from compilespec.program import LONG_ROPE, ROPE_OFFSETS, ROPE_ROWS, Traced, TracedInput, module_path
from compilespec.tracing.attention import (
    ATTENTION,
    MASKED,
    SELECTIONS,
    mark_plain_attention,
    marked_attention,
)
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.images import rope_module
from compilespec.tracing.long_rope import LongRows, rope_by_request, short_rope_limit
from compilespec.tracing.masks import read_masks
from compilespec.tracing.naming import source_line
from compilespec.tracing.structure import ancestors

_POSITION_NAMES = ("position_ids", "positions", "input_pos")


def trace_target(
    model: nn.Module,
    *,
    name: str = "target",
    offsets: bool = False,
    longest: int = 0,
    by_request: bool = False,
) -> Traced:
    """Capture a causal LM once, at [B, T] with symbolic sizes, which covers every phase's shapes.

    Args:
        offsets: true if rotary positions may differ from the tokens' own, for models of images.
        longest: tokens of the longest request, which chooses the rotary table of a model with a
            short and a long one.
        by_request: choose it for each request by its own length, if some are longer than the short
            table serves.
    Returns: a graph with arguments `input_ids` and `position_ids` (int32) and one output, the
    logits; with offsets, of a model whose tokens have three rotary positions, also with
    `rope_offsets` (int32, [3, B, T]), what those are more than the tokens' own; where requests
    choose their table, with `is_long` (bool, [B, T]).
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
    limit = short_rope_limit(model)
    rows = LongRows(is_long=limit is not None and longest > limit)
    if rows.is_long and by_request:
        own_length = torch.zeros(EXAMPLE_SHAPE, dtype=torch.bool, device=device)
        arguments[LONG_ROPE] = (own_length, (0, 1))

    def trace(attention: str) -> tuple[Traced, bool]:
        with marked_attention(model, attention) as is_transformers, rope_by_request(model, rows):
            call, takes_positions = _target_call(model, is_transformers, ROPE_OFFSETS in arguments)
            if LONG_ROPE in arguments:
                call = _with_lengths(call, rows)
            return trace_call(model, call, arguments, name=name), takes_positions

    try:
        traced, takes_positions = trace(ATTENTION)
    except TraceError as error:
        if not any(f"called with {name}=" in str(error) for name in SELECTIONS):
            raise
        traced, takes_positions = trace(MASKED)
    mark_plain_attention(traced.graph_module, model)
    read_masks(traced, model)
    if traced.num_attention_layers == 0:
        raise TraceError(
            f"{type(model).__name__} has no attention that can be cached: expected calls through "
            "transformers' attention interface or scaled_dot_product_attention(is_causal=True), "
            "found none"
        )
    if takes_positions:
        _refuse_own_count(traced, model)
    else:
        traced = _rewrite_arange(traced, model)
    return traced


# --- calling the model ---


def _target_call(
    model: nn.Module, is_transformers: bool, has_offsets: bool
) -> tuple[Callable[..., Tensor], bool]:
    """A function (input_ids, position_ids) -> logits over the unmodified model, and true if it
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
    parameters = inspect.signature(model.forward).parameters
    if is_transformers and "position_ids" in parameters:

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
    position_name = next((n for n in _POSITION_NAMES if n in parameters), None)
    options = {"use_cache": False, "return_dict": True} if is_transformers else {}

    def call_plain(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if position_name is None:
            return _logits_of(model(input_ids, **options))
        return _logits_of(model(input_ids, **{position_name: position_ids}, **options))

    return call_plain, position_name is not None


def _with_lengths(call: Callable[..., Tensor], rows: LongRows) -> Callable[..., Tensor]:
    """The call, which also gets the tokens of long requests."""

    def call_with_lengths(
        input_ids: Tensor, position_ids: Tensor, is_long: Tensor, rope_offsets: Tensor | None = None
    ) -> Tensor:
        rows.is_long = is_long
        offsets = {} if rope_offsets is None else {ROPE_OFFSETS: rope_offsets}
        logits = call(input_ids=input_ids, position_ids=position_ids, **offsets)
        rows.is_long = False
        return logits

    return call_with_lengths


def _logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


# --- tokens counted by the model itself ---


def _counts_of_tokens(gm: fx.GraphModule) -> list[fx.Node]:
    """The aranges over the token dimension from which the logits are computed."""
    ids = next(node for node in gm.graph.nodes if node.meta.get("role") == "input_ids")
    length, reached = str(ids.meta["example_value"].shape[1]), ancestors(gm.graph.output_node())
    return [
        node
        for node in gm.graph.find_nodes(op="call_function", target=torch.arange)
        if str(node.meta["example_value"].shape[0]) == length and node in reached
    ]


def _refuse_own_count(traced: Traced, model: nn.Module) -> None:
    """Refuse a model that takes positions and also counts its tokens: its count would start at 0 in
    every step.
    """
    for node in _counts_of_tokens(traced.graph_module):
        raise UnsupportedModel(
            f"{type(model).__name__}: {module_path(node) or 'the model'} counts the tokens of a "
            f"call by torch.arange, besides position_ids; {source_line(node)}: expected every "
            "position to come from position_ids; switch that off in the config, or use "
            "position_ids there"
        )


def _rewrite_arange(traced: Traced, model: nn.Module) -> Traced:
    """Replace aranges over the token dimension by the positions, if no module takes positions."""
    gm = traced.graph_module
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ids = next(node for node in placeholders if node.meta["role"] == "input_ids")
    over_tokens = _counts_of_tokens(gm)
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
        _drop_leading_ones(node, value)
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    gm.recompile()
    inputs = (*traced.inputs, TracedInput(name="position_ids", kind="argument"))
    return dataclasses.replace(traced, inputs=inputs)


def _drop_leading_ones(count: fx.Node, positions: fx.Node) -> None:
    """Keep [B, T] where [T] becomes [1, T], directly or behind a sum."""
    for user in list(count.users):
        shape = [str(size) for size in getattr(user.meta.get("example_value"), "shape", ())]
        if user.target in (operator.add, torch.add) and len(shape) == 1:
            _drop_leading_ones(user, user)
        is_view = user.target in ("unsqueeze", "view", "reshape", operator.getitem)
        if is_view and len(shape) == 2 and shape[0] == "1":
            user.replace_all_uses_with(positions)
            user.graph.erase_node(user)
