"""An engine on a thread of its own: submit, stream and abort from any thread, and from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from compilespec.errors import EngineClosed
from compilespec.runtime.keywords import check_keywords
from compilespec.runtime.prompts import as_prompt_list
from compilespec.runtime.request import GenerationOutput, Request
from compilespec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Delta, Engine

logger = logging.getLogger("compilespec")


class Ticket:
    """One submitted prompt: wait for its result, or read it as it comes.

    What is not read waits here; the engine never waits for a reader.
    """

    def __init__(self, request: Request, abort: Callable[[Ticket], None]) -> None:
        self.request = request
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._output: GenerationOutput | None = None
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []  # of readers that wait in event loops

    @property
    def finished(self) -> bool:
        return self._output is not None

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the end.

        Args:
            timeout: seconds.
        Raises: TimeoutError; the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._output is not None, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s; it goes on")
            assert self._output is not None
            return self._output

    async def wait(self) -> GenerationOutput:
        """`result` for event loops.  Cancelling it leaves the request alone."""
        while self._output is None:
            await self._news()
        return self._output

    def abort(self) -> None:
        """End the request; it keeps the tokens it has."""
        self._abort(self)

    def __iter__(self) -> Iterator[Delta]:
        """What each step added, once each; leaving early aborts the request."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._deltas or self._output is not None)
                    delta = self._deltas.popleft() if self._deltas else None
                if delta is None:
                    return
                yield delta
        finally:
            if not self.finished:
                self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """`__iter__` for event loops."""
        try:
            while self._deltas or not self.finished:
                if self._deltas:
                    yield self._deltas.popleft()
                else:
                    await self._news()
        finally:
            if not self.finished:
                self.abort()

    def give(self, delta: Delta) -> None:
        """Called by the engine's thread: more, or with `delta.output` the end."""
        with self._changed:
            self._deltas.append(delta)
            self._output = delta.output
            self._changed.notify_all()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def _news(self) -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self._deltas or self.finished:
                return
            self._wakers.append(wake)
        await event.wait()


class EngineThread:
    """Runs the loop of an engine, which it owns: use the engine through this object alone.

    Every method may be called from any thread.  A step that raises ends the requests that were
    running with that error, as `Engine.step` says; those that waited go on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._arrived: deque[Ticket] = deque()
        self._to_abort: deque[Ticket] = deque()
        self._open: dict[Request, Ticket] = {}  # the loop's own
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="compilespec-engine", daemon=True)
        self._thread.start()

    @check_keywords
    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Ticket:
        """Queue one prompt.  Iterate over the ticket (`for`, `async for`), or ask for its result.

        Raises: InvalidRequest, NotSupported (nothing was queued), EngineClosed.
        """
        ticket = Ticket(self._engine.make_request(prompt, params, priority), self._abort)
        self._queue([ticket])
        return ticket

    @check_keywords
    def generate(
        self, prompts: Any, params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Wait for all prompts, given as to `Engine.generate`; `n` outputs of each, in order.

        Raises: as `submit`, before anything was queued.
        """
        each, _ = as_prompt_list(prompts)
        samples = [one for prompt in each for one in self._engine.make_samples(prompt, params)]
        tickets = [Ticket(request, self._abort) for request in samples]
        self._queue(tickets)
        return [ticket.result() for ticket in tickets]

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, close the engine, and wait for its thread.  Twice is harmless."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _queue(self, tickets: Sequence[Ticket]) -> None:
        with self._wake:
            if self._is_closing or not self._thread.is_alive():
                raise EngineClosed("the engine was closed; make another with compilespec.compile()")
            self._arrived.extend(tickets)
            self._wake.notify()

    def _abort(self, ticket: Ticket) -> None:
        with self._wake:
            self._to_abort.append(ticket)
            self._wake.notify()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_orders():
                try:
                    self._engine.step()
                except Exception:
                    logger.exception("a step failed; the requests that were running ended with it")
                self._hand_out()
        finally:
            with self._wake:
                self._is_closing = True
                tickets = list(self._arrived)
                self._arrived.clear()
            for ticket in tickets:
                self._open[ticket.request] = ticket
                self._engine.enqueue(ticket.request)
            self._engine.close()
            self._hand_out()

    def _take_orders(self) -> bool:
        """Wait for something to do; false once the engine is to be closed."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._arrived or self._to_abort or self._is_closing or self._engine.has_work
            )
            if self._is_closing:
                return False
            arrived, self._arrived = self._arrived, deque()
            to_abort, self._to_abort = self._to_abort, deque()
        for ticket in arrived:
            self._open[ticket.request] = ticket
            self._engine.enqueue(ticket.request)
        for ticket in to_abort:
            self._engine.abort(ticket.request)
        return True

    def _hand_out(self) -> None:
        for request, ticket in list(self._open.items()):
            delta = self._engine.take_delta(request, request.sample)
            if delta is not None:
                ticket.give(delta)
                if delta.output is not None:
                    del self._open[request]
