"""What must hold once a round's traffic is over."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from compilespec.program import NUM_KEPT
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.request import Request
from compilespec.runtime.stats import EngineStats
from tests.fuzz.direct import Seen
from tests.fuzz.lab import Lab
from tests.fuzz.orders import REPLACEMENT, Order, spelled
from tests.fuzz.recorder import Event, Recorder

LOGPROB_TOLERANCE = 1e-5  # noted in float32


def check_all(lab: Lab, recorder: Recorder, orders: Sequence[Order], seen: Sequence[Seen]) -> None:
    """Raises: AssertionError, naming the request at fault."""
    by_order: dict[int | None, list[Request]] = defaultdict(list)
    for request in recorder.requests:
        by_order[request.seed].append(request)
    assert {one.order.params.seed for one in seen} == {order.params.seed for order in orders}
    assert len(seen) == len(orders), "an order was answered twice"
    for one in seen:
        requests = by_order.pop(one.order.params.seed, [])
        with _named(str(one.order)):
            check_requests(one, requests)
            check_reader(one, requests)
        for request in requests:
            events = recorder.events[request]
            about = f"{one.order}\n  emitted {request.emitted_per_step}\n  events {events}"
            with _named(about):
                check_steps(lab, request, events)
    assert not by_order, "requests that nobody ordered"
    check_stats(recorder.before, lab.engine.stats(), recorder)


@contextmanager
def _named(about: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}\n  in {about}") from error


# --- a request against plain decoding ---


def check_requests(one: Seen, requests: Sequence[Request]) -> None:
    order = one.order
    if not requests and order.leaves:
        return  # a stream that was left before it began
    assert sorted(r.sample for r in requests) == list(range(order.params.n)), "samples"
    for request in requests:
        expected = order.expected[request.sample]
        output = request.output()
        assert request.finished, "never ended"
        assert output.prompt_token_ids == expected.prompt_token_ids, "prompt"
        if output.finish_reason == "aborted":
            _check_aborted(order, output, expected, order.free_texts[request.sample])
        else:
            _check_whole(output, expected)
        _check_logprobs(output, expected)
        assert len(request.timings.tokens_ms) == len(output.token_ids), "moments of tokens"


def _check_whole(output: GenerationOutput, expected: GenerationOutput) -> None:
    _same("tokens", output.token_ids, expected.token_ids)
    _same("finish reason", output.finish_reason, expected.finish_reason)
    _same("error", type(output.error), type(expected.error))
    _same("text", output.text, expected.text)
    by_hand = spelled(output)
    if by_hand is not None and output.finish_reason != "stop":
        _same("text against its bytes", output.text, by_hand)


def _check_aborted(
    order: Order, output: GenerationOutput, expected: GenerationOutput, free_text: str
) -> None:
    assert order.leaves, "aborted, and nobody asked for that"
    _same("tokens", output.token_ids, expected.token_ids[: len(output.token_ids)])
    text = (output.text or "").rstrip(REPLACEMENT)
    assert free_text.startswith(text), f"text {text!r} does not begin {free_text!r}"


def _check_logprobs(output: GenerationOutput, expected: GenerationOutput) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        ours: Any = getattr(output, name)
        wanted: Any = getattr(expected, name)
        _same(f"{name} asked for", ours is None, wanted is None)
        if ours is None:
            continue
        is_part = output.finish_reason == "aborted"
        if name == "logprobs":
            _same(name, len(ours), len(output.token_ids))
        elif not is_part:
            _same(name, len(ours), len(wanted))
        for mine, theirs in zip(ours, wanted, strict=False):
            if mine is None or theirs is None:
                assert mine is theirs or is_part, f"{name}: None in one place"
                continue
            _same(name, mine.token_id, theirs.token_id)
            _same(name, list(mine.top), list(theirs.top))
            pairs = zip(
                [mine.logprob, *mine.top.values()], [theirs.logprob, *theirs.top.values()],
                strict=True,
            )  # fmt: skip
            for a, b in pairs:
                assert math.isclose(a, b, abs_tol=LOGPROB_TOLERANCE), f"{name}: {a}, expected {b}"


# --- what the reader saw ---


def check_reader(one: Seen, requests: Sequence[Request]) -> None:
    """Results are the requests' own; deltas add up, none is lost or given twice."""
    final = {request.sample: request.output() for request in requests}
    for sample, output in enumerate(one.outputs or ()):
        _same("the reader's output", output, final[sample])
    if one.deltas is None:
        return
    tokens: dict[int, list[int]] = defaultdict(list)
    text: dict[int, str] = defaultdict(str)
    ended: set[int] = set()
    for delta in one.deltas:
        assert delta.index not in ended, "a delta after the last one"
        tokens[delta.index] += delta.token_ids
        text[delta.index] += delta.text
        if delta.output is not None:
            ended.add(delta.index)
            _same("the last delta's output", delta.output, final[delta.index])
    for sample, output in final.items():
        if sample in ended:
            _same("tokens of all deltas", tokens[sample], output.token_ids)
            _same("text of all deltas", text[sample], output.text)
        else:
            assert one.order.leaves == "abandon", "no last delta came"
            _same("tokens of deltas", tokens[sample], output.token_ids[: len(tokens[sample])])
            assert (output.text or "").startswith(text[sample]), "text of deltas"


