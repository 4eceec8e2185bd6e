"""DFlash: blocks against speculators, generations against transformers, drafts from scratch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.inspect.bounds import prove
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.dflash import METHOD, DFlashDrafter, random_drafter
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo
from tests.support.blocks import block_after, run_block
from tests.support.models import Ask, ask_all, check_preempted, tiny_target
from tests.support.models import target_info as info_of
from tests.support.seen_drafts import drafts_by_tokens

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
ORACLE, GENERATION = ORACLES / "b_dflash", ORACLES / "d_dflash"
SIZES = ((5, 18), (23, 25), (2, 30), (33, 9), (17, 22))
MAX_SEQ_LEN = 64
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip


def target_info(embedding: Tensor | None = None, **changes: Any) -> TargetInfo:
    known = {
        "hidden_size": 32, "vocab_size": 96, "num_layers": 8, "dtype": torch.float32,
        "device": torch.device("cpu"), "lm_head": torch.zeros(96, 32),
        "embedding": torch.zeros(96, 32) if embedding is None else embedding,
    }  # fmt: skip
    return TargetInfo(**{**known, **changes})


def test_blocks_equal_speculators() -> None:
    io, meta = load_file(ORACLE / "io.safetensors"), json.loads((ORACLE / "meta.json").read_text())
    info = target_info(io["verifier.embed_tokens.weight"])
    drafter = get_method("dflash").load(ORACLE, info, {})
    assert isinstance(drafter, DFlashDrafter)
    assert (drafter.aux_layers, drafter.num_draft_tokens) == ((2, 4, 5), meta["block_size"] - 1)
    close = {"atol": meta["atol"], "rtol": 0.0}
    for number, anchor in enumerate(io["in.anchors"].tolist()):
        token = int(io["in.input_ids"][anchor])
        hidden = run_block(drafter, io["in.aux_hidden_states"], token, anchor)
        torch.testing.assert_close(hidden, io["out.block_hidden"][number], **close)
        torch.testing.assert_close(drafter.logits(hidden), io["out.block_logits"][number], **close)


def test_generations_equal_transformers() -> None:
    """Step by step: where it stood, what was drafted, how much of it was accepted."""
    io = load_file(GENERATION / "io.safetensors")
    traces = json.loads((GENERATION / "meta.json").read_text())["traces"]
    with compilespec.compile(
        str(GENERATION / "target"), spec="dflash", draft=str(GENERATION / "draft"), backend="eager",
        num_draft_tokens=3, max_batch_size=3, max_seq_len=128, max_prefill_tokens=16,
    ) as engine:  # fmt: skip
        prompts = [io[f"in.prompt{i}"].tolist() for i in range(3)]
        wanted = [io[f"out.greedy{i}"].tolist() for i in range(3)]
        asks = [
            Ask(prompt=tuple(prompt), tokens=tuple(text[len(prompt) :]))
            for prompt, text in zip(prompts, wanted, strict=True)
        ]
        found = drafts_by_tokens(engine, asks, 128)
    for text, trace in zip(wanted, traces, strict=True):
        steps = [step for step in trace if step["candidates"]]
        assert len(steps) > 8
        for step in steps:
            drafts = found.get(tuple(text[: step["cur_len"]]))
            if drafts is not None:  # the last step of a request leaves none
                assert drafts == step["candidates"]
            follows = text[step["cur_len"] :]
            count = sum(
                step["candidates"][: n + 1] == follows[: n + 1]
                for n in range(len(step["candidates"]))
            )
            assert count >= step["accepted"]
        assert sum(tuple(text[: s["cur_len"]]) in found for s in steps) >= len(steps) - 1


# --- checkpoints ---


def changed(directory: Path, source: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """An oracle's checkpoint with other keys of its config and other tensors; None: without."""
    raw = json.loads((source / "config.json").read_text()) | config
    found = load_file(source / "model.safetensors") | tensors
    (directory / "config.json").write_text(json.dumps(raw))
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "tensors", "error", "says"),
    [
        ({"mask_token_id": None}, {}, CheckpointError, "has no mask_token_id"),
        ({"mask_token_id": 96}, {}, CheckpointError, "a token id below 96"),
        ({"block_size": 1}, {}, CheckpointError, "drafts nothing"),
        ({"block_size": 3}, {}, CheckpointError, "block_size must be 1 more"),
        ({"aux_hidden_state_layer_ids": [2, 4]}, {}, DraftMismatch, "of width 48"),
        ({"aux_hidden_state_layer_ids": [2, 4, 9]}, {}, DraftMismatch, "lie outside"),
        ({"aux_hidden_state_layer_ids": None}, {}, CheckpointError, "give aux_layers="),
        ({"speculators_model_type": "dspark"}, {}, NotSupported, "spec='dspark'"),
        ({}, {"hidden_norm.weight": None}, CheckpointError, "not a DFlash checkpoint"),
        ({}, {"layers.0.self_attn.q_norm.weight": None}, CheckpointError, "missing"),
        ({}, {"d2t": torch.arange(48) * 2}, CheckpointError, "contradict"),
    ],
)  # fmt: skip
def test_faults_of_a_checkpoint_are_named(tmp_path, config, tensors, error, says) -> None:
    with pytest.raises(error, match=says) as caught:
        METHOD.load(changed(tmp_path, ORACLE, config, tensors), target_info(), {})
    assert "\n" not in str(caught.value)


