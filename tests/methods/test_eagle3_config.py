"""Configs of every EAGLE-3 format, read into one `Eagle3Config`."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.methods.eagle3.aux_layers import resolve_aux_layers
from compilespec.methods.eagle3.config import normalise
from compilespec.methods.parts.layers import Rope

IDS = "eagle_aux_hidden_state_layer_ids"


def nested(*ids: int) -> dict:
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True}}


@pytest.mark.parametrize(
    ("raw", "num_layers", "aux_ids_are", "expected"),
    [
        ({}, 8, "auto", (2, 4, 5)),
        ({}, 7, "auto", (2, 3, 4)),
        ({}, 32, "auto", (2, 16, 29)),
        ({}, 61, "auto", (2, 30, 58)),
        ({IDS: []}, 32, "auto", (2, 16, 29)),
        ({IDS: [2, 16, 29]}, 32, "auto", (2, 16, 29)),  # top level: hs indices, always
        ({IDS: [1, 15, 28]}, 32, "auto", (1, 15, 28)),
        ({IDS: [29, 2, 16]}, 32, "auto", (2, 16, 29)),  # concatenated in ascending order
        ({IDS: [0, 16, 32]}, 32, "auto", (0, 16, 32)),
        ({IDS: [1, 15, 28]}, 32, "output", (2, 16, 29)),
        (nested(1, 29, 57), 61, "auto", (2, 30, 58)),  # nested: layers whose output is tapped
        (nested(1, 17, 32), 36, "auto", (2, 18, 33)),
        (nested(24, 30, 36), 36, "auto", (24, 30, 36)),  # 36 of 36 layers can only be an hs index
        (nested(2, 18, 33), 36, "auto", (2, 18, 33)),  # 2 first: hs indices
        (nested(2, 18, 33), 36, "output", (3, 19, 34)),
        (nested(1, 17, 32), 36, "hs", (1, 17, 32)),
        ({IDS: [2, 4, 5], **nested(1, 2, 3)}, 8, "auto", (2, 4, 5)),  # the top level wins
    ],
)
def test_aux_ids(raw, num_layers, aux_ids_are, expected):
    indices, source = resolve_aux_layers(raw, num_layers, 3, aux_ids_are=aux_ids_are)
    assert indices == expected
    assert source


def test_aux_layers_option_replaces_the_config():
    assert resolve_aux_layers(nested(1, 2, 3), 8, 2, aux_layers=[6, 4])[0] == (4, 6)


@pytest.mark.parametrize(
    ("raw", "num_layers", "options", "error", "says"),
    [
        ({}, 6, {}, DraftMismatch, "needs 7 target layers"),
        ({IDS: [2, 4, 9]}, 8, {}, DraftMismatch, r"hs\[0\] to hs\[8\]"),
        (nested(1, 3, 8), 8, {"aux_ids_are": "output"}, DraftMismatch, "lie outside"),
        ({IDS: [2, 4]}, 8, {}, CheckpointError, "fc takes 3"),
        ({IDS: [2, 2, 4]}, 8, {}, CheckpointError, "distinct"),
        ({IDS: "2,4,5"}, 8, {}, CheckpointError, "list of layer indices"),
        ({}, 8, {"aux_ids_are": "input"}, InvalidOption, "'hs' or 'output'"),
        ({}, 8, {"aux_layers": [1, 1, 2]}, InvalidOption, "distinct"),
        ({}, 8, {"aux_layers": [1, 2, 3], "aux_ids_are": "hs"}, InvalidOption, "not both"),
    ],
)
def test_impossible_aux_ids(raw, num_layers, options, error, says):
    with pytest.raises(error, match=says):
        resolve_aux_layers(raw, num_layers, 3, **options)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "draft_vocab_size": 48,
}
SHAPES = {
    "fc.weight": torch.Size([32, 96]),
    "layers.0.hidden_norm.weight": torch.Size([32]),
    "lm_head.weight": torch.Size([48, 32]),
    "d2t": torch.Size([48]),
}


def resolve(raw=None, shapes=None, **options):
    return normalise({**LLAMA, **(raw or {})}, {**SHAPES, **(shapes or {})}, 8, **options)


def test_flat_config_defaults():
    config = resolve()
    assert (config.layout, config.body, config.head_dim) == ("safeailab", "llama", 8)
    assert (config.num_draft_tokens, config.aux_layers) == (3, (2, 4, 5))
    assert dict(config.rope) == {"rope_type": "default", "rope_theta": 10000.0}
    assert not config.own_embedding
    assert "\n" not in config.describe()


@pytest.mark.parametrize(
    ("raw", "on"),
    [
        ({"norm_before_residual": True}, {"norm_before_residual"}),
        ({"norm_before_fc": True}, {"norm_before_fc"}),
        ({"eagle_config": {"norm_before_fc": True}}, {"norm_before_fc"}),
        ({"fc_norm": True}, {"fc_norm"}),
        ({"use_aux_norm": True}, {"fc_norm"}),
        ({"norm_output": True}, {"norm_output"}),
        ({"eagle_config": {"return_hidden_post_norm": True}}, {"norm_output"}),
        ({"attention_bias": True}, {"qkv_bias"}),
        ({"model_type": "qwen2"}, {"qkv_bias"}),
        ({"model_type": "qwen3", "head_dim": 16}, {"qk_norm"}),
        ({"mlp_bias": True}, {"mlp_bias"}),
    ],
)
def test_flags(raw, on):
    config = resolve(raw)
    names = (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "qkv_bias",
        "mlp_bias",
        "qk_norm",
    )
    assert {name for name in names if getattr(config, name)} == on


def test_option_replaces_norm_before_residual():
    assert resolve(norm_before_residual=True).norm_before_residual
    assert not resolve(
        {"norm_before_residual": True}, norm_before_residual=False
    ).norm_before_residual


def test_whole_vocabulary_without_keys():
    raw = {key: value for key, value in LLAMA.items() if key != "draft_vocab_size"}
    config = normalise(raw, {k: SHAPES[k] for k in ("fc.weight", "layers.0.hidden_norm.weight")}, 8)
    assert (config.draft_vocab_size, config.has_d2t, config.own_lm_head) == (96, False, False)


def test_wider_target_needs_its_own_embedding():
    config = resolve({"target_hidden_size": 48}, {"fc.weight": torch.Size([32, 144])})
    assert config.target_hidden_size == 48
    assert config.own_embedding
    with pytest.raises(CheckpointError, match="no multiple of target_hidden_size 40"):
        resolve({"target_hidden_size": 40})


@pytest.mark.parametrize(
    ("raw", "shapes", "says"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16}, {}, "MLA"),
        ({}, {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.Size([8, 64])}, "MLA"),
        ({"model_type": "minimax_m2"}, {}, "minimax_m2"),
        ({"model_type": None, "architectures": ["Eagle3Foo"]}, {}, "Eagle3Foo"),
        ({}, {"mask_hidden": torch.Size([1, 1, 96])}, "P-EAGLE"),
        ({}, {"eh_proj.weight": torch.Size([32, 64])}, "eh_proj"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
        ({"eagle_config": {"next_layer_regular": False}}, {}, "next_layer_regular"),
        ({}, {"layers.1.hidden_norm.weight": torch.Size([32])}, "layers.1.hidden_norm"),
        ({"speculators_model_type": "dflash"}, {}, "dflash"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "dynamic"),
        ({"model_type": "qwen3", "use_sliding_window": True}, {}, "use_sliding_window"),
    ],
)
def test_variants_that_are_not_built_are_named(raw, shapes, says):
    with pytest.raises(NotSupported, match=says):
        resolve(raw, shapes)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": "96"}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
    ],
)
def test_broken_configs(raw, says):
    with pytest.raises(CheckpointError, match=says):
        resolve(raw)


def test_eagle1_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match="not an EAGLE-3 checkpoint"):
        normalise(LLAMA, {"fc.weight": torch.Size([32, 64])}, 8)


ROPES = {
    "default": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
        },
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_rope_is_that_of_transformers(rope_type):
    config = resolve({**ROPES[rope_type], "head_dim": 16})
    assert dict(config.rope)["rope_type"] == rope_type
    fields = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures")}
    reference = LlamaRotaryEmbedding(
        CONFIG_MAPPING["llama"](**fields, **ROPES[rope_type], head_dim=16)
    )
    positions = torch.tensor([[0, 1, 7, 4095, 8191]])
    expected = reference(torch.zeros(1), positions)
    with torch.device("meta"):  # as the loader builds it
        rope = Rope(config)
    for cos_or_sin, wanted in zip(rope(positions, torch.float32), expected, strict=True):
        torch.testing.assert_close(cos_or_sin.squeeze(-2), wanted, rtol=0.0, atol=0.0)


def test_casting_leaves_the_frequencies_exact():
    rope = Rope(resolve())
    before = rope.inv_freq.clone()
    rope.to(torch.bfloat16)
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope.inv_freq, before)
