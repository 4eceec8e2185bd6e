"""Rejection along trees keeps the target's distribution, position by position.

Every chi-square is seeded and cannot flake; the rates are those of `test_rejection`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compilespec
from compilespec import DraftTree
from compilespec.methods.medusa import MedusaDrafter
from compilespec.passes.splice.acceptance.multi_candidate import try_children
from compilespec.passes.splice.drawn_trees import inner_rows
from tests.support.fits import (
    CERTAIN,
    COUNT,
    FALSE_ALARM,
    chain,
    check_distribution,
    generated_fits,
    noisy_drafter,
    worst_fit,
)
from tests.support.markov import PROMPT, SAMPLES, VOCAB, markov_target, params_of
from tests.support.models import greedy_reference
from tests.support.trees import paths_of

BUSH = [(0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2)]
TREES = {
    "static": DraftTree(choices=BUSH),
    "dynamic": DraftTree(top_k=3, depth=3, num_nodes=8),
}


def judged_trees(
    target_VV: Tensor, draft_VV: Tensor, *, drawn: bool = True, **wrong: Any
) -> tuple[Tensor, Tensor]:
    """Tokens [COUNT, K+1] after token 0, and how many drafts were accepted.  Children are drawn
    without replacement, or the drafter's best; `wrong` replaces an input of the rule.
    """
    shape = TREES["static"].shape
    rows = {path: row for row, path in enumerate(((), *shape.choices))}
    parents = [0, *(rows[path[:-1]] for path in shape.choices)]
    generator = torch.Generator().manual_seed(5)
    ids_BS = torch.zeros(COUNT, len(parents), dtype=torch.int64)
    for parent in inner_rows(shape):
        children = [row for row in range(1, len(parents)) if parents[row] == parent]
        scores_BV = draft_VV[ids_BS[:, parent]].log()
        if drawn:
            uniform_BV = torch.rand(scores_BV.shape, generator=generator, dtype=torch.float64)
            scores_BV = scores_BV - (-uniform_BV.log()).log()
        ids_BS[:, children] = scores_BV.topk(len(children), -1).indices
    inner, paths = inner_rows(shape), paths_of([-1, *parents[1:]])
    depth_BS = torch.tensor([[len(path) - 1 for path in paths]] * COUNT, dtype=torch.int32)
    width = shape.depth + 1
    path_BSP = torch.tensor([[[*p, *[-1] * (width - len(p))] for p in paths]] * COUNT)
    given = {
        "ids_BS": ids_BS.int(),
        "probs_BSV": target_VV[ids_BS],
        "child_probs_BIV": draft_VV[ids_BS[:, inner]],
        "uniform_BS": torch.rand(ids_BS.shape, generator=generator),
    } | wrong
    of_row = tuple(inner.index(row) if row in inner else 0 for row in range(len(parents)))
    leaf_B, weights_BV = try_children(**given, depth_BS=depth_BS, path_BSP=path_BSP, of_row=of_row)
    last_B = weights_BV.multinomial(1, generator=generator).squeeze(1)
    count_B = depth_BS.gather(1, leaf_B.unsqueeze(1)).squeeze(1)
    tokens = torch.zeros(COUNT, width, dtype=torch.int64)
    for step in range(width):
        before = tokens[:, step - 1] if step else torch.zeros(COUNT).long()
        fresh = target_VV[before].multinomial(1, generator=generator).squeeze(1)
        row_B = path_BSP[torch.arange(COUNT), leaf_B][:, min(step + 1, width - 1)].clamp(min=0)
        draft_B = ids_BS[torch.arange(COUNT), row_B]
        tokens[:, step] = torch.where(count_B == step, last_B, fresh)
        tokens[:, step] = torch.where(count_B > step, draft_B, tokens[:, step])
    return tokens, count_B


@pytest.mark.parametrize(("vocab", "sharpness"), [(7, 0.7), (11, 2.0), (8, 0.0), (5, 1.0)])
def test_the_target_distribution_is_kept_along_a_tree(vocab, sharpness):
    """Near drafters and far ones; the third drafts evenly for a target that is sharp."""
    target = chain(vocab, sharpness or 2.0, 1)
    tokens, count = judged_trees(target, chain(vocab, sharpness, 2))
    assert worst_fit(tokens, target) > FALSE_ALARM
    assert set(count.tolist()) == {0, 1, 2, 3}


def test_more_siblings_are_accepted_more_often():
    """Than the first child alone, whose rate is the overlap of the two distributions."""
    target, draft = chain(7, 1.0, 1), chain(7, 1.0, 2)
    _, count = judged_trees(target, draft)
    assert float((count > 0).double().mean()) > float(torch.minimum(target, draft)[0].sum()) + 0.1


@pytest.mark.parametrize("fault", ["best", "replaced", "noise"])
def test_biased_rules_fail_the_same_test(fault):
    """The drafter's best judged as if they were draws; distributions of another drafter; one number
    for all that is tried.
    """
    target, draft = chain(7, 1.0, 1), chain(7, 1.0, 2)
    wrong: dict[str, Any] = {}
    if fault == "noise":
        wrong["uniform_BS"] = torch.rand(COUNT, 1).expand(-1, len(BUSH) + 1)
    if fault == "replaced":
        wrong["child_probs_BIV"] = torch.full((COUNT, 4, 7), 1 / 7, dtype=torch.float64)
    tokens, _ = judged_trees(target, draft, drawn=fault != "best", **wrong)
    assert worst_fit(tokens, target) < CERTAIN


@torch.no_grad()
def heads_of(model):
    """Medusa's: head i has the distribution of the token i+2 places on, with errors."""
    states_VD = model.norm(model.tokens.weight)
    target_VV = model.head(states_VD).softmax(-1)
    heads = MedusaDrafter(TREES["static"].shape.depth, states_VD.shape[1], VOCAB, 0).double()
    far_VV, generator = target_VV, torch.Generator().manual_seed(1)
    for head in heads.heads:
        far_VV = far_VV @ target_VV
        noise_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 0.7
        logits_VV = far_VV.log() * 2 + noise_VV
        head.lm_head.weight.copy_((states_VD.pinverse() @ logits_VV).T)
    return heads