def test_a_module_made_for_a_deeper_target_is_refused() -> None:
    drafter = METHOD.load(ORACLE, target_info(), {})
    with pytest.raises(DraftMismatch, match="lie outside the target"):
        METHOD.load(drafter, dataclasses.replace(target_info(), num_layers=1), {})


def test_the_authors_layout_is_read(tmp_path) -> None:
    """Flat, `dflash_config` nested, layers counted by their output, windows of some layers."""
    raw = json.loads((ORACLE / "config.json").read_text())["transformer_layer_config"]
    raw |= {
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3, 4], "block_size": 4},
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
        "use_sliding_window": True, "draft_vocab_size": 48, "num_target_layers": 8,
    }  # fmt: skip
    changed(tmp_path, ORACLE, {}, {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    drafter = METHOD.load(tmp_path, target_info(), {})
    assert drafter.aux_layers == (2, 4, 5)
    assert drafter.config.windows == (6, 0)
    assert (drafter.config.block_size, drafter.num_draft_tokens) == (4, 3)
    assert "authors" in drafter.describe()


def test_transformers_layout_and_its_defaults_are_read(tmp_path) -> None:
    changes = {"layer_types": None, "sliding_window": 9}
    changed(tmp_path, GENERATION / "draft", changes, {})
    info = target_info(vocab_size=40, embedding=torch.zeros(40, 32), lm_head=torch.zeros(40, 32))
    assert METHOD.load(tmp_path, dataclasses.replace(info, num_layers=4), {}).aux_layers == (
        1, 2, FINAL_NORM,
    )  # fmt: skip
    config = METHOD.load(tmp_path, info, {}).config
    assert config.aux_layers == (1, 2, 4)
    assert (config.windows, config.sight) == ((9, 9), "distance")
    assert METHOD.load(tmp_path, info, {"aux_layers": (1, 3, 5)}).aux_layers == (1, 3, 5)


# --- in the step ---

SIGHTS = [
    pytest.param("anchor", False, id="anchor"),
    pytest.param("causal", True, id="causal", marks=pytest.mark.slow),
    pytest.param("distance", False, id="distance"),
]


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask]]:
    model = tiny_target("llama", num_layers=3)
    return model, ask_all(model, SIZES)


def drafter_of(model: nn.Module, **fields: Any) -> DFlashDrafter:
    known = {"block_size": 6, "draft_vocab_size": 61, "windows": (0, 3), "aux_layers": (0, 1, 3)}
    return random_drafter(info_of(model, MAX_SEQ_LEN), **{**known, **fields})


def from_scratch(
    model: nn.Module, drafter: DFlashDrafter, tokens: tuple[int, ...], k: int
) -> list[int]:
    hidden = block_after(model, drafter, tokens)
    first = int(not drafter.config.sample_from_anchor)
    return drafter.propose(hidden[first : first + k]).tolist()


@pytest.mark.parametrize(("sight", "from_anchor"), SIGHTS)
def test_drafts_are_those_of_a_block_on_true_rows(target, sight, from_anchor) -> None:
    """Chunks, joins, accepted and rejected drafts leave only committed rows in the caches."""
    model, asks = target
    draft = drafter_of(model, sight=sight, sample_from_anchor=from_anchor)
    with compilespec.compile(model, "dflash", draft=draft, num_draft_tokens=4, **OPTIONS) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
        assert len(found) > 40
        for tokens, drafts in found.items():
            assert drafts == from_scratch(model, draft, tokens, 4), len(tokens)


def test_several_k_with_zero_and_preemption(target) -> None:
    """Steps of K = 0 write the context too, and every step drafts for the largest K."""
    model, asks = target
    draft = drafter_of(model)
    with compilespec.compile(
        model, "dflash", draft=draft, num_draft_tokens=(0, 5), kv_cache_tokens=96, **OPTIONS
    ) as engine:
        check_preempted(engine, asks)


def test_sampled_tokens_are_those_of_plain_decoding(target) -> None:
    model, asks = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, extra in (("none", {}), ("dflash", {"draft": drafter_of(model)})):
        with compilespec.compile(model, spec, **extra, **OPTIONS) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("acceptance", ["auto", "rejection"])
def test_the_loop_is_what_its_reference_says(target, acceptance) -> None:
    model, _ = target
    program = compilespec.trace(
        model, "dflash", draft=drafter_of(model), num_draft_tokens=3, acceptance=acceptance,
        max_batch_size=4, max_seq_len=43, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program, passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    assert {bound.status for bound in prove(program).bounds} == {"proved"}


# the loop has its module's name
loop = importlib.import_module("compilespec.passes.splice.draft_loops.block")
UNWRITTEN = loop.unwritten
FAULTS = {
    "rejected rows are written": ("committed_slots", lambda slot, n, **_: slot),
    "the block sees its own place": (
        "unwritten", lambda step, wanted: UNWRITTEN(step, wanted + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    ["rejected rows are written", pytest.param("the block sees its own place",
                                               marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_planted_fault_is_seen(target, fault, monkeypatch) -> None:
    model, _ = target
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(loop, name, functools.wraps(getattr(loop, name))(wrong))
    program = compilespec.trace(
        model, "dflash", draft=drafter_of(model), num_draft_tokens=3, max_batch_size=4,
        max_seq_len=43, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program, passes=["splice_draft_loop"], phases=["decode"])
    assert not report.ok


def test_more_drafts_than_a_block_has_are_refused(target) -> None:
    model, _ = target
    with pytest.raises(InvalidOption, match=r"proposes 5 tokens .* at most 5"):
        compilespec.trace(model, "dflash", draft=drafter_of(model), num_draft_tokens=6)
