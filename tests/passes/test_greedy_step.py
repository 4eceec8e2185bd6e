"""The decode step of batches without a sampled request: chosen by what the rows ask for."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.cudagraphs.dispatcher import Dispatcher
from compilespec.errors import InvalidOption
from compilespec.methods.eagle3 import random_head
from tests.support.models import VOCAB, target_info, tiny_target

PROMPTS = [[5, 9, 2, 33], [7], [40, 3, 3, 61, 8, 12, 1]]
PLAIN = SamplingParams(max_new_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


def make_engine(**keywords):
    model = tiny_target("llama", torch.float64, num_layers=2)
    head = random_head(
        target_info(model, 64), aux_layers=(0, 1), num_draft_tokens=3, draft_vocab_size=61
    )
    return compilespec.compile(
        model, spec="eagle3", draft=head, num_draft_tokens=(1, 3), max_batch_size=3,
        max_seq_len=64, backend="eager", **keywords,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines():
    with make_engine(greedy_step=True) as with_step, make_engine() as without:
        yield with_step, without


@pytest.fixture
def called(engines, monkeypatch):
    """Kinds of the decode calls that the engine with the greedy step makes."""
    names = []
    plain_call = Dispatcher.__call__

    def noted(dispatcher, batch):
        if dispatcher in engines[0]._executor.calls.values() and "row_B" in batch:
            names.append(dispatcher.key.kind)
        return plain_call(dispatcher, batch)

    monkeypatch.setattr(Dispatcher, "__call__", noted)
    return names


def test_plain_batches_take_it_and_write_the_same_tokens(engines, called):
    with_step, without = engines
    made = [engine.generate(PROMPTS, PLAIN) for engine in engines]
    assert [r.token_ids for r in made[0]] == [r.token_ids for r in made[1]]
    assert called
    assert set(called) == {"greedy"}
    assert with_step.stats().num_recompiles == 0
    assert "greedy" not in {key.kind for key in without._executor.calls}


ASKS = {
    "temperature": {"temperature": 0.7, "seed": 1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {4: 9.0}},
    "bad_token_ids": {"bad_token_ids": [1]},
    "allowed_token_ids": {"allowed_token_ids": list(range(VOCAB // 2))},
    "min_new_tokens": {"min_new_tokens": 4},
    "logprobs": {"logprobs": 0},
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_whatever_reads_the_logits_takes_the_other(engines, called, asks):
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, **asks)
    made = [engine.generate(PROMPTS[:1], params)[0] for engine in engines]
    assert made[0].token_ids == made[1].token_ids
    assert called
    assert "greedy" not in called


def test_a_sampled_neighbour_changes_the_step_and_no_token(engines, called):
    """It joins, leaves before the others, and a row is used again."""
    _, without = engines
    params = [PLAIN, SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=1.0, seed=3)]
    traffic = list(zip([*PROMPTS, *PROMPTS[::-1]], [*params, PLAIN, *params, PLAIN], strict=True))
    made = [
        [r.token_ids for r in engine.generate(*map(list, zip(*traffic, strict=True)))]
        for engine in engines
    ]
    assert made[0] == made[1]
    for prompt, own, tokens in zip(*map(list, zip(*traffic, strict=True)), made[0], strict=True):
        assert without.generate([prompt], own)[0].token_ids == tokens
    assert set(called) == {"greedy", "full"}


def test_it_is_not_built_where_nobody_asks():
    """On the CPU chains gain nothing by it; trees do, whose children are drawn with noise."""
    model = tiny_target("llama", torch.float64, num_layers=2)
    program = compilespec.trace(model, max_seq_len=64, keep_graphs=False)
    assert "greedy" not in {key.kind for key in program.graphs}
    head = random_head(target_info(model, 64), aux_layers=(0, 1), num_draft_tokens=2)
    keywords = {"spec": "eagle3", "draft": head, "max_seq_len": 64}
    tree = DraftTree(top_k=2, depth=2, num_nodes=3)
    for rule, kinds in (("rejection", {"full"}), ("auto", {"full", "greedy"})):
        program = compilespec.trace(model, draft_tree=tree, acceptance=rule, **keywords)
        assert {key.kind for key in program.graphs} == kinds
    report = compilespec.verify(program, batch_sizes=[2], fail_fast=True)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "options", [{"acceptance": "rejection"}, {"host_processors": True}, {"greedy_step": "yes"}]
)
def test_what_needs_the_logits_refuses_it(options):
    model = tiny_target("llama", torch.float64, num_layers=2)
    head = random_head(target_info(model, 64), aux_layers=(0, 1), num_draft_tokens=1)
    with pytest.raises(InvalidOption, match="greedy_step"):
        compilespec.trace(
            model, spec="eagle3", draft=head, max_seq_len=64, **{"greedy_step": True, **options}
        )
