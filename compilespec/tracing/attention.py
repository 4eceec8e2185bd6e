"""Turns every attention layer of the target into a marker: one stateless operator."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec.errors import UnsupportedModel
from compilespec.program import module_path
from compilespec.tracing.masks import traced_mask, traced_masks
from compilespec.tracing.media import has_adapter_of_media, medium_of
from compilespec.tracing.naming import source_line
from compilespec.tracing.quiet import quiet_import
from compilespec.tracing.recurrence import marked_recurrence
from compilespec.tracing.selections import traced_selections

ATTENTION = "compilespec"  # compilespec's name in transformers' attention registry
# The name under which models that hand a selection of keys to other attention functions make a
# mask of it.
MASKED = "sdpa"
SELECTIONS = ("indices", "block_indices")  # keywords of such selections

# Keywords of attention calls that change nothing without packed sequences, or only choose further
# outputs of a call.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "use_cache",
        "logits_to_keep",
    }
)
_KNOWN_INPUTS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values")
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Follow transformers' attention contract: [B, N, T, H] in, ([B, T, N, H], None) out.

    Without a mask `is_causal` decides; if it is None, the module does, as in transformers' own sdpa
    function.  A call that is not causal becomes torch's plain sdpa,
    which `mark_plain_attention` then refuses.

    Raises: UnsupportedModel for a keyword that is not known here.
    """
    unknown = [name for name, value in others.items() if _asks(name, value)]
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation == MASKED and set(unknown) <= set(SELECTIONS):
        unknown = []  # the mask says the same
    if unknown:
        raise UnsupportedModel(
            f"attention is called with {', '.join(unknown)}=, which compilespec does not know: "
            "expected a mask, scale, window, soft cap or sinks alone"
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal and attention_mask is None:
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return mixed.transpose(1, 2), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = (float(scale), int(sliding_window or 0), float(softcap or 0.0), s_aux)
    masked = () if attention_mask is None else (0, attention_mask)
    return torch.ops.compilespec.attention(query, key, value, *options, *masked), None


def _asks(name: str, value: object) -> bool:
    """True where a keyword of an attention call has an effect."""
    return value is not None and value is not False and name not in _HARMLESS


def register_attention() -> None:
    """Register the marker, and masks that `read_masks` reads, under the name `ATTENTION`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _marker_attention)
    AttentionMaskInterface.register(ATTENTION, traced_mask)


@contextlib.contextmanager
def registered_as(name: str) -> Iterator[None]:
    """The same under another name too, for a while."""
    from transformers import AttentionInterface

    register_attention()
    marker = {name: _marker_attention}
    with mock.patch.dict(AttentionInterface._global_mapping, marker), traced_masks(name):
        yield


@contextlib.contextmanager
def marked_attention(model: nn.Module, name: str = ATTENTION) -> Iterator[bool]:
    """Route the attention and recurrence of a transformers model to the markers.

    Args:
        name: of the attention function that the model is told.
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
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        with registered_as(name), marked_recurrence(model), traced_selections(model):
            for config in configs.values():  # the marker serves models that have no sdpa, too
                config._attn_implementation = name
            yield True
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _refuse_other_inputs(model: Any) -> None:
    """Refuse models that read a second sequence beside the token ids, or cannot do without images
    or sound, or switch an adapter on for them.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; expected a causal language model (decoder only), such "
            "as AutoModelForCausalLM loads"
        )
    if medium_of(model) is not None:
        return
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters and model.main_input_name != "input_ids":
        raise UnsupportedModel(
            f"{name} reads {model.main_input_name} and no token ids: expected a causal language "
            "model, forward(input_ids)"
        )
    has_adapter = has_adapter_of_media(model)
    taken = [
        name
        for name, parameter in parameters.items()
        if (parameter.default is parameter.empty and name not in _KNOWN_INPUTS)
        or (name.startswith(_OTHER_INPUTS) and has_adapter)
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if taken:
        raise UnsupportedModel(
            f"{name} takes {taken[0]} beside token ids, which a prompt cannot hold; give its "
            "language model: lm = AutoModelForCausalLM.from_config(model.config.get_text_config());"
            " lm.model = model.get_decoder(); lm.lm_head = model.get_output_embeddings()"
        )


def mark_plain_attention(gm: fx.GraphModule, model: nn.Module) -> None:
    """Replace scaled_dot_product_attention by the marker, with its mask, which `read_masks` reads.

    Raises: UnsupportedModel for a call that is neither causal nor masked.
    """
    functional = torch.nn.functional.scaled_dot_product_attention
    for node in gm.graph.find_nodes(op="call_function", target=functional):
        bound = _bind_sdpa(*node.args, **node.kwargs)
        mask = bound["attn_mask"]
        if not bound["is_causal"] and mask is None:
            raise UnsupportedModel(
                f"{type(model).__name__}: expected causal attention, which is all that a KV cache "
                f"can serve, got is_causal=False without a mask in "
                f"{module_path(node) or 'the model'}; {source_line(node)}; use a "
                "model whose tokens do not see later ones"
            )
        head_dim = bound["query"].meta["example_value"].shape[-1]
        scale = float(bound["scale"]) if bound["scale"] is not None else float(head_dim) ** -0.5
        options = (scale, 0, 0.0, None, *(() if mask is None else (0, mask)))
        with gm.graph.inserting_before(node):
            marker = gm.graph.call_function(
                torch.ops.compilespec.attention,
                (bound["query"], bound["key"], bound["value"], *options),
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
