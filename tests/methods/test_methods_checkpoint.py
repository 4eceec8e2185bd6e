"""Reading checkpoints: every file kind, and an error for everything that is wrong with one."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compilespec.errors import CheckpointError
from compilespec.methods.checkpoint import load_strict, read_config, read_tensors

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.ones(4),
    "d2t": torch.arange(3),
}


def write_safetensors(directory):
    save_file(TENSORS, directory / "model.safetensors")


def write_bin(directory):
    torch.save(TENSORS, directory / "pytorch_model.bin")


def write_shards(directory, save, pattern, index):
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = pattern.format(number)
        save({name: tensor}, directory / weight_map[name])
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_safetensors_shards(directory):
    write_shards(directory, save_file, "model-{}.safetensors", "model.safetensors.index.json")


def write_bin_shards(directory):
    write_shards(directory, torch.save, "pytorch_model-{}.bin", "pytorch_model.bin.index.json")


@pytest.mark.parametrize(
    "write", [write_safetensors, write_bin, write_safetensors_shards, write_bin_shards]
)
def test_every_file_kind(tmp_path, write):
    write(tmp_path)
    read = read_tensors(tmp_path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype


def test_a_tensor_is_that_of_the_shard_which_the_index_names(tmp_path):
    save_file({"fc": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"fc": -torch.ones(2), "x": torch.ones(1)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"fc": "a.safetensors", "x": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_tensors(tmp_path)["fc"].tolist() == [1, 1]


def test_training_only_tensors_are_left_out(tmp_path):
    extra = {
        "verifier_lm_head.weight": torch.ones(2),
        "verifier_norm.weight": torch.ones(2),
        "rotary_emb.inv_freq": torch.ones(2),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file({**TENSORS, **extra}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == TENSORS.keys()


def break_nothing_there(directory):
    pass


def break_missing_shard(directory):
    write_safetensors_shards(directory)
    (directory / "model-1.safetensors").unlink()


def break_truncated(directory):
    write_safetensors(directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def break_shard_outside(directory):
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def break_shard_lacks_tensor(directory):
    write_safetensors_shards(directory)
    save_file({"other": torch.ones(1)}, directory / "model-0.safetensors")


def break_index(directory):
    (directory / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def break_pickle_with_code(directory):
    torch.save({"a": Fraction(1, 2)}, directory / "pytorch_model.bin")


def break_pickle_without_tensors(directory):
    torch.save({"a": 1}, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (break_nothing_there, "no weights; expected one of model.safetensors"),
        (break_missing_shard, "model-1.safetensors is missing"),
        (break_truncated, "not readable"),
        (break_shard_outside, "outside the checkpoint directory"),
        (break_shard_lacks_tensor, "the shards lack a.weight"),
        (break_index, "weight_map"),
        (break_pickle_with_code, "not readable"),
        (break_pickle_without_tensors, "mapping of names to tensors"),
    ],
)
def test_broken_weights(tmp_path, damage, says):
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no config.json"), ("{", "not readable as JSON"), ("[]", "got list")],
)
def test_broken_config(tmp_path, content, says):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        read_config(tmp_path)


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match="expected a directory"):
        read_config(tmp_path / "nowhere")


def test_strict_loading_lists_everything_at_once():
    module = nn.Linear(3, 2)
    with pytest.raises(CheckpointError) as caught:
        load_strict(module, {"weight": torch.ones(2, 4), "scale": torch.ones(1)}, source="here")
    message = str(caught.value)
    assert message.startswith("here: missing: bias; unexpected: scale; wrong shape: weight ")
    assert "(expected [2, 3], got [2, 4])" in message
    assert "\n" not in message


def test_long_lists_are_cut():
    tensors = {f"extra{i}": torch.ones(1) for i in range(30)}
    with pytest.raises(CheckpointError, match="and 22 more"):
        load_strict(nn.Identity(), tensors, source="here")


def test_strict_loading_fills_meta_modules_with_the_tensors_themselves():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    weight = torch.ones(2, 3)
    load_strict(module, {"weight": weight, "bias": torch.zeros(2)}, source="here")
    assert module.weight.data_ptr() == weight.data_ptr()
