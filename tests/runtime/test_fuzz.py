"""The fuzzer: it finds nothing in what is there, and it finds what is planted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from compilespec.runtime.adaptive import AdaptiveDrafts
from compilespec.runtime.step_runner import StepRunner
from compilespec.runtime.ticket import Ticket
from tests.fuzz.lab import Lab, Policy, build
from tests.fuzz.orders import DIRECT_WAYS, SERVED_WAYS, Order, draw_orders
from tests.fuzz.plan import COUNTS, Plan, draw_plan
from tests.fuzz.recorder import Recorder
from tests.fuzz.run import Tally, fuzz, play, serve_clients, serve_directly
from tests.fuzz.truth import Truth

OPTIONS: dict[str, Any] = {"overlap": True, "max_batch_size": 3, "max_prefill_tokens": 32}


def plan_of(method: str, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "seed": 1, "number": 1, "method": method, "family": "plain", "num_draft_tokens": None,
        "has_traced_processor": False, "policy": "scripted", "num_orders": 16,
        "features": frozenset({"sampled", "caps"}), "options": OPTIONS,
    }  # fmt: skip
    return Plan(**(fields | changes))


def orders_of(plan: Plan, ways: tuple[str, ...]) -> list[Order]:
    return draw_orders(plan, plan.draw, Truth(plan), ways)


@pytest.fixture(scope="module")
def several() -> Iterator[Any]:
    """Overlapped steps of several K, drafts that are all right, requests with their own K."""
    plan = plan_of("dial", num_draft_tokens=(0, 1, 3))
    orders = orders_of(plan, DIRECT_WAYS)
    lab = build(plan, orders)
    assert len(lab.judged) > 12

    def go() -> Recorder:
        recorder = Recorder(lab.engine)
        runs = itertools.cycle(((3, 2), (0, 3), (3, 1), (0, 1), (1, 2)))
        lab.engine._scheduler.launches.adaptive.policy = Policy(runs)
        try:
            serve_directly(lab, recorder, orders, plan.draw)
        finally:
            recorder.close()
        return recorder

    yield go
    lab.engine.close()


def test_nothing_planted_nothing_found(several: Any) -> None:
    events = [event for own in several().events.values() for event in own]
    assert sum(event.kind == "replay" for event in events) > 5
    assert {event.count for event in events if event.kind == "step"} == {0, 1, 3}


def test_a_backlog_that_is_counted_twice(several: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no token: entries of the drafter's cache are overwritten with others."""
    honest = AdaptiveDrafts._note_plain

    def twice(self: AdaptiveDrafts, requests: Any) -> None:
        honest(self, requests)
        honest(self, requests)

    monkeypatch.setattr(AdaptiveDrafts, "_note_plain", twice)
    with pytest.raises(AssertionError, match=r"emitted \d, expected \d"):
        several()


@pytest.mark.parametrize(
    ("kind", "found"),
    [("another K", "emitted 2, expected 4"), ("one too many", "tokens: got")],
)
def test_a_step_of_a_wrong_k(
    several: Any, monkeypatch: pytest.MonkeyPatch, kind: str, found: str
) -> None:
    """Steps of 1 draft where 3 were asked for change no token either."""
    launch, collect = StepRunner.launch_decode, StepRunner.collect
    if kind == "another K":
        monkeypatch.setattr(
            StepRunner,
            "launch_decode",
            lambda self, rows, count=None: launch(self, rows, count and 1),
        )
    else:
        monkeypatch.setattr(
            StepRunner, "collect",
            lambda self, handle: [t + t[-1:] if len(t) == 3 else t for t in collect(self, handle)],
        )  # fmt: skip
    with pytest.raises(AssertionError, match=found):
        several()


def test_a_delta_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("none")
    orders = orders_of(plan, SERVED_WAYS)
    lab: Lab = build(plan, orders)
    give, count = Ticket.give, iter(range(10_000))

    def sometimes(self: Ticket, delta: Any, *wake_ups: Any) -> None:
        if delta.output is not None or next(count) % 7:
            give(self, delta, *wake_ups)

    monkeypatch.setattr(Ticket, "give", sometimes)
    with pytest.raises(AssertionError, match="tokens of all deltas"):
        serve_clients(lab, Recorder(lab.engine), orders, plan.draw)


def test_a_failure_names_its_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("tokens: got [1], expected [2]")

    monkeypatch.setattr("tests.fuzz.run.play", fail)
    tally = fuzz(5, range(3, 9))
    assert tally.failed == [3]
    printed = capsys.readouterr().out
    assert "seed 5, round 3: AssertionError: tokens: got [1], expected [2]" in printed
    assert "python -m tests.fuzz --seed 5 --round 3 --requests 60" in printed


def test_a_round_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.run.play", lambda *args: threading.Event().wait())
    monkeypatch.setattr("tests.fuzz.run.ROUND_SECONDS", 1)
    assert fuzz(5, range(3)).failed == [0]


def test_windowed_drafts_under_pressure() -> None:
    """Few blocks, shared beginnings, overlap: who makes room and is computed anew, or finds a
    prefix, gets the same tokens.
    """
    options = OPTIONS | {"max_batch_size": 4, "kv_cache_tokens": 112, "max_step_tokens": 40}
    features = frozenset({"sampled", "penalties", "bias", "ids", "stop", "caps", "leave"})
    tally = Tally()
    changes = {
        "number": 4,
        "num_draft_tokens": 3,
        "features": features,
        "options": options,
        "num_orders": 30,
    }
    play(plan_of("mtp", **changes), tally)
    assert tally.met["preemptions"] > 2  # by the first half, which is always the same
    assert tally.met["cached tokens"] > 100


def test_every_method() -> None:
    """The first round of each."""
    rounds = {draw_plan(0, number, 1).method: number for number in reversed(range(100))}
    assert set(rounds) == set(COUNTS)
    tally = fuzz(0, rounds.values())
    assert not tally.failed
    for name in ("preemptions", "cached tokens", "replays", "ended by aborted", "ended by stop"):
        assert tally.met[name], f"no {name}"