@pytest.fixture(
    scope="module",
    params=["static", "heads", pytest.param("dynamic", marks=pytest.mark.slow)],
)
def lab(request):
    """With a drafter of another, smaller vocabulary, or with heads."""
    model = markov_target()
    spec: Any = noisy_drafter(model, half=True)
    given: dict[str, Any] = {"draft_tree": TREES["static"]}
    if request.param == "heads":
        spec, given["draft"] = "medusa", heads_of(model)
    elif request.param == "dynamic":
        given = {"draft_tree": TREES["dynamic"]}
    with compilespec.compile(
        model, spec, acceptance="rejection", backend="eager", max_seq_len=16,
        max_batch_size=SAMPLES, **given,
    ) as engine:  # fmt: skip
        yield model, engine


@pytest.mark.parametrize(
    "kinds",
    [
        ("plain",),
        pytest.param(("filters", "bias", "one_draft", "no_draft"), marks=pytest.mark.slow),
    ],
)
def test_generated_tokens_follow_the_target(lab, kinds):
    model, engine = lab
    assert engine.plan()["lossless"] is True
    lengths = check_distribution(engine, model, kinds)
    assert lengths.get("plain", 2) > 1.2


def test_greedy_requests_are_strict(lab):
    model, engine = lab
    params = [params_of("plain", temperature=0.0), params_of("plain")]
    outputs = engine.generate([PROMPT, [2]], params)
    length = len(outputs[0].token_ids)
    assert outputs[0].token_ids == greedy_reference(model, PROMPT, length)
    assert max(outputs[0].emitted_per_step) > 1


@pytest.mark.parametrize("lab", ["static", "heads"], indirect=True)
def test_a_wrong_distribution_of_the_drafts_fails_the_same_test(lab, monkeypatch):
    """In the engine: drafts are judged as if all tokens had been as likely."""
    model, engine = lab
    executor = engine._executor
    launch = executor.launch_decode

    def spoilt(*given):
        executor.buffers["child_prob_RIV"].fill_(1 / VOCAB)
        return launch(*given)

    monkeypatch.setattr(executor, "launch_decode", spoilt)
    fits, _ = generated_fits(engine, model, "plain")
    assert min(fits) < CERTAIN
