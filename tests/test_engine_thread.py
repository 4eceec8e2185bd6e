"""An engine on a thread of its own: many threads, event loops, readers that leave, faults."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from compilespec import SamplingParams
from compilespec.errors import EngineClosed, InvalidRequest
from compilespec.runtime.engine import Engine
from tests.fake_executor import FakeExecutor, geometry, toy_decode

SIZES = geometry()


def made(**options: object) -> Engine:
    return Engine(FakeExecutor(SIZES, hit_rate=0.6, **options))  # type: ignore[arg-type]


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **fields)  # type: ignore[arg-type]


def wanted(prompt: list[int], count: int) -> list[int]:
    return toy_decode(prompt, count, SIZES.vocab_size)


def prompts(number: int) -> list[list[int]]:
    draw = random.Random(number)
    return [[draw.randrange(259) for _ in range(draw.randint(1, 40))] for _ in range(number)]


def test_threads_submit_and_each_gets_its_own() -> None:
    """Eight threads, forty requests, results and streams."""
    wrong: list[str] = []

    def client(number: int) -> None:
        for index, prompt in enumerate(prompts(5 + number)[:5]):
            count = 3 + (number * 7 + index) % 20
            ticket = server.submit(prompt, params(count))
            if index % 2:
                tokens = list(ticket.result(60).token_ids)
            else:
                tokens = [token for delta in ticket for token in delta.token_ids]
            if tokens != wanted(prompt, count):
                wrong.append(f"client {number}, request {index}")

    with made().serve() as server:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_event_loops_stream_and_wait() -> None:
    async def stream(prompt: list[int]) -> list[int]:
        ticket = server.submit(prompt, params(12))
        return [token async for delta in ticket for token in delta.token_ids]

    async def both() -> tuple[list[list[int]], list[int]]:
        streams = await asyncio.gather(*(stream(prompt) for prompt in prompts(9)))
        output = await server.submit([5, 6], params(9)).wait()
        return streams, output.token_ids

    with made().serve() as server:
        streams, waited = asyncio.run(both())
    assert streams == [wanted(prompt, 12) for prompt in prompts(9)]
    assert waited == wanted([5, 6], 9)


def test_a_reader_that_leaves_aborts_and_one_that_never_reads_stops_nobody() -> None:
    with made(fail=lambda phase: time.sleep(0.002)).serve() as server:
        unread = [server.submit(prompt, params(30)) for prompt in prompts(6)]
        leaving = server.submit([1, 2, 3], params(60))
        for _ in leaving:
            break
        output = server.submit([9], params(20)).result(60)
        assert output.token_ids == wanted([9], 20)
        left = leaving.result(60)
        assert left.finish_reason == "aborted"
        assert left.token_ids == wanted([1, 2, 3], 60)[: len(left.token_ids)]
        assert len(left.token_ids) < 60
        for ticket, prompt in zip(unread, prompts(6), strict=True):
            assert ticket.result(60).token_ids == wanted(prompt, 30)


def test_abort_and_timeout_from_another_thread() -> None:
    with made(fail=lambda phase: time.sleep(0.005)).serve() as server:
        ticket = server.submit([1], params(80))
        with pytest.raises(TimeoutError, match="it goes on"):
            ticket.result(0.01)
        ticket.abort()
        assert ticket.result(60).finish_reason == "aborted"
        ticket.abort()  # twice is harmless


def test_a_failing_step_ends_those_that_ran_and_the_loop_goes_on() -> None:
    countdown = iter([False] * 4 + [True] + [False] * 10_000)

    def fail(phase: str) -> None:
        if next(countdown):
            raise RuntimeError("the device is gone")

    with made(fail=fail).serve() as server:
        tickets = [server.submit(prompt, params(40)) for prompt in prompts(7)]
        outputs = [ticket.result(60) for ticket in tickets]
        failed = [output for output in outputs if output.finish_reason == "error"]
        assert 1 <= len(failed) <= SIZES.max_batch_size
        assert all("device is gone" in str(output.error) for output in failed)
        for output, prompt in zip(outputs, prompts(7), strict=True):
            tokens = wanted(prompt, 40)
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert output.finish_reason == "error" or len(output.token_ids) == 40
        assert server.submit([4], params(5)).result(60).token_ids == wanted([4], 5)


def test_bad_requests_are_refused_where_they_are_made() -> None:
    with made().serve() as server:
        with pytest.raises(InvalidRequest):
            server.submit([], params(3))
        with pytest.raises(InvalidRequest, match="n=2"):
            server.submit([1], params(3, n=2, temperature=1.0))
        outputs = server.generate([[1, 2], [3]], params(6))
        assert [output.token_ids for output in outputs] == [wanted([1, 2], 6), wanted([3], 6)]


def test_closing_ends_all_and_refuses_more() -> None:
    engine = made(fail=lambda phase: time.sleep(0.005))
    server = engine.serve()
    tickets = [server.submit(prompt, params(50)) for prompt in prompts(9)]
    server.close()
    server.close()
    assert {ticket.result(60).finish_reason for ticket in tickets} == {"aborted"}
    with pytest.raises(EngineClosed):
        server.submit([1], params(3))


def test_an_engine_with_work_is_not_handed_over() -> None:
    engine = made()
    request = engine.submit([1, 2], params(4))
    with pytest.raises(InvalidRequest, match="before serve"):
        engine.serve()
    engine.abort(request)
    with engine.serve() as server:
        assert server.submit([1, 2], params(4)).result(60).token_ids == wanted([1, 2], 4)
