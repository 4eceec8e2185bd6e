"""Programs of several K: any schedule gives the model's own tokens, and drafters lose nothing."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption
from compilespec.methods import eagle3, mtp
from compilespec.methods.shared_kv import random_drafter
from compilespec.program import NUM_KEPT
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.drafters import repeating
from tests.support.models import (
    Ask,
    DialDrafter,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.scripted import Scripted, use

COUNTS = (0, 1, 3)
MAX_SEQ_LEN = 125
SIZES = ((5, 100), (21, 90), (1, 120))


def at_random(seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield from [draw.choice(COUNTS)] * draw.choice((1, 1, 2, 5, 11))


def ask_engine(engine: Any, asks: Sequence[Ask], **fields: Any) -> list[Any]:
    params = [SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True, **fields) for a in asks]
    return list(engine.generate([list(a.prompt) for a in asks], params))


@pytest.fixture(scope="module")
def target() -> tuple[Any, list[Ask]]:
    model = tiny_target("llama", num_layers=2)
    return model, ask_all(model, SIZES)


@pytest.fixture(scope="module")
def lab(target: Any) -> Iterator[Any]:
    """eagle3 with a drafter that is right if, and only if, its cache holds the true sequence."""
    model, asks = target
    head = eagle3.random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    dial = DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64)
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    dial.draft_from_script(lambda position: False)
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=COUNTS, backend="eager",
        max_batch_size=3, max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        yield engine, asks, dial


def expected_steps(counts: Sequence[int], num_output: int) -> list[int]:
    """Tokens a step where every draft is right: a step verifies no more than the last one drafted,
    and a replay drafts the most.
    """
    steps, left, there = [], num_output - 1, COUNTS[-1]
    for before, count in itertools.pairwise([None, *counts]):
        if not left:
            break
        if before == 0 and count:
            there = COUNTS[-1]
        steps.append(min(1 + min(count or 0, there), left))
        left, there = left - steps[-1], count or 0
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_misses_nothing_of_plain_steps(lab: Any, seed: int) -> None:
    """After any number of steps of K = 0 up to the ring's length, all its drafts are right."""
    engine, asks, _ = lab
    policy = use(engine, Scripted(at_random(seed)))
    for output, ask in zip(ask_engine(engine, asks), asks, strict=True):
        assert output.token_ids == list(ask.tokens)
        assert output.emitted_per_step == expected_steps(policy.taken, len(ask.tokens))
    assert {0, 1, 3} <= set(policy.taken)
    assert_nothing_held(engine)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_draft_model_misses_nothing_of_plain_steps(family: str) -> None:
    """With the target's weights all its drafts are right, after a replay too; recurrent layers'
    states included.
    """
    model = tiny_target(family, num_layers=1)
    asks = ask_all(model, SIZES)
    with compilespec.compile(
        model, "draft_model", draft=copy.deepcopy(model), num_draft_tokens=COUNTS, backend="eager",
        max_batch_size=3, max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        policy = use(engine, Scripted(at_random(2)))
        for output, ask in zip(ask_engine(engine, asks), asks, strict=True):
            assert output.token_ids == list(ask.tokens)
            assert output.emitted_per_step == expected_steps(policy.taken, len(ask.tokens))
        assert {0, 1, 3} <= set(policy.taken)
        assert_nothing_held(engine)


def test_more_plain_steps_than_the_ring_holds(lab: Any) -> None:
    """Such a drafter never matches again, and the tokens are right."""
    engine, asks, _ = lab
    use(engine, Scripted(itertools.chain([0] * (NUM_KEPT + 9), itertools.repeat(3))))
    for output, ask in zip(ask_engine(engine, asks), asks, strict=True):
        assert output.token_ids == list(ask.tokens)
        assert set(output.emitted_per_step[NUM_KEPT + 10 :]) == {1}


def test_joins_leaves_and_wrong_drafts(lab: Any) -> None:
    engine, asks, dial = lab
    dial.draft_from_script(lambda position: position % 5 == 2)
    use(engine, Scripted(at_random(9)))
    for request, ask in zip(run_traffic(engine, asks * 2, (1, 2, 1, 3, 2)), asks * 2, strict=True):
        assert request.output_token_ids == list(ask.tokens)
    dial.draft_from_script(lambda position: False)
    stats = engine.stats()
    assert stats.num_recompiles == 0
    assert set(stats.num_decodes_by_k) == set(COUNTS)


def test_sampled_tokens_and_a_k_of_ones_own(lab: Any) -> None:
    """Same seed, any schedule: same tokens."""
    engine, asks, _ = lab
    outputs = []
    for counts in (itertools.repeat(0), itertools.repeat(3), at_random(2)):
        use(engine, Scripted(counts))
        outputs.append([o.token_ids for o in ask_engine(engine, asks, temperature=1.0, seed=11)])
    assert outputs[0] == outputs[1] == outputs[2]
    use(engine, Scripted(at_random(5)))
    for output, ask in zip(ask_engine(engine, asks, num_draft_tokens=2), asks, strict=True):
        assert output.token_ids == list(ask.tokens)
        assert max(output.emitted_per_step) <= 3


def test_a_k_of_ones_own_is_not_left_behind_where_steps_overlap(lab: Any) -> None:
    """A step of no drafts is launched before the one of drafts is read, which every drafter saw."""
    engine, asks, _ = lab
    engine._scheduler._overlap = True
    use(engine, Scripted(itertools.cycle((3, 0))))
    outputs = ask_engine(engine, asks, num_draft_tokens=2)
    engine._scheduler._overlap = False
    for output, ask in zip(outputs, asks, strict=True):
        assert output.token_ids == list(ask.tokens)
        *whole, _ = output.emitted_per_step
        assert whole == [3, 1] * (len(whole) // 2) + [3] * (len(whole) % 2)


def test_the_policy_itself_finds_what_pays(lab: Any) -> None:
    """Interpreted steps cost nearly the same at every K: drafts that are right are used."""
    engine, asks, _ = lab
    engine._scheduler.launches.adaptive.policy = engine._policy
    outputs = ask_engine(engine, asks)
    assert [o.token_ids for o in outputs] == [list(a.tokens) for a in asks]
    plan = engine.plan()["adaptive"]
    assert plan["counts"] == COUNTS
    assert sum(plan["num_steps"].values()) > 0


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        ("ngram", (0, 2, 5)),
        ("user", (0, 3)),
        pytest.param("shared_kv", (0, 1, 2), marks=pytest.mark.slow),
        pytest.param("draft_model", (0, 1, 3), marks=pytest.mark.slow),
        pytest.param("mtp_eagle", (0, 1, 3), marks=pytest.mark.slow),
    ],
)
def test_other_methods(target: Any, method: str, counts: tuple[int, ...]) -> None:
    model, asks = target
    info = describe_target(trace_target(model), load_target(model))
    draft = {
        "ngram": lambda: None,
        "user": lambda: repeating(counts[-1]),
        "shared_kv": lambda: random_drafter(info),
        "draft_model": lambda: tiny_target("llama", num_layers=1, seed=3),
        "mtp_eagle": lambda: mtp.random_modules(info, 1, recycled=True),
    }[method]()
    with compilespec.compile(
        model, method, draft=draft, num_draft_tokens=counts, backend="eager", max_batch_size=3,
        max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        draw = random.Random(1)
        use(engine, Scripted(draw.choice(counts) for _ in itertools.count()))
        for output, ask in zip(ask_engine(engine, asks), asks, strict=True):
            assert output.token_ids == list(ask.tokens)
        assert engine.stats().num_recompiles == 0


@pytest.mark.parametrize(
    ("spec", "counts", "words"),
    [
        ("eagle3", (), "several of 0 and more"),
        ("eagle3", (0,), "several of 0 and more"),
        ("eagle3", (0, -2), "several of 0 and more"),
        ("eagle3", (1, "2"), "several of 0 and more"),
        ("mtp", (1, 2), "one number"),
        ("none", (0, 2), "num_draft_tokens"),
    ],
)
def test_what_cannot_be_is_refused(target: Any, spec: str, counts: Any, words: str) -> None:
    model, _ = target
    info = target_info(model, MAX_SEQ_LEN)
    draft = {
        "mtp": lambda: mtp.random_modules(info, 2),
        "eagle3": lambda: None,
        "none": lambda: None,
    }[spec]()
    with pytest.raises(InvalidOption, match=words):
        compilespec.trace(model, spec=spec, draft=draft, num_draft_tokens=counts, max_seq_len=50)
