"""A user's acceptance rule along a tree: typical acceptance, as Medusa has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compilespec
from compilespec import DraftTree, SamplingParams, acceptance_rule
from compilespec.inspect.bounds import prove
from compilespec.methods.medusa import random_heads
from tests.support.models import ask_all, run_traffic, target_info, tiny_target

TREES = {
    "static": DraftTree(choices=[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 3)]),
    "dynamic": DraftTree(top_k=3, depth=3, num_nodes=7),
}
SIZES: dict[str, Any] = {"max_batch_size": 5, "max_seq_len": 43, "max_prefill_tokens": 40}


def kept_rows(probs_BSV, draft_BK, parents_BS, least):
    """The row of the longest path whose drafts all have this much probability: [B]."""
    parent_BK = parents_BS[:, 1:].long()
    place_BK1 = draft_BK.clamp(min=0).long().unsqueeze(-1)
    before_BKV = probs_BSV.gather(1, parent_BK.unsqueeze(-1).expand(-1, -1, probs_BSV.shape[-1]))
    is_good_BK = (before_BKV.gather(2, place_BK1).squeeze(-1) >= least) & (draft_BK >= 0)
    lengths = [torch.zeros_like(draft_BK[:, 0])]
    for row in range(draft_BK.shape[1]):
        length_BS = torch.stack(lengths, 1)
        above_B = length_BS.gather(1, parent_BK[:, row : row + 1]).squeeze(1)
        is_kept_B = is_good_BK[:, row] & (above_B >= 0)
        lengths.append(torch.where(is_kept_B, above_B + 1, -1))
    return torch.stack(lengths, 1).argmax(1)


@acceptance_rule(lossless=False)
def typical(probs_BSV, draft_BK, parents_BS):
    row_B = kept_rows(probs_BSV, draft_BK, parents_BS, 0.012)
    at_B1V = row_B.view(-1, 1, 1).expand(-1, 1, probs_BSV.shape[-1])
    return row_B, probs_BSV.gather(1, at_B1V).squeeze(1)


@acceptance_rule(lossless=False)
def best_of(logits_BSV, draft_BK, parents_BS, uniform_BK):
    """Rows by chance, guides or not; an id, now and then one that does not exist."""
    row_B = (uniform_BK[:, 0] * (draft_BK.shape[1] + 3)).long()
    at_B1V = row_B.clamp(0, draft_BK.shape[1]).view(-1, 1, 1)
    best_B = logits_BSV.gather(1, at_B1V.expand(-1, 1, logits_BSV.shape[-1])).squeeze(1).argmax(-1)
    return row_B + parents_BS[:, 0], best_B + 7000 * (row_B == 2)


@pytest.fixture(scope="module")
def target() -> Any:
    model = tiny_target("mistral", torch.float64, num_layers=2)
    return model, random_heads(target_info(model, 43), 3, num_blocks=1)


@pytest.mark.parametrize(
    ("rule", "tree"), [(typical, "static"), (typical, "dynamic"), (best_of, "static")]
)
def test_every_pass_agrees(target: Any, rule: Any, tree: str) -> None:
    model, heads = target
    program = compilespec.trace(
        model, "medusa", draft=heads, draft_tree=TREES[tree], acceptance=rule, **SIZES
    )
    report = compilespec.verify(program, batch_sizes=[1, 5])
    assert report.ok, str(report)
    assert not any(check.skipped for check in report.checks)
    if rule is typical:  # the other one takes rows by chance
        assert prove(program).num_open == 0


@pytest.mark.parametrize("tree", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_greedy_requests_have_the_models_own_tokens(target: Any, tree: str) -> None:
    """Their distribution is 1 at the best token: nothing else is accepted."""
    model, heads = target
    asks = ask_all(model, ((5, 18), (23, 12), (2, 20), (17, 9)))
    with compilespec.compile(
        model, "medusa", draft=heads, draft_tree=TREES[tree], acceptance=typical, backend="eager",
        **SIZES,
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asks, (1, 2, 3))
        assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
        params = SamplingParams(max_new_tokens=20, temperature=2.0, seed=3, ignore_eos=True)
        (sampled,) = engine.generate(list(asks[0].prompt), params)
        assert max(sampled.emitted_per_step) > 2


def test_a_chain_is_a_tree_of_one_path(target: Any) -> None:
    """The same rule judges both."""
    model, heads = target
    prompt = list(ask_all(model, ((7, 3),))[0].prompt)
    params = SamplingParams(max_new_tokens=20, seed=8, ignore_eos=True)
    texts = []
    for given in ({"num_draft_tokens": 2}, {"draft_tree": DraftTree(choices=[(0,), (0, 0)])}):
        with compilespec.compile(
            model, "medusa", draft=heads, acceptance=best_of, backend="eager", **SIZES, **given
        ) as engine:
            (output,) = engine.generate(prompt, params)
            texts.append((output.token_ids, output.emitted_per_step))
    assert texts[0] == texts[1]
    assert {1, 2, 3} == set(texts[0][1][1:-1])
