"""Other models of images and text than those of test_image_prompts.py: one prompt each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import NotSupported
from compilespec.tracing.images import media_rows
from compilespec.tracing.media import medium_of
from tests.support.images import IMAGE, TEXT_SIZES, TOWER_SIZES, VIDEO
from tests.support.models import enliven

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
ROPE = {
    **TEXT_SIZES, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2],
    },
}  # fmt: skip
MERGED = {"num_heads": 2, "patch_size": 4}
SMALL = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4,
}  # fmt: skip
DEEP = {
    **MERGED, "depth": 2, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 48,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PINPOINTS = [[12, 24], [24, 12], [24, 24]]
MARKS = {"vision_start_token_id": 92, "vision_end_token_id": 93}
GRIDS: dict[str, Any] = {"patches": 96, "image_grid_thw": [[1, 4, 6], [1, 2, 4]]}


def llama() -> Any:
    return transformers.LlamaConfig(**TEXT_SIZES, head_dim=12)


def siglip() -> Any:
    return transformers.SiglipVisionConfig(**TOWER_SIZES, vision_use_head=False)


# family -> its config, beside the placeholder's id, and the shapes of two images
FAMILIES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "Qwen2VL": lambda: (
        {"vision_config": {**MERGED, "depth": 1, "embed_dim": 24, "hidden_size": 48,
                           "mlp_ratio": 2},
         "text_config": ROPE, "video_token_id": VIDEO, **MARKS}, GRIDS),
    "Glm4v": lambda: (
        {"vision_config": {**MERGED, "depth": 1, "hidden_size": 24, "intermediate_size": 40,
                           "image_size": 16, "out_hidden_size": 48},
         "text_config": {**ROPE, "head_dim": 12}, "video_token_id": VIDEO,
         "image_start_token_id": 92, "image_end_token_id": 93}, GRIDS),
    "Mistral3": lambda: (
        {"vision_config": transformers.PixtralVisionConfig(**SMALL, image_size=16),
         "text_config": transformers.MistralConfig(**TEXT_SIZES, head_dim=12),
         "spatial_merge_size": 2, "vision_feature_layer": -1},
        {"pixels": (2, 3, 16, 16), "image_sizes": [[16, 16], [16, 16]]}),
    "InternVL": lambda: (
        {"vision_config": transformers.InternVLVisionConfig(
            **{**SMALL, "patch_size": [4, 4]}, image_size=[16, 16]),
         "text_config": transformers.Qwen2Config(**TEXT_SIZES), "image_seq_length": 4,
         "downsample_ratio": 0.5},
        {"pixels": (2, 3, 16, 16)}),
    "LlavaNext": lambda: (
        {"vision_config": transformers.CLIPVisionConfig(**TOWER_SIZES, projection_dim=24),
         "text_config": llama(), "image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1},
        {"pixels": (2, 3, 3, 12, 12), "image_sizes": [[12, 24], [12, 24]]}),
    "LlavaOnevision": lambda: (
        {"vision_config": siglip(), "text_config": transformers.Qwen2Config(**TEXT_SIZES),
         "image_grid_pinpoints": PINPOINTS, "video_token_id": VIDEO},
        {"pixels": (2, 3, 3, 12, 12), "image_sizes": [[12, 24], [12, 24]]}),
    "SmolVLM": lambda: (
        {"vision_config": transformers.SmolVLMVisionConfig(**SMALL, image_size=16),
         "text_config": llama(), "scale_factor": 2},
        {"pixels": (1, 2, 3, 16, 16)}),
    "Qwen3VL": lambda: (
        {"vision_config": DEEP, "text_config": {**ROPE, "head_dim": 12}, "video_token_id": VIDEO,
         **MARKS}, GRIDS),
    "Qwen3VLMoe": lambda: (
        {"vision_config": DEEP, "video_token_id": VIDEO, **MARKS,
         "text_config": {**ROPE, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 32, "decoder_sparse_step": 1}}, GRIDS),
    "CohereCompass": lambda: (
        {"vision_config": DEEP, "video_token_id": VIDEO, **MARKS,
         "text_config": {**TEXT_SIZES, "head_dim": 12, "rope_parameters": {
             "full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}}}, GRIDS),
    "Cosmos3Omni": lambda: (
        {"vision_config": DEEP, "text_config": {**ROPE, "head_dim": 12}, "video_token_id": VIDEO,
         **MARKS}, GRIDS),
    "PaliGemma": lambda: (
        {"vision_config": siglip(), "projection_dim": 48,
         "text_config": transformers.GemmaConfig(**TEXT_SIZES, head_dim=16)},
        {"pixels": (2, 3, 12, 12)}),
}  # fmt: skip


def made(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A random model, and the tensors of two images."""
    torch.manual_seed(0)
    parts, shapes = FAMILIES[family]()
    config = getattr(transformers, f"{family}Config")(**parts, image_token_id=IMAGE)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    if family == "Qwen3VLMoe":  # grouped products have no float64
        model.set_experts_implementation("batched_mm")
    images = {name: torch.tensor(rows) for name, rows in shapes.items() if name.startswith("image")}
    if "patches" in shapes:
        shape = (int(images["image_grid_thw"].prod(-1).sum()), shapes["patches"])
    else:
        shape = shapes["pixels"]
    images["pixel_values"] = torch.randn(shape, dtype=torch.float64)
    return enliven(model, family).to(torch.float64).eval(), images


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_models_own_generate(family):
    model, images = made(family)
    with torch.no_grad():
        rows = model.get_image_features(**images, return_dict=True).pooler_output
    counts = [one.numel() // one.shape[-1] for one in rows]
    if len(counts) == 1:  # both in one
        counts = [counts[0] // 2] * 2
    ids = [5, 6, *[IMAGE] * counts[0], 7, 8, *[IMAGE] * counts[1], 9]
    given = {"input_ids": torch.tensor([ids]), **images}
    types = {"mm_token_type_ids": (given["input_ids"] == IMAGE).int()}
    if family == "PaliGemma":  # its prompt is a prefix whose tokens see each other
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    with torch.no_grad():
        out = model.generate(
            **given, **(types if "image_grid_thw" in images else {}), max_new_tokens=8,
            attention_mask=torch.ones(1, len(ids)).long(), do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    sizes = {"max_batch_size": 2, "max_seq_len": 128, "max_prefill_tokens": 24}
    with compilespec.compile(model, backend="eager", **sizes) as engine:
        (output,) = engine.generate([given], PARAMS)
    assert (output.error, output.token_ids) == (None, out[0, len(ids) :].tolist())


def test_features_of_layers_that_no_pass_adds_are_refused():
    """Granite 4 Vision adds features in layers of its own choice, and has no rows besides."""
    tower = transformers.SiglipVisionConfig(
        **{**TOWER_SIZES, "num_hidden_layers": 2, "image_size": 24, "hidden_size": 64},
        vision_use_head=False,
    )
    config = transformers.Granite4VisionConfig(
        vision_config=tower, text_config=TEXT_SIZES, image_token_id=IMAGE, downsample_rate="1/2",
        image_grid_pinpoints=[[24, 48]], deepstack_layer_map=[[-1, 0]], spatial_target_layers=[],
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    images = {"pixel_values": torch.randn(1, 3, 3, 24, 24), "image_sizes": torch.tensor([[24, 48]])}
    with pytest.raises(NotSupported, match="adds features of images to several of its layers"):
        media_rows(model, medium_of(model), images)
