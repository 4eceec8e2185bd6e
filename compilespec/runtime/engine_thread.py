"""An engine on a thread of its own: submit, stream and abort from any thread, and from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from compilespec.errors import EngineClosed
from compilespec.runtime.keywords import check_keywords
from compilespec.runtime.outputs import Delta, GenerationOutput, now_ms
from compilespec.runtime.prompts import as_prompt_list
from compilespec.runtime.request import Request, RequestState
from compilespec.runtime.sampling_params import SamplingParams

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
        self._sleepers: dict[Callable[[], object], Callable[[], bool]] = {}  # in event loops

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
        await self._sleep(lambda: self.finished)
        return self.result()

    def abort(self) -> None:
        """End the request; it keeps the tokens it has."""
        self._abort(self)

    def __iter__(self) -> Iterator[Delta]:
        """What each step added, once each; leaving early aborts the request."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_news)
                    if not self._deltas:
                        return
                    delta = self._deltas.popleft()
                yield delta
        finally:
            if not self.finished:
                self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """`__iter__` for event loops."""
        try:
            while True:
                await self._sleep(self._has_news)
                with self._changed:
                    if not self._deltas:
                        if self.finished:
                            return
                        continue  # another reader took it
                    delta = self._deltas.popleft()
                yield delta
        finally:
            if not self.finished:
                self.abort()

    def give(self, delta: Delta) -> None:
        """Called by the engine's thread: more, or with `delta.output` the end."""
        with self._changed:
            self._deltas.append(delta)
            self._output = delta.output
            self._changed.notify_all()
            awake = [wake for wake, until in self._sleepers.items() if until()]
            for wake in awake:
                del self._sleepers[wake]
        for wake in awake:
            wake()

    def _has_news(self) -> bool:
        return bool(self._deltas) or self.finished

    async def _sleep(self, until: Callable[[], bool]) -> None:
        """Let the event loop go on until `until` holds, which `give` asks with the lock held."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if until():
                return
            self._sleepers[wake] = until
        try:
            await event.wait()
        finally:
            with self._changed:
                self._sleepers.pop(wake, None)


class ServedEngine(Protocol):
    """What a thread asks of the engine that it owns: see `Engine`."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""

    def make_request(self, prompt: Any, params: SamplingParams | None, priority: int) -> Request:
        """The request of one prompt, not queued."""

    def make_samples(self, prompt: Any, params: SamplingParams | None) -> list[Request]:
        """The requests of one prompt, `n` of one seed, not queued."""

    def enqueue(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> object:
        """Run one step."""

    def abort(self, request: Request) -> None:
        """End a request now."""

    def take_delta(self, request: Request, index: int) -> Delta | None:
        """What no earlier call returned."""

    def close(self) -> None:
        """Abort what runs and free the device buffers."""


class EngineThread:
    """Runs the loop of an engine, which it owns: use the engine through this object alone.

    Every method may be called from any thread.  A step or an abort that raises ends the requests
    that were running with that error, as `Engine.step` says; those that waited go on.  Whatever
    happens, every ticket ends.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._arrived: deque[Ticket] = deque()
        self._to_abort: deque[Ticket] = deque()
        self._open: dict[Request, Ticket] = {}  # the loop's own
        self._is_closing = False
        self._is_closed = False  # whether `close` was called
        self._failure: EngineClosed | None = None  # why the loop ended, or closing failed
        self._untold: EngineClosed | None = None  # the same, where no ticket ended with it
        self._thread = threading.Thread(target=self._run, name="compilespec-engine", daemon=True)
        self._thread.start()

    @check_keywords
    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Ticket:
        """Queue one prompt.  Iterate over the ticket (`for`, `async for`), or ask for its result.

        Raises: InvalidRequest, NotSupported (nothing was queued), EngineClosed.
        """
        self._check_open()
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
        self._check_open()
        each, _ = as_prompt_list(prompts)
        samples = [one for prompt in each for one in self._engine.make_samples(prompt, params)]
        tickets = [Ticket(request, self._abort) for request in samples]
        self._queue(tickets)
        return [ticket.result() for ticket in tickets]

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, close the engine, and wait for its thread.  Twice is harmless.

        Args:
            timeout: seconds to wait for the step that runs.
        Raises:
            EngineClosed: the engine could not be closed, or its thread had failed before.  Where
                tickets were open they have ended with this error, and it is not raised here, too.
                Another call tries again what failed, and raises what `Engine.close` raises.
            TimeoutError: the step goes on; the engine is closed after it.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the step has not ended within {timeout} s; closing comes after it")
        with self._wake:
            if self._is_closed:
                self._engine.close()
            self._is_closed = True
            failure, self._untold = self._untold, None
            if failure is not None:
                raise failure

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
            self._check_open()
            self._arrived.extend(tickets)
            self._wake.notify()

    def _check_open(self) -> None:
        if self._is_closing:
            why = self._failure or "the engine was closed"
            raise EngineClosed(f"{why}; make another with compilespec.compile()")

    def _abort(self, ticket: Ticket) -> None:
        with self._wake:
            self._to_abort.append(ticket)
            self._wake.notify()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._attempt(self._engine.step)
                self._hand_out()
        except BaseException as error:
            logger.exception("the engine's thread failed; every request ends with that")
            self._failure = _told("the engine's thread failed", error)
        finally:
            self._end_all()

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
            self._attempt(self._engine.abort, ticket.request)
        return True

    def _attempt(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call the engine; where that raises, what was running has ended with the error."""
        try:
            call(*arguments)
        except Exception:
            logger.exception("a step failed; the requests that were running ended with it")

    def _hand_out(self) -> None:
        for request, ticket in list(self._open.items()):
            try:
                delta = self._engine.take_delta(request, request.sample)
            except Exception as error:
                logger.exception("the output of request %d cannot be read; it ends", request.id)
                self._attempt(self._engine.abort, request)
                request.output_text = None
                _end(request, request.error or error)
                delta = self._engine.take_delta(request, request.sample)
            if delta is not None:
                ticket.give(delta)
                if delta.output is not None:
                    del self._open[request]

    def _end_all(self) -> None:
        """Close the engine; whatever comes of that, every ticket ends."""
        with self._wake:
            self._is_closing = True
            self._open |= {ticket.request: ticket for ticket in self._arrived}
            self._arrived.clear()
        try:
            self._engine.close()
        except BaseException as error:
            logger.exception("the engine could not be closed")
            self._failure = _told("closing the engine failed, close() tries again", error)
        self._untold = self._failure
        for request in self._open:
            is_cut = self._failure is not None and request.finish_reason == "aborted"
            if is_cut or not request.finished:
                _end(request, self._failure)
                self._untold = None
        self._hand_out()


def _end(request: Request, error: Exception | None) -> None:
    """End a request that the engine does not run, or no longer."""
    request.state, request.error = RequestState.FINISHED, error
    request.finish_reason = "aborted" if error is None else "error"
    request.timings.finished_ms = now_ms()


def _told(what: str, error: BaseException) -> EngineClosed:
    message = (str(error).splitlines() or [""])[0]
    told = EngineClosed(f"{what} ({type(error).__name__}: {message})")
    told.__cause__ = error
    return told
