"""The EAGLE-3 drafter against the numbers of other implementations (tests/data/oracles)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compilespec.methods.eagle3 import Eagle3Drafter
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo

ORACLES = Path(__file__).parents[1] / "data" / "oracles"


def target_info(vocab_size: int, embedding: Tensor | None = None, lm_head: Tensor | None = None):
    return TargetInfo(
        hidden_size=32,
        vocab_size=vocab_size,
        num_layers=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        embedding=torch.zeros(vocab_size, 32) if embedding is None else embedding,
        lm_head=torch.zeros(vocab_size, 32) if lm_head is None else lm_head,
    )


def rows(drafter: Eagle3Drafter, ids_T: Tensor, hidden_TD: Tensor, first_position: int = 0):
    """Run all rows at once: head input, recycled hidden, logits, each [T, ...]."""
    positions = torch.arange(first_position, first_position + len(ids_T))
    head_1TD, recycled_1TD = drafter(ids_T[None], positions[None], hidden_TD[None])
    return head_1TD[0], recycled_1TD[0], drafter.logits(head_1TD)[0]


def draft_chain(drafter: Eagle3Drafter, ids_T: Tensor, hidden_TD: Tensor, num_steps: int):
    """Greedy chain after the last row, every step a full recomputation of all rows."""
    tokens, heads, recycleds, logits = [], [], [], []
    for _ in range(num_steps):
        head, recycled, step_logits = rows(drafter, ids_T, hidden_TD)
        token = drafter.propose(head[-1:])
        ids_T = torch.cat([ids_T, token.to(ids_T.dtype)])
        hidden_TD = torch.cat([hidden_TD, recycled[-1:]])
        tokens.append(token)
        heads.append(head[-1])
        recycleds.append(recycled[-1])
        logits.append(step_logits[-1])
    return torch.cat(tokens), torch.stack(heads), torch.stack(recycleds), torch.stack(logits)


@pytest.fixture(scope="module")
def speculators_case():
    directory = ORACLES / "a_eagle3_llama"
    meta = json.loads((directory / "meta.json").read_text())
    drafter = get_method("eagle3").load(directory, target_info(96), {})
    return drafter.eval(), load_file(directory / "io.safetensors"), meta


def test_speculators_checkpoint_is_read_as_it_is(speculators_case):
    drafter, _, meta = speculators_case
    assert drafter.aux_layers == (2, 4, 5)
    assert drafter.num_draft_tokens == meta["K"]
    assert drafter.config.layout == "speculators"
    assert drafter.config.own_embedding
    assert drafter.config.own_lm_head


@pytest.mark.parametrize("first_position", [0, 1], ids="position{}".format)
def test_every_row_equals_speculators(speculators_case, first_position):
    drafter, io, meta = speculators_case
    hidden_TD = drafter.combine(io["in.aux_hidden_states"][None])[0]
    head, recycled, logits = rows(drafter, io["in.input_ids"], hidden_TD, first_position)
    close = {"atol": meta["atol"], "rtol": 0.0}
    torch.testing.assert_close(head, io["out.step0_postnorm"], **close)
    torch.testing.assert_close(recycled, io["out.step0_prenorm"], **close)
    torch.testing.assert_close(logits, io["out.step0_logits"], **close)


def test_greedy_chain_equals_speculators(speculators_case):
    drafter, io, meta = speculators_case
    hidden_TD = drafter.combine(io["in.aux_hidden_states"][None])[0]
    tokens, heads, recycleds, logits = draft_chain(
        drafter, io["in.input_ids"], hidden_TD, meta["K"]
    )
    close = {"atol": meta["atol"], "rtol": 0.0}
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == io["out.chain_target_ids"].tolist()
    assert logits.argmax(-1).tolist() == io["out.chain_draft_ids"].tolist()
    torch.testing.assert_close(heads, io["out.chain_postnorm"], **close)
    torch.testing.assert_close(recycleds, io["out.chain_prenorm"], **close)
    torch.testing.assert_close(logits, io["out.chain_logits"], **close)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(ORACLES / "c_target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def authors_case(target):
    directory = ORACLES / "c_eagle3_d2t_chain"
    meta = json.loads((directory / "meta.json").read_text())
    info = target_info(40, target.model.embed_tokens.weight, target.lm_head.weight)
    drafter = get_method("EAGLE3_ONE_MODEL").load(directory / "draft", info, {})
    return drafter.eval(), load_file(directory / "io.safetensors"), meta


@torch.no_grad()
def aux_hidden_states(target, drafter: Eagle3Drafter, ids_T: Tensor) -> Tensor:
    hidden_states = target(ids_T[None], output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[k] for k in drafter.aux_layers], dim=-1)


def test_authors_layout_gets_the_default_aux_layers(authors_case):
    drafter, _, meta = authors_case
    assert list(drafter.aux_layers) == meta["aux_layers_hf_hidden_states_index"]
    assert drafter.config.layout == "safeailab"
    assert "default" in drafter.describe()


def test_features_are_the_targets_inner_hidden_states(authors_case, target):
    drafter, io, meta = authors_case
    features = aux_hidden_states(target, drafter, io["in.prompt0"])[0]
    torch.testing.assert_close(features, io["in.features"], atol=meta["atol"], rtol=0.0)


def test_rows_and_chain_equal_the_authors(authors_case):
    drafter, io, meta = authors_case
    hidden_TD = drafter.combine(io["in.features"][None])[0]
    close = {"atol": meta["atol"], "rtol": 0.0}
    _, recycled, logits = rows(drafter, io["in.shifted_ids"], hidden_TD)
    torch.testing.assert_close(recycled, io["out.prefill_hidden"], **close)
    torch.testing.assert_close(logits, io["out.prefill_logits"], **close)
    num_steps = len(io["out.chain_target_ids"])
    tokens, _, recycleds, logits = draft_chain(drafter, io["in.shifted_ids"], hidden_TD, num_steps)
    assert tokens.tolist() == io["out.chain_target_ids"].tolist()
    torch.testing.assert_close(recycleds, io["out.chain_hidden_prenorm"], **close)
    torch.testing.assert_close(logits, io["out.chain_logits"], **close)


@pytest.mark.parametrize("prompt", [0, 1, 2], ids="prompt{}".format)
@torch.no_grad()
def test_generation_traces_of_the_authors(authors_case, target, prompt):
    """Per verify step: same root, same drafts, same number accepted, same next token."""
    drafter, io, meta = authors_case
    text = io[f"out.eagle{prompt}"]
    committed = io[f"in.prompt{prompt}"]
    for step in meta["traces"][prompt]:
        assert step["prefix_len"] == len(committed)
        root = target(committed[None]).logits[0, -1].argmax().item()
        assert step["root"] == root
        hidden_TD = drafter.combine(aux_hidden_states(target, drafter, committed))[0]
        shifted = torch.cat([committed[1:], torch.tensor([root])])
        num_drafts = len(step["tree_tokens"]) - 1
        drafts = draft_chain(drafter, shifted, hidden_TD, num_drafts)[0].to(torch.int64)
        assert drafts.tolist() == step["tree_tokens"][1:]

        candidate = torch.cat([committed, torch.tensor([root]), drafts])
        judged = target(candidate[None]).logits[0, len(committed) :].argmax(-1)
        num_accepted = int((drafts == judged[:-1]).long().cumprod(0).sum())
        committed = candidate[: len(committed) + 1 + num_accepted]
        if "accept_length" in step:
            assert num_accepted == step["accept_length"]
            assert int(judged[num_accepted]) == step["next_token"]
    common = min(len(text), len(committed))
    assert text[:common].tolist() == committed[:common].tolist()
