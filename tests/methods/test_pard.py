"""PARD: a draft model that drafts all tokens of one pass, against its publishers' description."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, InvalidOption, UnsupportedState
from compilespec.inspect.bounds import prove
from compilespec.methods.draft_model.pard import pard_token
from compilespec.program import PAD
from tests.support.models import Ask, ask_all, check_preempted, tiny_target
from tests.support.scripted import Scripted, use
from tests.support.seen_drafts import drafts_by_tokens

SIZES = ((5, 18), (23, 25), (2, 30), (33, 9), (17, 22))
MAX_SEQ_LEN = 64
MASK = 96  # of 97 ids
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip


def taught(model: nn.Module, token: int = MASK, **more: Any) -> nn.Module:
    """The model with the key that PARD's config.json has."""
    model.config.pard_token = token
    for name, value in more.items():
        setattr(model.config, name, value)
    return model


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask], nn.Module]:
    model = tiny_target("llama", num_layers=2)
    return model, ask_all(model, SIZES), taught(tiny_target("qwen3", seed=1, num_layers=2))


@torch.no_grad()
def published_drafts(drafter: nn.Module, tokens: tuple[int, ...], k: int, mask: int) -> list[int]:
    """AMD-AGI/PARD's inference: all tokens, K-1 mask tokens, one causal pass; the last K rows."""
    ids = torch.tensor([[*tokens, *[mask] * (k - 1)]])
    return drafter(ids).logits[0, -k:].argmax(-1).tolist()


@pytest.mark.parametrize("k", [1, 2, 5], ids="K{}".format)
def test_drafts_are_the_publishers(target, k) -> None:
    """Chunks, joins, accepted and rejected drafts, and what a replay makes of steps of K = 0, leave
    nothing but true rows in the cache.
    """
    model, asks, drafter = target
    with compilespec.compile(
        model, "draft_model", draft=drafter, num_draft_tokens=(0, k), **OPTIONS
    ) as engine:
        assert any("of one pass, mask token 96" in why for why in engine.plan()["why"])
        use(engine, Scripted(itertools.cycle((k, 0, k, k, 0, 0, k))))
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
    found = {tokens: drafts for tokens, drafts in found.items() if drafts[0] != PAD}
    assert len(found) > 40
    for tokens, drafts in found.items():
        assert drafts == published_drafts(drafter, tokens, k, MASK), len(tokens)


def test_a_mask_outside_the_targets_ids(target) -> None:
    """PARD's Llama models have more rows than the target's; none of these is ever proposed."""
    model, asks, _ = target
    drafter = tiny_target("llama", seed=2, num_layers=1)
    drafter.resize_token_embeddings(104)
    head = drafter.lm_head.weight.data
    head[97:] = 50 * head[:1]
    taught(drafter, 100)
    with compilespec.compile(
        model, "draft_model", draft=drafter, num_draft_tokens=3, **OPTIONS
    ) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
    for tokens, drafts in found.items():
        ids = torch.tensor([[*tokens, 100, 100]])
        with torch.no_grad():
            logits = drafter(ids).logits[0, -3:, :97]
        assert drafts == logits.argmax(-1).tolist()


def test_several_k_and_preemption(target) -> None:
    model, asks, drafter = target
    with compilespec.compile(
        model,
        "draft_model",
        draft=drafter,
        num_draft_tokens=(0, 1, 4),
        kv_cache_tokens=96,
        **OPTIONS,
    ) as engine:  # fmt: skip
        check_preempted(engine, asks)


def test_sampled_tokens_are_those_of_plain_decoding(target) -> None:
    model, asks, drafter = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, draft in (("none", None), ("draft_model", drafter)):
        options = {**OPTIONS, "draft": draft, "num_draft_tokens": 3} if draft else OPTIONS
        with compilespec.compile(model, spec, **options) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_rejection_keeps_the_targets_distribution() -> None:
    """Of 6,000 draws the second token's counts differ from the model's by chance: a chi-square
    above the 0.9999 quantile would be a false alarm once in 10,000 runs.
    """
    model = tiny_target("llama", num_layers=1)
    drafter = taught(tiny_target("llama", seed=1, num_layers=1))
    prompt, count, options = [3, 1, 4], 6000, {**OPTIONS, "max_batch_size": 32}
    with torch.no_grad():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        wanted = torch.softmax(model(torch.tensor([[*prompt, first]])).logits[0, -1] / 0.7, -1)
    with compilespec.compile(
        model, "draft_model", draft=drafter, num_draft_tokens=2, acceptance="rejection", **options
    ) as engine:
        params = SamplingParams(
            max_new_tokens=1, temperature=0.7, n=count, seed=11, ignore_eos=True
        )
        outputs = engine.generate([*prompt, first], params)
    seen = torch.bincount(torch.tensor([out.token_ids[0] for out in outputs]), minlength=97)
    likely = wanted * count >= 5
    rest = count - seen[likely].sum()
    expected = wanted[likely] * count
    chi = ((seen[likely] - expected) ** 2 / expected).sum()
    chi += (rest - (count - expected.sum())) ** 2 / max(float(count - expected.sum()), 1e-9)
    degrees = int(likely.sum())
    assert float(chi) < degrees + 3.72 * (2 * degrees) ** 0.5 + 9.2


@pytest.mark.parametrize("acceptance", ["auto", "rejection"])
def test_the_loop_is_what_its_reference_says(target, acceptance) -> None:
    model, _, drafter = target
    program = compilespec.trace(
        model, "draft_model", draft=drafter, num_draft_tokens=3, acceptance=acceptance,
        max_batch_size=4, max_seq_len=43, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program, passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    assert {bound.status for bound in prove(program).bounds} == {"proved"}


def test_a_checkpoint_says_itself(target, tmp_path, caplog) -> None:
    """A folder as AMD publishes it; PARD-2's is used without the target's hidden states."""
    model, asks, _ = target
    drafter = taught(tiny_target("llama", seed=1, num_layers=1), spd_type="pard2")
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pard_token"] == MASK
    with compilespec.compile(
        model, "draft_model", draft=tmp_path, num_draft_tokens=3, **OPTIONS
    ) as engine:
        found = drafts_by_tokens(engine, asks[:2], MAX_SEQ_LEN)
    assert "target-independent mode" in caplog.text
    for tokens, drafts in found.items():
        assert drafts == published_drafts(drafter, tokens, 3, MASK), len(tokens)


def test_what_does_not_compose_is_refused(target) -> None:
    model, _, drafter = target
    keywords = {"draft": drafter, **OPTIONS}
    tree = compilespec.DraftTree(choices=[(0,), (1,)])
    with pytest.raises(InvalidOption, match="drafts no trees"):
        compilespec.compile(model, "draft_model", draft_tree=tree, **keywords)
    hybrid = taught(tiny_target("qwen3_next"))
    with pytest.raises(UnsupportedState, match="recurrent layers"):
        compilespec.compile(model, "draft_model", draft=hybrid, num_draft_tokens=2, **OPTIONS)


def test_the_option(target) -> None:
    model, _, drafter = target
    assert pard_token(drafter, None) == pard_token(drafter, True) == MASK
    assert pard_token(drafter, False) is pard_token(model, None) is None
    with pytest.raises(CheckpointError, match="has no pard_token"):
        pard_token(model, True)
    with pytest.raises(CheckpointError, match="a token id below 97, got 200"):
        pard_token(taught(tiny_target("llama", num_layers=1), 200), None)
    with pytest.raises(InvalidOption, match="parallel must be true"):
        pard_token(drafter, "yes")
