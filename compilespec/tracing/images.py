"""The questions to a model of images or sound: their rows, positions, masks."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from compilespec.errors import NotSupported, UnsupportedModel
from compilespec.tracing.media import Medium, medium_of

_PROBE = (0, 1, 1, 1, 0)  # types of tokens: text, an image, text
_WINDOWED = "sliding"  # in the name of a kind of layers
DEEPSTACK = "_deepstack_process"  # of a language model: adds features to the rows of images


def media_rows(model: nn.Module, medium: Medium, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The rows that the model's tower makes of images or sounds, [n, D] each; of several inputs at
    once the rows of all, if the tower does not separate them.  Features of layers lie behind them:
    [n, D + layers * D].

    Args:
        inputs: arguments of its function that makes features.
    Raises: NotSupported where it gives other features than rows among the embeddings; any error of
    the tower.
    """
    output = getattr(model, medium.features)(**inputs, return_dict=True)
    deep = getattr(output, "deepstack_features", None)
    count = num_deep_layers(model)
    if deep is not None and not count:
        raise NotSupported(
            f"{type(model).__name__} adds features of images to several of its layers: expected "
            f"rows among the embeddings, and features that {DEEPSTACK} adds; give text alone, or "
            "another model"
        )
    rows = _by_image(getattr(output, "pooler_output", output))
    if deep is None:
        return rows
    parts = [rows, *(_by_image(one) for one in deep[:count])]
    return [torch.cat(of_image, -1) for of_image in zip(*parts, strict=True)]


def _by_image(rows: Any) -> list[Tensor]:
    is_one = isinstance(rows, Tensor) and rows.dim() == 2
    return [one.reshape(-1, one.shape[-1]) for one in ([rows] if is_one else rows)]


def num_deep_layers(model: nn.Module) -> int:
    """The number of layers whose outputs get features of images besides (Qwen3-VL and its kin)."""
    decoder = _deep_decoder(model)
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    count = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return 0 if decoder is None else min(count, len(decoder.layers))


def _deep_decoder(model: nn.Module) -> Any:
    """The language model, if it adds features of images in `DEEPSTACK`; else None."""
    decoder = None if medium_of(model) is None else cast(Any, model).get_decoder()
    return decoder if hasattr(decoder, DEEPSTACK) else None


@contextlib.contextmanager
def marked_deep_rows(model: nn.Module) -> Iterator[None]:
    """Let the language model have a marker wherever it would add features of images."""
    count, decoder = num_deep_layers(model), _deep_decoder(model)
    if not count:
        yield
        return
    kind = type(decoder)
    with (
        mock.patch.object(kind, DEEPSTACK, _mark_deep_rows),
        mock.patch.object(kind, "forward", _with_features(kind.forward, count)),
    ):
        yield


