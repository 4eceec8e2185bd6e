"""Stage "trace": one whole FX graph of an unmodified forward.

Hugging Face models reach attention through transformers' attention interface; plain modules call
`scaled_dot_product_attention(is_causal=True)`.  Both become the stateless marker
`compilespec::attention`, with the model's scale, window, soft cap and sinks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import TraceError, UnsupportedModel
from compilespec.program import LONG_ROPE, ROPE_OFFSETS, ROPE_ROWS, Traced, module_path
from compilespec.tracing.attention import (
    ATTENTION,
    MASKED,
    SELECTIONS,
    mark_plain_attention,
    marked_attention,
)
from compilespec.tracing.branches import check_branches
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.eager_attention import mark_eager_attention
from compilespec.tracing.images import marked_deep_rows, rope_module
from compilespec.tracing.long_rope import LongRows, rope_by_request, short_rope_limit
from compilespec.tracing.masks import EAGER, read_masks
from compilespec.tracing.naming import source_line
from compilespec.tracing.positions import (
    count_by_position,
    first_position,
    settle_counts,
    take_positions,
)
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
        offsets: true if prompts may hold images, with their own rotary positions and features.
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

    def trace(attention: str) -> tuple[Traced, bool, bool]:
        with _marked(model, attention, rows, offsets) as is_transformers:
            call, takes_positions = _target_call(model, is_transformers, ROPE_OFFSETS in arguments)
            if LONG_ROPE in arguments:
                call = _with_lengths(call, rows)
            traced = trace_call(model, call, arguments, name=name)
            _keep_logits(traced.graph_module, model)
            return traced, takes_positions, is_transformers

    try:
        traced, takes_positions, is_transformers = trace(ATTENTION)
    except TraceError as error:
        if not any(f"called with {name}=" in str(error) for name in SELECTIONS):
            raise
        traced, takes_positions, is_transformers = trace(MASKED)
    mark_plain_attention(traced.graph_module, model)
    reasons: list[str] = []
    if traced.num_attention_layers + traced.num_recurrent_markers == 0:
        if is_transformers:  # it is given masks to add to its scores
            traced, takes_positions, _ = trace(EAGER)
        reasons = mark_eager_attention(traced)
    plain_call, _ = _target_call(model, is_transformers, has_offsets=False)
    check_branches(traced, model, plain_call, longest)
    if not takes_positions:
        traced = take_positions(traced)
    read_masks(traced, model)
    if traced.num_attention_layers + traced.num_recurrent_markers == 0:
        raise _without_attention(model, reasons)
    return settle_counts(traced, model) if takes_positions else count_by_position(traced, model)


def _without_attention(model: nn.Module, reasons: Sequence[str]) -> TraceError:
    if reasons:
        return TraceError(
            f"{type(model).__name__} has no attention that can be cached: expected "
            f"softmax(query @ key.T * number + mask) @ value, got another softmax in {reasons[0]}; "
            "write it so, or call scaled_dot_product_attention"
        )
    return TraceError(
        f"{type(model).__name__} has no attention that can be cached: expected calls through "
        "transformers' attention interface or scaled_dot_product_attention(is_causal=True), "
        "found none"
    )


@contextlib.contextmanager
def _marked(model: nn.Module, attention: str, rows: LongRows, has_images: bool) -> Iterator[bool]:
    """The model as it is traced; yields whether it is one of transformers."""
    with (
        marked_attention(model, attention) as is_transformers,
        rope_by_request(model, rows),
        marked_deep_rows(model) if has_images else contextlib.nullcontext(),
    ):
        yield is_transformers


def _keep_logits(gm: fx.GraphModule, model: nn.Module) -> None:
    """Drop further outputs, which are attributes that the forward sets anew (CTRL moves a table).

    Raises: UnsupportedModel where one of them follows from the tokens.
    """
    output: Any = gm.graph.output_node()
    logits, *others = output.args[0]
    for other in others:
        if any(node.meta.get("role") == "input_ids" for node in ancestors(other)):
            raise UnsupportedModel(
                f"{type(model).__name__}: {module_path(other) or 'the model'} keeps a value that "
                f"follows from the tokens; {source_line(other)}: expected a forward without a "
                "memory; keep nothing in attributes"
            )
    output.args = ((logits,),)


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
        first = first_position(model)

        def call_transformers(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return _logits_of(
                model(
                    input_ids=input_ids,
                    position_ids=position_ids + first if first else position_ids,
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