# --- steps ---


def check_steps(lab: Lab, request: Request, events: Sequence[Event]) -> None:
    """Every step emits 1 to K+1 tokens, K of the step, the request and what was drafted; where it
    is known which drafts are right, all of them are taken: what a drafter's cache loses shows.
    """
    judged = lab.is_judged(request)
    emitted = request.emitted_per_step
    num_output = len(request.output_token_ids)
    missing = max(0, num_output - 1) - sum(emitted)
    if request.error is None:
        assert 0 <= missing <= request.num_preemptions, f"{missing} tokens came from no step"
    sizes, own = lab.engine.geometry, request.params.num_draft_tokens
    most = sizes.config.num_draft_tokens
    own = most if own is None else min(own, most)
    preemptions, position, there, num_plain = -1, 0, most, 0
    remaining = iter(emitted)
    num_left = len(emitted)
    for event in events:
        if event.num_preemptions != preemptions:
            preemptions, position = event.num_preemptions, event.num_prefilled
            there, num_plain = most, 0
        if event.kind == "replay":
            there, num_plain = most, 0
            continue
        count = next(remaining, None)
        if count is None:
            break  # launched before it was known that the request had ended
        num_left -= 1
        if event.count and num_plain:
            assert num_plain > NUM_KEPT, f"drafts after {num_plain} plain steps, and no replay"
            judged = False  # its drafter was given up
        limit = min(own, event.count, there)
        is_guided = request.guide is not None  # what it forces is drafted beside those
        most_now = min(own, event.count) if is_guided else limit
        assert 1 <= count <= most_now + 1, f"a step of K={event.count} emitted {count}, own K {own}"
        if judged:
            right = _num_right(lab, position, limit)
            is_last = not num_left and request.finish_reason != "aborted"
            is_more = is_guided and count > right + 1
            assert count == right + 1 or is_more or (is_last and count <= right), (
                f"a step of K={event.count} at {position} emitted {count}, expected {right + 1}"
            )
        position += count
        if event.count:
            there = most if sizes.finds_all else event.count
        elif sizes.needs_catch_up:
            num_plain += 1
        else:
            there, judged = most, False
    assert not num_left, "more tokens than steps"


def _num_right(lab: Lab, position: int, count: int) -> int:
    places = range(position + 1, position + 1 + count)
    return len(list(itertools.takewhile(lambda place: place not in lab.wrong, places)))


def check_stats(before: EngineStats, stats: EngineStats, recorder: Recorder) -> None:
    requests, num_launched = recorder.requests, recorder.num_decodes_by_k

    def grown(name: str) -> Any:
        return getattr(stats, name) - getattr(before, name)

    def calls(name: str) -> Counter[int]:
        return Counter(getattr(stats, name)) - Counter(getattr(before, name))

    steps = [count for request in requests for count in request.emitted_per_step]
    _same("stats: verify steps", grown("num_verify_steps"), len(steps))
    _same("stats: emitted", grown("num_emitted"), sum(steps))
    _same("stats: decodes by K", calls("num_decodes_by_k"), num_launched)
    in_buckets = calls("num_decodes_by_bucket").total()
    _same("stats: decodes by bucket", in_buckets, num_launched.total())
    num_preemptions = sum(request.num_preemptions for request in requests)
    _same("stats: preemptions", grown("num_preemptions"), num_preemptions)
    _same("stats: recompiles", stats.num_recompiles, 0)
    _same("stats: running, waiting", (stats.num_running, stats.num_waiting), (0, 0))
    _same("stats: free blocks", stats.num_free_blocks, stats.num_blocks)
    rates, mean = sum(stats.acceptance_rate_by_position), stats.acceptance_length
    assert not mean or math.isclose(rates, mean - 1, abs_tol=1e-9), "stats: acceptance rates"
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    num_cached = grown("num_cached_tokens")
    assert num_cached <= prompts, f"stats: {num_cached} cached tokens of prompts of {prompts}"


def _same(what: str, got: object, expected: object) -> None:
    assert got == expected, f"{what}: got {got!r}, expected {expected!r}"
