"""Tiny random image-text-to-text models, and prompts with images for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.models import COMMON, enliven

IMAGE, VIDEO = 90, 91  # the placeholders' ids
TEXT_SIZES = {**COMMON, "num_hidden_layers": 2}
TOWER_SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 12, "patch_size": 4,
}  # fmt: skip


def _llava() -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER_SIZES, projection_dim=24),
        text_config=transformers.LlamaConfig(**TEXT_SIZES, head_dim=12),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )


def _qwen2_5_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1],
        },
        text_config={
            **TEXT_SIZES, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2],
            },
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=92,
        vision_end_token_id=93,
    )  # fmt: skip


def _qwen3_vl() -> Any:
    """Features of both layers of the tower are added behind the two of the language model."""
    return transformers.Qwen3VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 48, "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        text_config={
            **TEXT_SIZES, "head_dim": 12, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2],
            },
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=92,
        vision_end_token_id=93,
    )  # fmt: skip


def _gemma3() -> Any:
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**TOWER_SIZES, vision_use_head=False),
        text_config=transformers.Gemma3TextConfig(
            **TEXT_SIZES,
            tie_word_embeddings=False,
            head_dim=16,
            sliding_window=14,
            layer_types=["sliding_attention", "full_attention"],
        ),
        tie_word_embeddings=False,
        mm_tokens_per_image=9,
        image_token_id=IMAGE,
        boi_token_id=92,
        eoi_token_id=93,
    )


def _paligemma() -> Any:
    """PaliGemma 2: all tokens of a prompt see each other."""
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER_SIZES, vision_use_head=False),
        text_config=transformers.Gemma2Config(
            **TEXT_SIZES, head_dim=16, sliding_window=30, query_pre_attn_scalar=12,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"],
        ),
        projection_dim=48, image_token_id=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip


GEMMA4 = {
    **TEXT_SIZES, "head_dim": 16, "sliding_window": 14, "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": False, "use_bidirectional_attention": "vision",
    "num_kv_shared_layers": 0,
}  # fmt: skip


def _gemma4_unified() -> Any:
    return transformers.Gemma4UnifiedConfig(
        vision_config={
            "patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 48, "mm_posemb_size": 16,
            "output_proj_dims": 48,
        },
        text_config=GEMMA4, audio_config=None, image_token_id=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip


def _gemma4() -> Any:
    """Tokens of an image see each other in layers with a window alone."""
    return transformers.Gemma4Config(
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 16,
        },
        text_config={**GEMMA4, "hidden_size_per_layer_input": 0},
        audio_config=None, image_token_id=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip


FAMILIES = {
    "llava": _llava, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "gemma3": _gemma3,
    "gemma4": _gemma4, "gemma4_unified": _gemma4_unified, "paligemma": _paligemma,
}  # fmt: skip
WITH_PLACES = ("gemma4", "gemma4_unified")
WITH_GRIDS = ("qwen2_5_vl", "qwen3_vl")


def tiny_images_target(family: str, seed: int = 0) -> nn.Module:
    """A random model in float64 whose tokens depend on the images."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(
        FAMILIES[family](), attn_implementation="eager"
    )
    return enliven(model, family).to(torch.float64).eval()


def pixels(family: str, num_images: int, seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of images: the arguments of the model's `get_image_features`."""
    generator = torch.Generator().manual_seed(seed)
    if family in WITH_GRIDS:
        grids = [[1, 4, 6], [1, 2, 4], [1, 8, 4]]
        grid = torch.tensor([grids[(seed + place) % 3] for place in range(num_images)])
        shape: tuple[int, ...] = (int(grid.prod(-1).sum()), 3 * 2 * 4 * 4)
        return {
            "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64),
            "image_grid_thw": grid,
        }
    if family in WITH_PLACES:  # Gemma 4 makes 3 x 3 rows of 6 x 6 patches
        side = 6 if family == "gemma4" else 3
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
        shape = (num_images, side * side, 3 * 4 * 4)
        return {
            "pixel_values": torch.rand(shape, generator=generator, dtype=torch.float64),
            "image_position_ids": places.expand(num_images, -1, -1).clone(),
        }
    shape = (num_images, 3, 12, 12)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def num_places(family: str, images: dict[str, Tensor]) -> list[int]:
    """Placeholders of each image."""
    if family in WITH_GRIDS:
        return [int(count) // 4 for count in images["image_grid_thw"].prod(-1)]
    return [9] * len(images["pixel_values"])


def prompt(
    family: str, *parts: list[int] | None, seed: int = 0, **changes: Any
) -> dict[str, Tensor]:
    """A processor's output: text as ids, an image for each None."""
    images = pixels(family, sum(part is None for part in parts), seed)
    counts = iter(num_places(family, images))
    ids: list[int] = []
    for part in parts:
        ids += [IMAGE] * next(counts) if part is None else part
    types = [[int(token == IMAGE) for token in ids]]
    made = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if family in (*WITH_GRIDS, *WITH_PLACES):
        made["mm_token_type_ids"] = torch.tensor(types)
    if family == "gemma3":
        made["token_type_ids"] = torch.tensor(types)
    if family == "paligemma":
        made["token_type_ids"] = torch.zeros(1, len(ids)).long()
    return {**made, **images, **changes}
