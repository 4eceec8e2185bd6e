"""An engine on its own thread: many threads, event loops, readers that leave, faults."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

import pytest

from compilespec import SamplingParams
from compilespec.errors import EngineClosed, InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.outputs import Delta
from compilespec.runtime.request import Request
from compilespec.runtime.ticket import Ticket
from tests.support.fake_executor import FakeExecutor, engine_over, geometry, toy_decode
from tests.support.gates import Gate

SIZES = geometry()


def made(**options: object) -> Engine:
    return Engine(FakeExecutor(SIZES, hit_rate=0.6, **options))  # type: ignore[arg-type]


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **fields)  # type: ignore[arg-type]


def wanted(prompt: list[int], count: int) -> list[int]:
    return toy_decode(prompt, count, SIZES.config.vocab_size)


def prompts(number: int) -> list[list[int]]:
    draw = random.Random(number)
    return [[draw.randrange(259) for _ in range(draw.randint(1, 40))] for _ in range(number)]


def delta_of(ticket: Ticket, *tokens: int, ends: bool = False) -> Delta:
    output = ticket.request.output() if ends else None
    return Delta(index=0, token_ids=tokens, text="", output=output)


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
    gate = Gate(6)
    with made(fail=gate).serve() as server:
        leaving = server.submit([1, 2, 3], params(60))
        unread = [server.submit(prompt, params(30)) for prompt in prompts(6)]
        for _ in leaving:
            break
        gate.allow()
        output = server.submit([9], params(20)).result(60)
        assert output.token_ids == wanted([9], 20)
        left = leaving.result(60)
        assert left.finish_reason == "aborted"
        assert left.token_ids == wanted([1, 2, 3], 60)[: len(left.token_ids)]
        assert len(left.token_ids) < 60
        for ticket, prompt in zip(unread, prompts(6), strict=True):
            assert ticket.result(60).token_ids == wanted(prompt, 30)


def test_abort_and_timeout_from_another_thread() -> None:
    gate = Gate(3)
    with made(fail=gate).serve() as server:
        ticket = server.submit([1], params(80))
        assert gate.waits.wait(60)
        with pytest.raises(TimeoutError, match="it goes on"):
            ticket.result(0)
        ticket.abort()
        gate.allow()
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
        assert 1 <= len(failed) <= SIZES.config.max_batch_size
        assert all("device is gone" in str(output.error) for output in failed)
        for output, prompt in zip(outputs, prompts(7), strict=True):
            tokens = wanted(prompt, 40)
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert output.finish_reason == "error" or len(output.token_ids) == 40
        assert server.submit([4], params(5)).result(60).token_ids == wanted([4], 5)


def test_a_failing_abort_is_survived_as_a_failing_step_is() -> None:
    """With overlap an abort reads what is in flight, which may fail."""
    gate, faults = Gate(4), list[Exception]()

    def fail(phase: str) -> None:
        gate(phase)
        if phase == "collect" and faults:
            executor._in_flight.clear()  # what was launched is lost
            raise faults.pop()

    executor = FakeExecutor(geometry(max_batch_size=1), fail=fail)
    engine = engine_over(executor, overlap=True)
    abort = engine.abort

    def abort_with_fault(request: Request) -> None:
        faults.append(RuntimeError("the device is gone"))
        abort(request)

    engine.abort = abort_with_fault  # type: ignore[method-assign]
    with engine.serve() as server:
        first, second = server.submit([1], params(80)), server.submit([2], params(20))
        assert gate.waits.wait(60)
        first.abort()
        gate.allow()
        assert first.result(60).finish_reason == "aborted"
        assert second.result(60).token_ids == wanted([2], 20)
        assert not faults
        assert server.submit([3], params(5)).result(60).token_ids == wanted([3], 5)


def test_an_output_that_cannot_be_read_ends_its_request_alone() -> None:
    engine = made()
    take_delta, faults = engine.take_delta, [RuntimeError("no text")]

    def take(request: Request, index: int = 0) -> Delta | None:
        if request.prompt_token_ids == (1,) and faults:
            raise faults.pop()
        return take_delta(request, index)

    engine.take_delta = take  # type: ignore[method-assign]
    with engine.serve() as server:
        tickets = [server.submit([k], params(20)) for k in (1, 2)]
        first, second = (ticket.result(60) for ticket in tickets)
    assert (first.finish_reason, str(first.error)) == ("error", "no text")
    streamed = [token for delta in tickets[0] for token in delta.token_ids]
    assert streamed == first.token_ids
    assert second.token_ids == wanted([2], 20)


def test_bad_requests_are_refused_where_they_are_made() -> None:
    with made().serve() as server:
        with pytest.raises(InvalidRequest):
            server.submit([], params(3))
        with pytest.raises(InvalidRequest, match="n=2"):
            server.submit([1], params(3, n=2, temperature=1.0))
        outputs = server.generate([[1, 2], [3]], params(6))
        assert [output.token_ids for output in outputs] == [wanted([1, 2], 6), wanted([3], 6)]


def test_closing_ends_all_and_refuses_more() -> None:
    gate = Gate(5)
    engine = made(fail=gate)
    server = engine.serve()
    tickets = [server.submit(prompt, params(50)) for prompt in prompts(9)]
    assert gate.waits.wait(60)
    late = server.submit([1], params(3))  # the engine's thread has not seen it
    with pytest.raises(TimeoutError, match="closing comes after it"):
        server.close(timeout=0)
    with pytest.raises(EngineClosed):
        server.submit([1], params(3))
    gate.allow()
    server.close()
    server.close()
    assert {ticket.result(60).finish_reason for ticket in [*tickets, late]} == {"aborted"}
    assert engine._executor.closed


def test_a_script_that_ends_with_an_exception_closes_what_still_serves() -> None:
    script = textwrap.dedent("""
        from compilespec import SamplingParams
        from compilespec.runtime.engine import Engine
        from tests.support.fake_executor import FakeExecutor, geometry

        class Executor(FakeExecutor):
            def close(self):
                print("closed")

        server = Engine(Executor(geometry(max_seq_len=4000, num_blocks=500))).serve()
        ticket = server.submit([1], SamplingParams(max_new_tokens=3900, ignore_eos=True))
        next(iter(ticket))
        raise ValueError("my mistake")
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "closed\n"
    assert done.stderr.rstrip().endswith("ValueError: my mistake")
    assert done.returncode == 1


