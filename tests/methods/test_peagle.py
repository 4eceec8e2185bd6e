"""P-EAGLE: drafts of one pass, against speculators and against the module run from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, NotSupported
from compilespec.inspect.bounds import prove
from compilespec.methods.peagle import METHOD, PEagleDrafter, random_head
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo
from tests.support.models import Ask, ask_all, check_preempted, tiny_target
from tests.support.models import target_info as info_of
from tests.support.seen_drafts import drafts_by_tokens

ORACLE = Path(__file__).parents[1] / "data" / "oracles" / "b_peagle"
SIZES = ((5, 18), (23, 25), (2, 30), (33, 9), (17, 22))
MAX_SEQ_LEN = 64
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip


def target_info(vocab_size: int = 96) -> TargetInfo:
    return TargetInfo(
        hidden_size=32, vocab_size=vocab_size, num_layers=8, dtype=torch.float32,
        device=torch.device("cpu"), embedding=torch.zeros(vocab_size, 32),
        lm_head=torch.zeros(vocab_size, 32),
    )  # fmt: skip


def rows_of(drafter: PEagleDrafter, ids_T: Tensor, aux_TE: Tensor, num_masked: int) -> Tensor:
    """What the head takes of every true row and of the masked rows after them."""
    masked = torch.arange(len(ids_T), len(ids_T) + num_masked)
    masked_ids, masked_hidden = drafter.mask(masked[None])
    ids = torch.cat([ids_T, masked_ids[0]])
    hidden = torch.cat([drafter.combine(aux_TE[None]), masked_hidden], 1)
    head, _ = drafter(ids[None], torch.arange(len(ids))[None], hidden)
    return head[0]


def test_one_pass_equals_speculators() -> None:
    drafter = get_method("peagle").load(ORACLE, target_info(), {})
    assert isinstance(drafter, PEagleDrafter)
    io, meta = load_file(ORACLE / "io.safetensors"), json.loads((ORACLE / "meta.json").read_text())
    assert drafter.aux_layers == (2, 4, 5)
    assert drafter.num_draft_tokens == meta["K"]
    assert drafter.config.mask_token_id == 95
    head = rows_of(drafter, io["in.input_ids"], io["in.aux_hidden_states"], meta["K"] - 1)
    logits, close = drafter.logits(head), {"atol": meta["atol"], "rtol": 0.0}
    true = len(io["in.input_ids"])
    torch.testing.assert_close(logits[:true], io["out.step0_logits"], **close)
    torch.testing.assert_close(logits[true - 1 :], io["out.parallel_logits"], **close)
    assert drafter.propose(head[true - 1 :]).tolist() == [
        int(best + drafter.d2t[best]) for best in io["out.parallel_logits"].argmax(-1)
    ]


def changed(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """The oracle's checkpoint with other keys of its config and other tensors; None: without."""
    raw = json.loads((ORACLE / "config.json").read_text()) | config
    found = load_file(ORACLE / "model.safetensors") | tensors
    (directory / "config.json").write_text(json.dumps(raw))
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "tensors", "error", "says"),
    [
        ({"mask_token_id": None}, {}, CheckpointError, "has no mask_token_id"),
        ({"mask_token_id": 96}, {}, CheckpointError, "a token id below 96, got 96"),
        ({}, {"mask_hidden": None}, CheckpointError, "spec='eagle3'"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, CheckpointError, "mask_hidden .expected"),
        ({"speculators_model_type": "eagle3"}, {}, NotSupported, "spec='eagle3'"),
    ],
    ids=["no mask token", "mask token outside", "no mask", "narrow mask", "eagle3"],
)
def test_faults_of_a_checkpoint_are_named(tmp_path, config, tensors, error, says) -> None:
    with pytest.raises(error, match=says) as caught:
        METHOD.load(changed(tmp_path, config, tensors), target_info(), {})
    assert "\n" not in str(caught.value)


