"""LoRA adapters: read from peft's files, merged into the target's weights."""

from __future__ import annotations

import json

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, InvalidOption, NotSupported
from compilespec.tracing.adapter_files import read_adapter
from compilespec.tracing.adapters import merge_adapter
from compilespec.tracing.load import load_target
from tests.support.adapters import merged_by_hand, write_adapter
from tests.support.models import tiny_target

PROMPTS = ([3, 14, 15, 9, 26], [5, 35], [8, 9, 7, 9, 3, 2, 38, 46])
FUSED = ("query_key_value", "dense", "dense_h_to_4h", "c_attn", "c_proj")


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama", num_layers=2)


def tokens_of(model, **keywords):
    with compilespec.compile(model, backend="eager", max_seq_len=64, **keywords) as engine:
        outputs = engine.generate([*PROMPTS], SamplingParams(max_new_tokens=12, ignore_eos=True))
        return [output.token_ids for output in outputs], engine.plan()["why"]


@pytest.mark.parametrize(
    ("family", "names", "config"),
    [
        ("llama", ("q_proj", "v_proj"), {}),
        ("qwen3", ("q_proj", "down_proj", "lm_head"), {"use_rslora": True, "lora_alpha": 3}),
        ("gemma3", ("k_proj", "lm_head"), {}),  # whose head is the embedding
        ("gpt_neox", FUSED, {"rank_pattern": {"layers.1.attention.dense": 7}}),
        ("gpt2", FUSED, {"alpha_pattern": {"h.0.attn.c_attn": 5}}),  # weights are [in, out]
    ],
    ids=["llama", "qwen3", "gemma3", "gpt_neox", "gpt2"],
)
def test_a_merged_adapter_is_w_plus_b_a(tmp_path, family, names, config):
    model = tiny_target(family, num_layers=2)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    directory = write_adapter(tmp_path / "adapter", model, names, rank=3, seed=1, **config)
    merged = merge_adapter(load_target(model), directory).model
    ids = torch.tensor([PROMPTS[2]])
    if family == "gemma3":  # by hand the embedding would change with the head
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    want = merged_by_hand(model, directory)(ids).logits
    torch.testing.assert_close(merged(ids).logits, want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(ids).logits, want, atol=1e-3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name]), f"{name} of the given model changed"


def test_an_engine_serves_the_merged_model(model, tmp_path):
    directory = write_adapter(tmp_path / "adapter", model)
    got, why = tokens_of(model, adapters=directory, spec="ngram", num_draft_tokens=3)
    assert got == tokens_of(merged_by_hand(model, directory))[0]
    assert any("merged into 14 products" in line for line in why)


def test_sums_are_rounded_once(tmp_path):
    model = tiny_target("llama", torch.bfloat16, num_layers=1)
    directory = write_adapter(tmp_path / "adapter", model, ("q_proj",))
    merged = merge_adapter(load_target(model), str(directory)).model
    wide = merged_by_hand(model.float(), directory).model.layers[0].self_attn.q_proj.weight
    got = merged.model.layers[0].self_attn.q_proj.weight
    assert got.dtype == torch.bfloat16
    assert (got != wide.bfloat16()).float().mean() < 0.01  # where float32 lies between two


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's calls of transformers
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_peft_merges_to_the_same_weights(tmp_path, family):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-peft")
    model = tiny_target(family, num_layers=2)
    names = ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "up_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False,
        use_rslora=family == "qwen2", rank_pattern={names[0]: 5},
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    ours = tiny_target(family, num_layers=2)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path)
    merged = merge_adapter(load_target(ours), tmp_path).model.state_dict()
    for name, tensor in wrapped.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-9)


def test_the_older_names_of_tensors_are_read(model, tmp_path):
    new = read_adapter(write_adapter(tmp_path / "new", model, ("q_proj",)))
    tensors = {}
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn.q_proj"
        part = new.modules[path]
        tensors[f"{path}.lora_A.default.weight"] = part.down
        tensors[f"{path}.lora_B.default.weight"] = (part.up / 2).float()
    old = read_adapter(write_adapter(tmp_path / "old", model, (), tensors=tensors))
    assert old.modules.keys() == new.modules.keys()
    assert all(torch.equal(old.modules[path].up, new.modules[path].up) for path in new.modules)


# --- what is refused ---

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD = {
    "DoRA": ({"use_dora": True}, {}, NotSupported, "use_dora is set"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, NotSupported, "modules_to_save"),
    "another method": ({"peft_type": "IA3"}, {}, NotSupported, "peft_type is 'IA3'"),
    "another base": ({"init_lora_weights": "pissa"}, {}, NotSupported, "changed the base"),
    "no rank": ({"r": None}, {}, CheckpointError, "r must be a positive, finite number; got None"),
    "infinite": ({"lora_alpha": float("inf")}, {}, CheckpointError, "lora_alpha must be"),
    "alpha NaN": ({"lora_alpha": float("nan")}, {}, CheckpointError, "lora_alpha must be"),
    "module's alpha": ({"alpha_pattern": {"q_proj": "x"}}, {}, CheckpointError, "alpha_pattern"),
    "overflow": ({"lora_alpha": 1e308}, {A: 1e9 * torch.ones(4, 48)}, CheckpointError, "finite"),
    "other rank": ({"r": 5}, {}, CheckpointError, "says rank 5"),
    "half": ({}, {A: None}, CheckpointError, "A or B alone: model.layers.0.self_attn.q_proj"),
    "NaN": ({}, {A: torch.full((4, 48), torch.nan)}, CheckpointError, "holds NaN or infinity"),
    "shape": ({}, {A: torch.ones(4, 40)}, CheckpointError, r"it is \[48, 48\] in the model"),
    "embedding": (
        {}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 97)},
        CheckpointError, "no matrix A or B of a product",
    ),
    "other modules": (
        {}, {f"base_model.model.model.layers.7.x_proj.lora_{half}.weight": torch.ones(4, 4)
             for half in "AB"},
        CheckpointError, "x_proj, which the model has not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda name: name.replace(" ", "-"))
def test_what_is_no_adapter_of_this_model_is_refused_in_one_line(model, tmp_path, case):
    config, tensors, error, says = BAD[case]
    directory = write_adapter(tmp_path, model, ("q_proj",), tensors=tensors, **config)
    with pytest.raises(error, match=says) as caught:
        compilespec.trace(model, adapters=directory)
    assert "\n" not in str(caught.value)


def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path):
    """Merged, and beside the products; what other dtypes hold they take."""
    model = tiny_target("llama", torch.float16, num_layers=1)
    directory = write_adapter(tmp_path, model, ("q_proj",), lora_alpha=3e7)
    with pytest.raises(CheckpointError, match=r"q_proj with B A .* not finite in torch.float16"):
        compilespec.trace(model, adapters=directory)
    with pytest.raises(
        CheckpointError, match=r"B times its scale of .*q_proj .* at most 6.55e\+04"
    ):
        compilespec.trace(model, adapters={"wild": directory})
    compilespec.trace(model.float(), adapters={"wild": directory})


def test_missing_files_are_named(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a directory with adapter_config\.json"):
        compilespec.trace(model, adapters=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        compilespec.trace(model, adapters=tmp_path)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected one of adapter_model\.safetensors"):
        compilespec.trace(model, adapters=tmp_path)
    with pytest.raises(InvalidOption, match="adapters must be"):
        compilespec.trace(model, adapters=7)
