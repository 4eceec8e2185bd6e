"""Targets in shards: each tensor is that of the shard that the index names, or all is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compilespec.errors import CheckpointError
from compilespec.tracing.load import load_target


def whole(directory: Path) -> Path:
    """A checkpoint in one file."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def in_shards(directory: Path, moved: dict[str, Tensor | None], stale: str = "") -> Path:
    """The checkpoint in two shards, the first with all tensors but one.

    Args: moved: what the second holds; None: the tensor of this name. stale: named in the index.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    second = {name: tensors[name] if one is None else one for name, one in moved.items()}
    second["model.norm.weight"] = tensors.pop("model.norm.weight")
    for name, content in {"a.safetensors": tensors, "b.safetensors": second}.items():
        save_file(content, directory / name, metadata={"format": "pt"})
    where = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    where |= {stale: "b.safetensors"} if stale else {}
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()
    return directory


UP = "model.layers.0.mlp.up_proj.weight"
SHARDS: dict[str, tuple[dict[str, Tensor | None], str, str]] = {
    "stale": ({UP: torch.zeros(48, 32)}, "", f"b.safetensors holds {UP}, .* is in a.safetensors"),
    "other dtype": ({UP: torch.zeros(48, 32).half()}, "", "is in a.safetensors.* again"),
    "not named": ({"x.weight": torch.ones(1)}, "", r"b\.safetensors holds x\.weight, .* no shard"),
    "lost": ({}, UP, f"the shards lack {UP} .b.safetensors"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_hold_other_tensors_than_the_index_says(tmp_path: Path, name: str) -> None:
    moved, stale, message = SHARDS[name]
    directory = in_shards(whole(tmp_path), moved, stale)
    with pytest.raises(CheckpointError, match=message):
        load_target(directory)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    directory = in_shards(whole(tmp_path), {})
    (directory / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the shard b\.safetensors is missing"):
        load_target(directory)


def test_shards_with_equal_copies(tmp_path: Path) -> None:
    """Also beside buffers that nothing reads."""
    beside = {UP: None, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    directory = in_shards(whole(tmp_path), beside)
    assert load_target(directory).model.state_dict()[UP].abs().sum() > 0
