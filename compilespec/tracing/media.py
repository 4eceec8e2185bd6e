"""The media of prompts beside text: rows in the places of special tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Medium:
    """Images or sound, in transformers' words."""

    one: str  # the medium's name in messages
    key: str  # key of a prompt, and argument of the processor
    parts: tuple[str, ...]  # types of message parts
    inputs: tuple[str, ...]  # prefixes of the processor's tensors
    main: str  # the tensor that is required
    features: str  # the model's function that makes rows
    token: str  # the config's name for the id of a row's place

    def token_id(self, model: nn.Module) -> int | None:
        """The id in the place of a row; None where the model names none."""
        token = getattr(getattr(model, "config", None), self.token, None)
        return token if isinstance(token, int) else None


IMAGES = Medium(
    one="image", key="images", parts=("image", "image_url"), inputs=("pixel_", "image_"),
    main="pixel_values", features="get_image_features", token="image_token_id",
)  # fmt: skip
SOUND = Medium(
    one="sound", key="audio", parts=("audio",), inputs=("input_features",), main="input_features",
    features="get_audio_features", token="audio_token_id",
)  # fmt: skip
MEDIA = (IMAGES, SOUND)


def medium_of(model: nn.Module) -> Medium | None:
    """The medium whose rows a model's prompts may hold (LLaVA, Voxtral and most others): images,
    for a model of both; None for one that switches an adapter on for them.
    """
    if has_adapter_of_media(model):
        return None
    found = (medium for medium in MEDIA if hasattr(model, medium.features))
    return next((medium for medium in found if medium.token_id(model) is not None), None)


def has_adapter_of_media(model: nn.Module) -> bool:
    """True for a model that switches an adapter on for its media (Granite Speech)."""
    return bool(getattr(getattr(model, "config", None), "has_lora_adapter", False))
