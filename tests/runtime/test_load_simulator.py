"""A server's day, seeded: Poisson arrivals, ragged lengths, shared beginnings, stops, caps of K,
priorities, aborts, too few blocks; every output against plain decoding of the request alone.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.engine import Engine
from compilespec.runtime.line import PATIENCE
from compilespec.runtime.outputs import FinishReason
from compilespec.runtime.request import Request
from tests.support.models import VOCAB, assert_nothing_held, tiny_target

MAX_SEQ_LEN, K = 64, 3
SIZES: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 32}
SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "min_new_tokens": 3},
)


@dataclass(frozen=True)
class Arrival:
    """One request of the day."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    abort_after: int | None  # steps


@dataclass
class Served:
    arrival: Arrival
    request: Request
    wait: int = 0  # steps until it was first admitted
    overtaken: int = 0  # later requests that were admitted before


@dataclass
class Day:
    """What happened."""

    served: list[Served] = field(default_factory=list)
    num_steps: int = 0
    most_waiting: int = 0


def arrivals(count: int, seed: int, *, rate: float) -> list[Arrival]:
    """`rate` requests a step on average, at exponential distances."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, VOCAB) for _ in range(40)] for _ in range(5)]
    now, day = 0.0, []
    for number in range(count):
        now += draw.expovariate(rate)
        shared = draw.choice(beginnings)[: draw.randrange(41)] if draw.random() < 0.7 else []
        prompt = [*shared, *(draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 20)))]
        params = SamplingParams(
            max_new_tokens=min(draw.randrange(4, 30), MAX_SEQ_LEN),
            stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice((0, 0, 3)))),
            ignore_eos=draw.random() < 0.5,
            seed=number,
            num_draft_tokens=draw.choice((None, None, 0, 1)),
            **draw.choice(SAMPLED),
        )
        day.append(
            Arrival(
                int(now), tuple(prompt[: MAX_SEQ_LEN - 1]), params,
                priority=draw.choice((0, 0, 0, 1)),
                abort_after=draw.randrange(25) if draw.random() < 0.1 else None,
            )
        )  # fmt: skip
    return day


def play(engine: Engine, day: list[Arrival]) -> Day:
    told, coming = Day(), list(day)
    while coming or engine.has_work:
        while coming and coming[0].step <= told.num_steps:
            arrival = coming.pop(0)
            request = engine.submit(list(arrival.prompt), arrival.params, priority=arrival.priority)
            told.served.append(Served(arrival, request))
        for one in told.served:
            age = told.num_steps - one.arrival.step
            if one.arrival.abort_after is not None and age >= one.arrival.abort_after:
                engine.abort(one.request)
        waiting = [s for s in told.served if s.request.timings.admitted_ms is None]
        waiting = [s for s in waiting if not s.request.finished]
        engine.step()
        told.num_steps += 1
        told.most_waiting = max(told.most_waiting, len(waiting))
        note_waits(waiting)
        assert told.num_steps < 200 * len(day), "no progress"
    return told


def note_waits(waiting: list[Served]) -> None:
    admitted = [s for s in waiting if s.request.timings.admitted_ms is not None]
    for one in waiting:
        if one.request.timings.admitted_ms is None:
            one.wait += 1
            one.overtaken += sum(s.request.arrival > one.request.arrival for s in admitted)


class Oracle:
    """Plain decoding, one request at a time, nothing shared."""

    def __init__(self, model: nn.Module) -> None:
        self._engine = compilespec.compile(
            model, max_batch_size=1, enable_prefix_caching=False, **SIZES
        )

    def answer(self, arrival: Arrival) -> tuple[list[int], FinishReason]:
        (output,) = self._engine.generate([list(arrival.prompt)], arrival.params)
        assert output.finish_reason is not None
        return output.token_ids, output.finish_reason

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(scope="module")
def site():
    """A drafter that is often right, 4 rows, and blocks for less than two of the longest."""
    model = tiny_target("llama", num_layers=2)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.get_output_embeddings().weight.add_(
            torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(1)) * 0.05
        )
    oracle = Oracle(model)
    with compilespec.compile(
        model, spec="draft_model", draft=draft, num_draft_tokens=K, max_batch_size=4,
        kv_cache_tokens=112, overlap=True, max_step_tokens=40, **SIZES,
    ) as engine:  # fmt: skip
        yield engine, oracle
    oracle.close()


@pytest.mark.parametrize(
    ("count", "seed"),
    [(80, 1), pytest.param(2000, 2, marks=pytest.mark.slow)],
    ids=["80", "2000"],
)
def test_a_day_of_traffic(site, count, seed):
    engine, oracle = site
    day = arrivals(count, seed, rate=0.35)
    before = engine.stats()
    told = play(engine, day)
    assert len(told.served) == count
    reasons: dict[str, int] = {}
    for one in told.served:
        request = one.request
        expected, reason = oracle.answer(one.arrival)
        got = request.output_token_ids
        reasons[request.finish_reason] = reasons.get(request.finish_reason, 0) + 1
        if request.finish_reason == "aborted":
            assert got == expected[: len(got)]
            assert one.arrival.abort_after is not None
        else:
            assert (got, request.finish_reason) == (expected, reason)
        own = one.arrival.params.num_draft_tokens
        most = K if own is None else min(own, K)
        assert all(1 <= n <= most + 1 for n in request.emitted_per_step)
        assert one.overtaken <= PATIENCE
    assert_nothing_held(engine)
    stats = engine.stats()
    assert stats.num_recompiles == 0
    # The day had what it was made for.
    assert set(reasons) == {"stop", "length", "aborted"}
    assert stats.num_preemptions - before.num_preemptions > count // 50
    assert stats.num_cached_tokens - before.num_cached_tokens > count
    assert stats.acceptance_length > 1.3
    assert told.most_waiting > 3
    assert any(one.overtaken for one in told.served)
    assert engine._executor.lowered is not None
