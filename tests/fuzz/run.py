"""Rounds one after the other, a watchdog over each, and what is said of a failure."""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tests.fuzz import clients, direct
from tests.fuzz.check import check_all
from tests.fuzz.lab import Lab, build
from tests.fuzz.orders import DIRECT_WAYS, SERVED_WAYS, Order, draw_orders
from tests.fuzz.plan import Plan, draw_plan
from tests.fuzz.recorder import Recorder
from tests.fuzz.truth import Truth
from tests.support.models import assert_nothing_held

NUM_ORDERS = 60
ROUND_SECONDS = 600  # a round takes some ten


@dataclass(kw_only=True)
class Tally:
    """What the rounds met: a fuzzer that meets nothing finds nothing."""

    num_rounds: int = 0
    failed: list[int] = field(default_factory=list)  # numbers of rounds
    met: Counter[str] = field(default_factory=Counter)


class Hung(Exception):
    """A round did not end."""


def fuzz(
    seed: int,
    numbers: Iterable[int],
    *,
    minutes: float = float("inf"),
    num_orders: int = NUM_ORDERS,
    goes_on: bool = False,
) -> Tally:
    """Play the rounds while there is time; stop at the first that fails, unless `goes_on`."""
    tally, end = Tally(), time.monotonic() + 60 * minutes
    for number in numbers:
        plan = draw_plan(seed, number, num_orders)
        started = time.monotonic()
        try:
            with watchdog(ROUND_SECONDS):
                play(plan, tally)
        except Exception as error:
            report(plan, error)
            tally.failed.append(number)
            if not goes_on or isinstance(error, Hung | clients.ClientsHang):
                break
        else:
            print(f"round {number}: {plan.method}, {time.monotonic() - started:.1f} s", flush=True)
        tally.num_rounds += 1
        if time.monotonic() > end:
            break
    return tally


def play(plan: Plan, tally: Tally | None = None) -> None:
    """One round.  Raises: AssertionError, or the engine's error."""
    draw, truth = plan.draw, Truth(plan)
    batches = [draw_orders(plan, draw, truth, ways) for ways in (DIRECT_WAYS, SERVED_WAYS)]
    lab = build(plan, [order for batch in batches for order in batch])
    tally = tally or Tally()
    for serve, orders in zip((serve_directly, serve_clients), batches, strict=True):
        recorder = Recorder(lab.engine)
        serve(lab, recorder, orders, draw)
        note(tally, lab, recorder)
        recorder.close()
    tally.met.update(
        {f"rounds of {plan.method}": 1, "rounds with overlap": plan.options["overlap"]}
        | {"rounds with trees": "draft_tree" in plan.options, f"rounds on {plan.family}": 1}
    )


def serve_directly(lab: Lab, recorder: Recorder, orders: list[Order], draw: random.Random) -> None:
    """The traffic of one thread, and the checks."""
    check_all(lab, recorder, orders, direct.drive(lab.engine, orders, draw, lab.adapters))
    assert_nothing_held(lab.engine)


def serve_clients(lab: Lab, recorder: Recorder, orders: list[Order], draw: random.Random) -> None:
    """The traffic of many threads, and the checks; closes the engine."""
    server = lab.engine.serve()
    try:
        seen = clients.drive(server, orders, draw, lab.adapters)
        check_all(lab, recorder, orders, seen)
        assert_nothing_held(lab.engine)
    finally:
        server.close(timeout=clients.WAIT_SECONDS)
    assert_nothing_held(lab.engine)


def note(tally: Tally, lab: Lab, recorder: Recorder) -> None:
    requests = recorder.requests
    events = [event for own in recorder.events.values() for event in own]
    tally.met.update(
        {
            "requests": len(requests),
            "requests whose drafts are foretold": sum(map(lab.is_judged, requests)),
            "tokens": sum(len(request.output_token_ids) for request in requests),
            "steps of requests": sum(event.kind == "step" for event in events),
            "replays": sum(event.kind == "replay" for event in events),
            "preemptions": sum(request.num_preemptions for request in requests),
            "cached tokens": lab.engine.stats().num_cached_tokens
            - recorder.before.num_cached_tokens,
            "of these, from host memory": lab.engine.stats().num_tokens_from_host
            - recorder.before.num_tokens_from_host,
        }
    )
    tally.met.update(f"ended by {request.finish_reason}" for request in requests)
    tally.met.update(
        {
            "requests with adapters": sum(r.adapter is not None for r in requests),
            "requests with embeddings": sum(bool(r.given and not r.ahead) for r in requests),
        }
    )


def report(plan: Plan, error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stdout)
    print(
        f"\nFAILED: seed {plan.seed}, round {plan.number}: {type(error).__name__}: {error}\n"
        f"  round: {plan}\n"
        f"  again: python -m tests.fuzz --seed {plan.seed} --round {plan.number} "
        f"--requests {plan.num_orders}",
        flush=True,
    )


@contextmanager
def watchdog(seconds: int) -> Iterator[None]:
    """Raise Hung in the main thread, wherever it waits, once the time is up."""

    def bark(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback()
        raise Hung(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
