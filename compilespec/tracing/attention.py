"""Turns every attention layer of the target into a marker: one stateless operator."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec.errors import UnsupportedModel
from compilespec.program import module_path
from compilespec.tracing.media import medium_of
from compilespec.tracing.naming import source_line
from compilespec.tracing.quiet import quiet_import
from compilespec.tracing.recurrence import marked_recurrence

ATTENTION = "compilespec"  # compilespec's name in transformers' attention registry

_OTHER_INPUTS = ("pixel_", "image_", "video_", "input_features", "input_values", "audio_")


def _marker_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Follow transformers' attention contract: [B, N, T, H] in, ([B, T, N, H], weights) out.

    If `is_causal` is None, the module decides, as in transformers' own sdpa function.  Calls that
    are not causal, or pass a mask, are left for `mark_plain_attention` to refuse.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, enable_gqa=True
        )
        return mixed.transpose(1, 2), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = torch.ops.compilespec.attention(
        query, key, value, float(scale), int(sliding_window or 0), float(softcap or 0.0), s_aux
    )
    return output, None


def register_attention() -> None:
    """Register the marker with transformers under the name `ATTENTION`, without masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _marker_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@contextlib.contextmanager
def marked_attention(model: nn.Module) -> Iterator[bool]:
    """Route a transformers model's attention, and what it has of recurrence, to the markers.

    Yields whether it is such a model.
    """
    try:
        with quiet_import():
            from transformers import PreTrainedModel
    except ImportError:
        yield False
        return
    if not isinstance(model, PreTrainedModel):
        yield False
        return
    _refuse_other_inputs(model)
    register_attention()
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    model.set_attn_implementation(ATTENTION)
    try:
        with marked_recurrence(model):
            yield True
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _refuse_other_inputs(model: Any) -> None:
    """Refuse models that read a second sequence beside the token ids, or images or sound in another
    form than as rows among them.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; expected a causal language model (decoder only), such "
            "as AutoModelForCausalLM loads"
        )
    if medium_of(model) is not None:
        return
    taken = [p for p in inspect.signature(model.forward).parameters if p.startswith(_OTHER_INPUTS)]
    if taken:
        raise UnsupportedModel(
            f"{name} takes {taken[0]} beside token ids, which a prompt cannot hold; give its "
            "language model: lm = AutoModelForCausalLM.from_config(model.config.get_text_config());"
            " lm.model = model.get_decoder(); lm.lm_head = model.get_output_embeddings()"
        )


def mark_plain_attention(gm: fx.GraphModule, model: nn.Module) -> None:
    """scaled_dot_product_attention(is_causal=True) -> the marker.  Raises: UnsupportedModel."""
    functional = torch.nn.functional.scaled_dot_product_attention
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not functional:
            continue
        bound = _bind_sdpa(*node.args, **node.kwargs)
        if not bound["is_causal"] or bound["attn_mask"] is not None:
            mask = "none" if bound["attn_mask"] is None else "given"
            raise UnsupportedModel(
                f"{type(model).__name__}: expected causal attention without a mask, which is all "
                f"that a KV cache can serve, got is_causal={bound['is_causal']}, mask {mask}, in "
                f"{module_path(node) or 'the model'}; {source_line(node)}; use a "
                "model whose tokens do not see later ones"
            )
        head_dim = bound["query"].meta["example_value"].shape[-1]
        scale = float(bound["scale"]) if bound["scale"] is not None else float(head_dim) ** -0.5
        with gm.graph.inserting_before(node):
            marker = gm.graph.call_function(
                torch.ops.compilespec.attention,
                (bound["query"], bound["key"], bound["value"], scale, 0, 0.0, None),
            )
            output = gm.graph.call_method("transpose", (marker, 1, 2))
        for new in (marker, output):
            new.meta = dict(node.meta)
        marker.meta["example_value"] = node.meta["example_value"].transpose(1, 2)
        node.replace_all_uses_with(output)
        gm.graph.erase_node(node)
    gm.recompile()


def _bind_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    return dict(locals())