def _with_features(forward: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A language model's `forward`, told that its first layers get features: their numbers."""

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {"visual_pos_masks": None, "deepstack_visual_embeds": list(range(count))}
        return forward(self, *args, **{**kwargs, **given})

    return told


def _mark_deep_rows(self: Any, hidden_states: Tensor, is_image: None, index: int) -> Tensor:
    marked: Tensor = torch.ops.compilespec.deep_rows(hidden_states, index)
    return marked


def image_shape(model: nn.Module) -> tuple[int, int, int] | None:
    """(channels, height, width) of an image where its tower takes one size (CLIP, SigLIP)."""
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    size = getattr(vision, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(getattr(vision, "num_channels", 3)), int(height), int(width)


def tower_paths(model: nn.Module) -> frozenset[str]:
    """The modules that make rows: all except the language model and its head."""
    if medium_of(model) is None:
        return frozenset()
    any_model = cast(Any, model)
    own = {id(module) for module in any_model.get_decoder().modules()}
    own.add(id(any_model.get_output_embeddings()))
    return frozenset(path for path, module in model.named_modules() if id(module) not in own)


def rope_module(model: nn.Module) -> Any:
    """The module that gives the rotary positions of a prompt with images, three a token (Qwen2-VL
    and its kin: time, height and width); None where those are the tokens' own.
    """
    has_rows = medium_of(model) is not None
    return next((m for m in model.modules() if has_rows and hasattr(m, "get_rope_index")), None)


def has_own_masks(model: nn.Module) -> bool:
    """True where attention over a prompt with images may be other than causal (Gemma 3).

    Raises: UnsupportedModel where it is so over token ids alone.
    """
    if not hasattr(model, "create_masks_for_generate"):
        return False
    if has_prefixes(model) and any(tokens_ahead(model, None, 5)):
        raise UnsupportedModel(
            f"{type(model).__name__}: tokens of text see later ones: expected causal attention, "
            "but for prompts with images; give a model whose text is causal"
        )
    return True


def has_prefixes(model: nn.Module) -> bool:
    """True where all tokens of a prompt with images see each other, if its types say so
    (PaliGemma).
    """
    return any(tokens_ahead(model, [0] * 5))


def sees_ahead_in_windows(model: nn.Module) -> bool:
    """True where tokens of an image see each other in layers with a window alone (Gemma 4)."""
    if not hasattr(model, "create_masks_for_generate"):
        return False
    masks = _masks(model, _PROBE, len(_PROBE))
    ahead = {_WINDOWED in kind: bool(mask.triu(1).any()) for kind, mask in masks.items()}
    return ahead.get(True, False) and not ahead.get(False, True)


def masks_agree(model: nn.Module) -> bool:
    """False where a model's forward makes other masks for images than its own
    `create_masks_for_generate` (Gemma 4 unified of transformers 5.23).
    """
    own = _masks(model, _PROBE, len(_PROBE))
    made = _masks_of_forward(model)
    return all(torch.equal(mask, made.get(kind, mask)) for kind, mask in own.items())


def _masks_of_forward(model: nn.Module) -> dict[str, Tensor]:
    """The masks that its forward gives to the language model, over the probe's tokens."""
    any_model, types = cast(Any, model), torch.tensor([_PROBE])

    def stop(*args: Any, attention_mask: Any = None, **others: Any) -> Any:
        raise _Given(attention_mask)

    parameters = inspect.signature(model.forward).parameters
    named = {n: types for n in ("token_type_ids", "mm_token_type_ids") if n in parameters}
    device = next(model.parameters()).device
    modules = cast(Any, model).modules()
    before = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    kinds = {key: config._attn_implementation for key, config in before.items()}
    try:
        for config in before.values():
            config._attn_implementation = "sdpa"
        with mock.patch.object(any_model.get_decoder(), "forward", stop), torch.no_grad():
            ids = torch.zeros_like(types)
            any_model(**{n: one.to(device) for n, one in {"input_ids": ids, **named}.items()})
    except _Given as given:
        return _by_kind(any_model.config.get_text_config(), given.args[0], len(_PROBE))
    finally:
        for key, config in before.items():
            config._attn_implementation = kinds[key]
    return {}


class _Given(Exception):
    """Ends a forward that has made its masks."""


def tokens_ahead(model: nn.Module, types: Sequence[int] | None, count: int = 0) -> list[int]:
    """The number of later tokens that each token of a prompt sees, by the model's own masks.

    Args:
        types: of its tokens, 0 for text (`token_type_ids`); None: none are told.
        count: of tokens without types.
    Raises: NotSupported where a token does not see all from its window's first one to its last.
    """
    config = cast(Any, model).config.get_text_config()
    masks = _masks(model, types, count if types is None else len(types))
    place = torch.arange(len(next(iter(masks.values()))))
    last = torch.stack([_last_seen(mask) for mask in masks.values()]).amax(0)
    is_causal = sees_ahead_in_windows(model)
    for kind, mask in masks.items():
        wanted = place <= last[:, None]
        if _WINDOWED in kind:
            wanted &= place > place[:, None] - (
                getattr(config, "sliding_window", None) or len(place)
            )
        elif is_causal:
            wanted = place <= place[:, None]
        if not torch.equal(mask, wanted):
            raise NotSupported(
                f"{type(model).__name__}: a prompt's attention mask is none that is served: "
                "expected each token to see all in its window up to the last of its image, or of "
                "the prompt; give text alone, or images that are shorter than the window"
            )
    return (last - place).tolist()


def _masks(model: nn.Module, types: Sequence[int] | None, count: int) -> dict[str, Tensor]:
    """The masks of a prompt by kind of layer, true where a token is seen."""
    any_model = cast(Any, model)
    config = copy.deepcopy(any_model.config)
    text = config.get_text_config()
    config._attn_implementation = text._attn_implementation = "sdpa"
    of_types = None if types is None else torch.tensor([types])
    made = any_model.create_masks_for_generate(
        config=config, inputs_embeds=torch.empty(1, count, 0), attention_mask=None,
        past_key_values=None, position_ids=None, token_type_ids=of_types,
        mm_token_type_ids=of_types, is_first_iteration=True,
    )  # fmt: skip
    return _by_kind(text, made, count)


def _by_kind(config: Any, made: Any, count: int) -> dict[str, Tensor]:
    window = getattr(config, "sliding_window", None)
    masks = made if isinstance(made, Mapping) else {_WINDOWED if window else "full": made}
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    return {
        kind: mask[0, 0].cpu() if mask is not None
        else causal.triu(1 - window) if _WINDOWED in kind and window
        else causal
        for kind, mask in masks.items()
    }  # fmt: skip


def _last_seen(mask_TT: Tensor) -> Tensor:
    return mask_TT.shape[1] - 1 - mask_TT.flip(1).int().argmax(1)