class Unclosable(FakeExecutor):
    """Its `close` raises as often as the test says."""

    faults = 0

    def close(self) -> None:
        if self.faults:
            self.faults -= 1
            raise OSError("no space left on device")
        super().close()


def test_closing_that_fails_ends_every_ticket_and_can_be_done_again() -> None:
    gate = Gate(5)
    executor = Unclosable(SIZES, fail=gate)
    executor.faults = 2
    server = Engine(executor).serve()
    short = server.submit([7], params(1))
    tickets = [server.submit(prompt, params(50)) for prompt in prompts(9)]
    assert short.result(60).finish_reason == "length"
    with pytest.raises(TimeoutError):
        server.close(timeout=0)
    gate.allow()
    server.close()  # the tickets tell
    for ticket in tickets:
        output = ticket.result(60)
        assert output.finish_reason == "error"
        assert re.search(r"failed.*\(OSError: no space left", str(output.error))
        assert "\n" not in str(output.error)
    with pytest.raises(OSError, match="no space left"):
        server.close()
    assert not executor.closed
    server.close()
    assert executor.closed
    server.close()


def test_closing_that_fails_is_raised_where_no_ticket_tells() -> None:
    executor = Unclosable(SIZES)
    executor.faults = 1
    server = Engine(executor).serve()
    with pytest.raises(EngineClosed, match=r"failed.*\(OSError: no space left"):
        server.close()
    server.close()
    assert executor.closed


def test_a_thread_that_fails_ends_every_ticket_and_says_why() -> None:
    """By what is no `Exception`: a callback that leaves the program, say."""
    gate = Gate(5)

    def fail(phase: str) -> None:
        gate(phase)
        if gate.waits.is_set():
            raise SystemExit(3)

    executor = FakeExecutor(SIZES, fail=fail)
    server = Engine(executor).serve()
    tickets = [server.submit(prompt, params(50)) for prompt in prompts(9)]
    assert gate.waits.wait(60)
    late = server.submit([1], params(3))
    gate.allow()
    for ticket in [*tickets, late]:
        output = ticket.result(60)
        assert output.finish_reason == "error"
        assert "SystemExit" in str(output.error)
    with pytest.raises(EngineClosed, match=r"SystemExit: 3.*make another"):
        server.submit([1])
    server.close()
    assert executor.closed
    server.close()


