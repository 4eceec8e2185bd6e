"""What a model of images and text is asked for: placeholders, image features, positions, masks."""

from __future__ import annotations

from typing import Any

from torch import nn

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def takes_images(model: nn.Module) -> bool:
    """Whether images of a prompt become rows in the place of a token of its own (LLaVA and most
    others), by transformers' `get_image_features`.
    """
    return hasattr(model, "get_image_features") and image_token_id(model) is not None


def image_token_id(model: nn.Module) -> int | None:
    """The id that stands where an image's rows go."""
    config: Any = getattr(model, "config", None)
    token = getattr(config, "image_token_id", None)
    return token if isinstance(token, int) else None


def rope_module(model: nn.Module) -> Any:
    """The module that says which rotary positions the tokens of a prompt with images have, three
    each (Qwen2-VL and its kin: time, height and width); None where those are the tokens' own.
    """
    has_images = takes_images(model)
    return next((m for m in model.modules() if has_images and hasattr(m, "get_rope_index")), None)