def test_layers_may_have_windows(tmp_path) -> None:
    raw = json.loads((ORACLE / "config.json").read_text())["transformer_layer_config"]
    types = ["sliding_attention", "full_attention"]
    body = {**raw, "layer_types": types, "sliding_window": 9, "use_sliding_window": True}
    config = {"transformer_layer_config": body}
    drafter = METHOD.load(changed(tmp_path, config, {}), target_info(), {})
    assert [layer.self_attn.window for layer in drafter.layers] == [9, 0]
    body["layer_types"] = types[:1]
    with pytest.raises(CheckpointError, match="layer_types names 1 layers, num_hidden_layers is 2"):
        METHOD.load(changed(tmp_path, config, {}), target_info(), {})


def test_the_flat_layout_and_its_key_are_read(tmp_path) -> None:
    raw = json.loads((ORACLE / "config.json").read_text())
    nested = raw["transformer_layer_config"]
    flat = {**nested, "draft_vocab_size": 48, "pard_token": 95, "norm_before_residual": True}
    flat["eagle_aux_hidden_state_layer_ids"] = raw["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(ORACLE / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    io = load_file(ORACLE / "io.safetensors")
    drafter = METHOD.load(tmp_path, target_info(), {})
    head = rows_of(drafter, io["in.input_ids"], io["in.aux_hidden_states"], 3)
    torch.testing.assert_close(
        drafter.logits(head[11:]), io["out.parallel_logits"], atol=2e-5, rtol=0.0
    )
    with pytest.raises(NotSupported, match="spec='peagle'"):
        get_method("eagle3").load(tmp_path, target_info(), {})
    with pytest.raises(DraftMismatch, match="vocabulary is 96, the target's is 97"):
        METHOD.load(tmp_path, target_info(97), {})


# --- in the step ---


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask], PEagleDrafter]:
    model = tiny_target("llama", num_layers=3)
    head = random_head(
        info_of(model, MAX_SEQ_LEN),
        aux_layers=(0, 1, 2),
        draft_vocab_size=61,
        num_layers=2,
        windows=(0, 7),
    )
    return model, ask_all(model, SIZES), head


@torch.no_grad()
def from_scratch(model: nn.Module, drafter: PEagleDrafter, tokens: tuple[int, ...], k: int) -> Any:
    ids_T = torch.tensor(tokens)
    states = model(ids_T[None, :-1], output_hidden_states=True).hidden_states
    aux_TE = torch.cat([states[layer][0] for layer in drafter.aux_layers], -1)
    head = rows_of(drafter, ids_T[1:], aux_TE, k - 1)
    return drafter.propose(head[len(tokens) - 2 :]).tolist()


@pytest.mark.parametrize("k", [1, 4], ids="K{}".format)
def test_drafts_are_those_of_the_module_on_true_rows(target, k) -> None:
    """Chunks, joins, accepted and rejected drafts leave nothing but true rows in the caches."""
    model, asks, head = target
    with compilespec.compile(model, "peagle", draft=head, num_draft_tokens=k, **OPTIONS) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
        assert len(found) > 40
        for tokens, drafts in found.items():
            assert drafts == from_scratch(model, head, tokens, k), len(tokens)


def test_several_k_with_zero_and_preemption(target) -> None:
    model, asks, head = target
    with compilespec.compile(
        model, "peagle", draft=head, num_draft_tokens=(0, 3), kv_cache_tokens=96, **OPTIONS
    ) as engine:
        check_preempted(engine, asks)


def test_sampled_tokens_are_those_of_plain_decoding(target) -> None:
    model, asks, head = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, draft in (("none", None), ("peagle", head)):
        options = {**OPTIONS, "draft": draft, "num_draft_tokens": 3} if draft else OPTIONS
        with compilespec.compile(model, spec, **options) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("acceptance", ["auto", "rejection"])
def test_the_loop_is_what_its_reference_says(target, acceptance) -> None:
    model, _, head = target
    program = compilespec.trace(
        model, "peagle", draft=head, num_draft_tokens=3, acceptance=acceptance, max_batch_size=4,
        max_seq_len=43, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program, passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    assert {bound.status for bound in prove(program).bounds} == {"proved"}