def test_an_engine_with_work_is_not_handed_over() -> None:
    engine = made()
    request = engine.submit([1, 2], params(4))
    with pytest.raises(InvalidRequest, match="before serve"):
        engine.serve()
    engine.abort(request)
    with engine.serve() as server:
        assert server.submit([1, 2], params(4)).result(60).token_ids == wanted([1, 2], 4)


def test_a_served_engine_is_used_through_its_thread_alone() -> None:
    engine = made()
    begun = engine.stream([1, 2], params(4))
    with engine.serve() as server:
        for call in (engine.generate, engine.stream, engine.submit):
            with pytest.raises(InvalidRequest, match="what serve\\(\\) returned"):
                call([1, 2], params(4))
        with pytest.raises(InvalidRequest, match="what serve\\(\\) returned"):
            engine.serve()
        with pytest.raises(InvalidRequest, match="what serve\\(\\) returned"):
            next(begun)
        assert server.submit([1, 2], params(4)).result(60).token_ids == wanted([1, 2], 4)
    with pytest.raises(EngineClosed):
        engine.generate([1, 2], params(4))


def test_awaiting_a_ticket_leaves_the_event_loop_free_and_wakes_it_once() -> None:
    """The program makes a call for each beat of the loop, which must go on beating."""
    gate, wakes = Gate(), count()

    async def beat(ticket: Ticket) -> None:
        while not ticket.finished:
            if gate.waits.is_set():
                gate.waits.clear()
                gate.allow(1)
            await asyncio.sleep(0)

    async def wait() -> list[int]:
        loop = asyncio.get_running_loop()
        call_soon_threadsafe: Callable[..., object] = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            next(wakes)
            return call_soon_threadsafe(*arguments)

        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
        ticket = server.submit([1, 2, 3], params(30))
        output, _ = await asyncio.gather(ticket.wait(), beat(ticket))
        return output.token_ids

    with made(fail=gate).serve() as server:
        assert asyncio.run(wait()) == wanted([1, 2, 3], 30)
    assert next(wakes) == 1


def test_a_cancelled_wait_leaves_the_request_and_nothing_behind() -> None:
    gate = Gate(4)

    async def wait() -> list[int]:
        ticket = server.submit([1, 2, 3], params(30))
        await asyncio.to_thread(gate.waits.wait, 60)  # deltas lie there unread
        assert ticket._deltas
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket.wait(), 1e-3)
        assert not ticket._sleepers
        gate.allow()
        return (await asyncio.wait_for(ticket.wait(), 60)).token_ids

    with made(fail=gate).serve() as server:
        assert asyncio.run(wait()) == wanted([1, 2, 3], 30)


def test_the_last_delta_may_come_while_a_loop_looks_for_it() -> None:
    """The engine gives it right after the reader saw that there was none."""
    with made().serve() as server:
        request = server.submit([1], params(1)).request
    ticket = Ticket(request, lambda ticket: None)
    giver: list[threading.Thread] = []

    class Watched(deque[Delta]):
        def __len__(self) -> int:
            length = super().__len__()
            if not giver and not length:
                tried = threading.Event()
                giver.append(threading.Thread(target=give, args=(tried,)))
                giver[0].start()
                tried.wait()
            return length

    def give(tried: threading.Event) -> None:
        if ticket._changed.acquire(blocking=False):  # where nobody holds the lock
            ticket.give(delta_of(ticket, 5, ends=True))
            ticket._changed.release()
            tried.set()
        else:
            tried.set()
            ticket.give(delta_of(ticket, 5, ends=True))

    ticket._deltas = Watched()

    async def read() -> list[int]:
        return [token async for delta in ticket for token in delta.token_ids]

    assert asyncio.run(read()) == [5]
    giver[0].join()


def test_readers_in_one_loop_share_the_deltas() -> None:
    gate = Gate()

    async def read(ticket: Ticket) -> list[int]:
        return [token async for delta in ticket for token in delta.token_ids]

    async def both() -> list[list[int]]:
        ticket = server.submit([1, 2], params(20))
        readers = [asyncio.create_task(read(ticket)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.allow()
        return list(await asyncio.gather(*readers))

    with made(fail=gate).serve() as server:
        first, second = asyncio.run(both())
    assert sorted(first + second) == sorted(wanted([1, 2], 20))
