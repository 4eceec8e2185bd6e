"""What a prompt may hold beside text, as rows in the places of tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Medium:
    """Images or sound, in transformers' words."""

    one: str  # for messages
    key: str  # of a prompt beside its text, and an argument of the processor
    parts: tuple[str, ...]  # types of a message's parts
    inputs: tuple[str, ...]  # how the names of the processor's tensors begin
    main: str  # the tensor that there must be
    features: str  # the model's function that makes rows
    token: str  # the config's name of the id that stands for a row

    def token_id(self, model: nn.Module) -> int | None:
        """The id that stands where a row goes; None where the model says none."""
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
    """What a model's prompts may hold as rows in the place of a token of its own (LLaVA, Voxtral
    and most others); of a model that takes both, images; of one that switches an adapter on for
    them (Granite Speech), None.
    """
    if getattr(getattr(model, "config", None), "has_lora_adapter", False):
        return None
    found = (medium for medium in MEDIA if hasattr(model, medium.features))
    return next((medium for medium in found if medium.token_id(model) is not None), None)
