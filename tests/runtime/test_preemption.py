"""Too few blocks, budgets and priorities: who waits, who makes room, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from compilespec.errors import InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.line import PATIENCE
from compilespec.runtime.request import Request
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import (
    VOCAB,
    FakeExecutor,
    engine_over,
    geometry,
    prompt_of,
    toy_decode,
)
from tests.support.models import assert_nothing_held


def make_engine(**options) -> Engine:
    engine_options = {
        name: options.pop(name)
        for name in ("overlap", "lookahead", "max_step_tokens", "drafter")
        if name in options
    }
    return engine_over(FakeExecutor(geometry(**options)), **engine_options)


def submit(engine: Engine, length: int, count: int, seed: int = 0, **options) -> Request:
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, **options.pop("params", {}))
    return engine.submit(prompt_of(length, seed), params, **options)


def drain(engine: Engine, each: Callable[[], None] = lambda: None) -> int:
    steps = 0
    while engine.has_work:
        engine.step()
        each()
        steps += 1
        assert steps < 5000, "no progress"
    return steps


def assert_right(requests: list[Request]) -> None:
    for request in requests:
        wanted = toy_decode(request.prompt_token_ids, request.params.max_new_tokens, VOCAB)
        assert request.output_token_ids == wanted


# --- making room ---


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
@pytest.mark.parametrize("lookahead", [None, 1], ids=["forget", "prefixes"])
def test_the_last_in_line_makes_room(overlap, lookahead):
    # 12 blocks of 8 tokens; each grows to 8 + 60 + 7 tokens, 10 blocks: only one can reach its end.
    engine = make_engine(num_blocks=12, max_batch_size=3, overlap=overlap, lookahead=lookahead)
    requests = [submit(engine, 8, 60, seed) for seed in range(3)]
    ends: list[int] = []
    found: list[int] = []

    def check() -> None:
        running = engine._scheduler.line.running
        found.extend(r.num_cached for r in running)
        assert [r.arrival for r in running] == sorted(r.arrival for r in running)
        ends.extend(r.id for r in requests if r.finished and r.id not in ends)

    drain(engine, check)
    assert ends == [0, 1, 2]
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions >= 1
    stats = engine.stats()
    assert stats.num_preemptions == sum(r.num_preemptions for r in requests)
    assert any(found) == (lookahead is not None)
    assert stats.num_cached_tokens == 0  # of prompts: what was found again does not count
    assert_right(requests)
    assert requests[2].output().num_preemptions == requests[2].num_preemptions
    assert_nothing_held(engine)


def test_no_token_is_given_twice():
    engine = make_engine(num_blocks=12, max_batch_size=3)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [prompt_of(8, seed) for seed in range(3)]
    told: list[list[int]] = [[], [], []]
    for delta in engine.stream(prompts, params):
        told[delta.index] += delta.token_ids
    assert engine.stats().num_preemptions > 0
    assert told == [toy_decode(prompt, 60, VOCAB) for prompt in prompts]


def test_tokens_of_prefills_are_not_counted_as_steps():
    engine = make_engine(num_blocks=12, max_batch_size=3)
    requests = [submit(engine, 8, 60, seed) for seed in range(3)]
    drain(engine)
    for request in requests:
        assert sum(request.emitted_per_step) == 59 - request.num_preemptions
    assert engine.stats().num_emitted == sum(sum(r.emitted_per_step) for r in requests)


def test_logprobs_survive():
    engine = make_engine(num_blocks=12, max_batch_size=3)
    requests = [submit(engine, 8, 60, seed, params={"logprobs": 0}) for seed in range(3)]
    drain(engine)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert [entry.token_id for entry in request.output().logprobs] == request.output_token_ids


def test_the_owner_of_a_row_is_told():
    told: list[tuple[int, int]] = []
    sink = SimpleNamespace(
        forget=lambda request: told.append((request.id, request.row)),
        finish=lambda request, reason: None,
    )
    drafter = SimpleNamespace(recorder=sink, propose_on_host=None)
    engine = make_engine(num_blocks=12, max_batch_size=3, drafter=drafter)
    requests = [submit(engine, 8, 60, seed) for seed in range(3)]
    drain(engine)
    assert len(told) == sum(r.num_preemptions for r in requests) > 0
    assert all(row >= 0 for _, row in told)


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
@pytest.mark.parametrize("num_blocks", [12, 13, 17])
def test_requests_that_fill_the_cache_alone_all_end(num_blocks, overlap):
    """96 tokens are 12 blocks: no two fit, and the first always goes on."""
    engine = make_engine(num_blocks=num_blocks, max_batch_size=4, overlap=overlap)
    requests = [submit(engine, 1 + 13 * i, 95 - 13 * i, seed=i) for i in range(6)]
    drain(engine)
    assert_right(requests)
    assert_nothing_held(engine)


def test_abort_of_one_that_waits_again():
    engine = make_engine(num_blocks=12, max_batch_size=3)
    requests = [submit(engine, 8, 60, seed) for seed in range(3)]
    while not requests[2].num_preemptions:
        engine.step()
    while requests[2].row >= 0:
        engine.step()
    before = list(requests[2].output_token_ids)
    engine.abort(requests[2])
    assert requests[2].output_token_ids == before
    drain(engine)
    assert_right(requests[:2])
    assert_nothing_held(engine)


# --- the budget of a step ---


@pytest.mark.parametrize("budget", [1, 20, 30])
def test_long_prompts_go_in_beside_decode_steps(budget):
    """S = 4 tokens a decoding request come first; a prompt gets at least a block."""
    engine = make_engine(max_step_tokens=budget, num_blocks=48)
    executor = engine._executor
    short = [submit(engine, 3, 90, seed=i) for i in range(3)]
    for _ in range(3):
        engine.step()
    long = submit(engine, 80, 5)
    while not long.output_token_ids:
        num_prefills, num_decodes = len(executor.prefill_calls), len(executor.decode_calls)
        engine.step()
        (chunks,) = executor.prefill_calls[num_prefills:]
        (rows,) = executor.decode_calls[num_decodes:]
        assert {r.row for r in short} <= set(rows)
        assert sum(len(c.tokens) for c in chunks) <= max(8, budget - 4 * 3)
    drain(engine)
    assert_right([*short, long])


def test_nobody_starves_under_a_stream_of_short_requests():
    """A long request waits for its blocks and gets them, though small ones never stop coming."""
    engine = make_engine(num_blocks=13, max_batch_size=4)
    others = [submit(engine, 4, 9, seed=i) for i in range(3)]
    long = submit(engine, 70, 20)
    for seed in range(3, 60):
        others.append(submit(engine, 4, 9, seed=seed))
        engine.step()
    assert long.finished
    assert long.num_preemptions == 0
    drain(engine)
    assert_right([*others, long])


# --- priorities ---


def test_higher_priorities_are_admitted_first_and_make_room_last():
    engine = make_engine(num_blocks=12, max_batch_size=2)
    low, high, middle = (
        submit(engine, 8, 60, seed, priority=priority) for seed, priority in enumerate((-1, 5, 0))
    )
    engine.step()
    assert [r.row >= 0 for r in (low, high, middle)] == [False, True, True]
    ends: list[int] = []
    drain(engine, lambda: ends.extend(
        r.priority for r in (low, high, middle) if r.finished and r.priority not in ends
    ))  # fmt: skip
    assert ends == [5, 0, -1]
    assert high.num_preemptions == 0
    assert_right([low, high, middle])


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_is_an_integer(priority):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="priority: expected an integer"):
        submit(engine, 4, 2, priority=priority)
    assert not engine.has_work


# --- deadlines ---


def test_a_request_ends_at_its_deadline_with_the_tokens_it_has():
    """One that runs and one that waits; the others go on, and rows and blocks are free again."""
    engine = make_engine(max_batch_size=2)
    late = submit(engine, 8, 60, params={"deadline_seconds": 1e6})
    other = submit(engine, 8, 20, seed=1)
    waits = submit(engine, 8, 60, seed=2, params={"deadline_seconds": 1e-9})
    for _ in range(4):
        engine.step()
    assert waits.finish_reason == "deadline"
    assert waits.output().token_ids == []
    late.timings.submitted_ms -= 1e9
    drain(engine)
    assert late.finish_reason == "deadline"
    count = len(late.output_token_ids)
    assert 0 < count < 60
    assert late.output_token_ids == toy_decode(late.prompt_token_ids, count, VOCAB)
    assert_right([other])
    assert_nothing_held(engine)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_deadline_is_a_time(seconds):
    with pytest.raises(InvalidRequest, match="deadline_seconds: expected a finite number above 0"):
        SamplingParams(deadline_seconds=seconds)


def test_patience_ends():
    """One of low priority is overtaken by `PATIENCE` later ones, and by no more."""
    engine = make_engine(max_batch_size=1)
    submit(engine, 4, 2)
    engine.step()
    low = submit(engine, 4, 2, seed=1, priority=-1)
    finished_before = 0
    for seed in range(2, 2 * PATIENCE):
        high = submit(engine, 4, 2, seed=seed)
        while not high.finished and not low.finished:
            engine.step()
        finished_before += high.finished
        if low.finished:
            break
    assert low.finished
    assert finished_before == PATIENCE
    drain(engine)
