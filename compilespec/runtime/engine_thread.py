"""An engine on its own thread: submit, stream and abort from any thread, and from asyncio."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol

from compilespec.errors import EngineClosed, QueueFull
from compilespec.runtime.adapters import Adapters
from compilespec.runtime.executor import Geometry
from compilespec.runtime.forks import Process
from compilespec.runtime.keywords import check_keywords
from compilespec.runtime.outputs import Delta, GenerationOutput, now_ms
from compilespec.runtime.prompts import as_prompt_list
from compilespec.runtime.request import Request
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.stats import EngineStats
from compilespec.runtime.ticket import Ticket, WakeUps
from compilespec.runtime.weight_updates import Given, UpdatePolicy, Write

logger = logging.getLogger("compilespec")

# From one call of event loops to the next, but where a request has ended: what they do with tokens
# takes time of the cores and the interpreter that steps need, and steps may be shorter than this.
WAKE_UP_PAUSE_MS = 3.0
EXIT_TIMEOUT_S = 60  # that the interpreter waits at its exit for a step that runs


class ServedEngine(Protocol):
    """The interface of the engine that a thread owns: see `Engine`."""

    geometry: Geometry

    @property
    def has_work(self) -> bool:
        """True where any request is unfinished."""

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""

    def make_request(self, prompt: Any, params: SamplingParams | None, priority: int) -> Request:
        """The request of one prompt, not queued."""

    def make_samples(
        self, prompt: Any, params: SamplingParams | None, priority: int
    ) -> list[Request]:
        """The requests of one prompt, `n` of one seed, not queued."""

    def enqueue(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> object:
        """Run one step."""

    def abort(self, request: Request) -> None:
        """End a request now."""

    def take_delta(self, request: Request, index: int) -> Delta | None:
        """What no earlier call returned."""

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights so far."""

    @property
    def has_begun(self) -> bool:
        """True where a request has begun and not ended."""

    def admit_new(self, admits: bool) -> None:
        """Let requests that have not begun be admitted, or wait."""

    def check_update(
        self, weights: Given | None, draft: Given | None, policy: UpdatePolicy
    ) -> list[Write]:
        """The checked values of an update of the weights."""

    def apply_update(self, update: Sequence[Write]) -> None:
        """Copy the values, between two steps."""

    def fall_asleep(self) -> int:
        """Give the memory of the caches back."""

    def wake_up(self) -> None:
        """Serve again."""

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may ask for."""

    def close(self) -> None:
        """Abort what runs and free the device buffers."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """The state of an engine's thread."""

    state: Literal["ready", "draining", "closed", "failed"]
    """"failed": the thread ended with an error, or the engine could not be closed."""

    num_open: int
    """Requests that have not ended."""

    step_ms: float
    """How long the step that runs has been running; 0.0 between steps."""

    failure: str | None = None
    """The reason why it failed."""


class EngineThread:
    """Runs the loop of an engine, which it owns: use the engine through this object alone.

    Every method may be called from any thread.  A step or an abort that raises ends the running
    requests with that error, as `Engine.step` says; waiting ones go on.  Every ticket ends in any
    case.  Threads still open at the interpreter's exit are closed then.
    """

    _all: ClassVar[weakref.WeakSet[EngineThread]] = weakref.WeakSet()  # of this process

    def __init__(self, engine: ServedEngine, max_waiting: int | None = None) -> None:
        """Args: max_waiting: requests that may wait beyond those that run; None: no limit."""
        self._engine, self._max_waiting = engine, max_waiting
        self._process = Process()
        lock = threading.RLock()
        self._wake = threading.Condition(lock)  # of the engine's thread
        self._idle = threading.Condition(lock)  # notified once no ticket is open
        self._num_open = 0
        self._step_began_ms: float | None = None
        self._is_draining = False
        self._arrived: deque[Ticket] = deque()
        self._to_abort: deque[Ticket] = deque()
        self._to_do: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._once_idle: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open: dict[Request, Ticket] = {}  # the loop's own
        self._wake_ups, self._woke_ms = WakeUps(), 0.0  # the loop's own, too
        self._is_closing = False
        self._is_closed = False  # whether `close` was called
        self._failure: EngineClosed | None = None  # why the loop or closing failed
        self._untold: EngineClosed | None = None  # the same, if no ticket ended with it
        self._thread = threading.Thread(target=self._run, name="compilespec-engine", daemon=True)
        self._thread.start()
        self._all.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Close the open threads: one that the interpreter's exit cuts off inside native code
        crashes the process.
        """
        for thread in list(cls._all):
            if thread._thread.is_alive():
                try:
                    thread.close(EXIT_TIMEOUT_S)
                except (EngineClosed, TimeoutError) as error:
                    logger.warning("an engine was not closed at exit: %s", error)

    @check_keywords
    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Ticket:
        """Queue one prompt.  Iterate over the ticket (`for`, `async for`), or wait for its result.

        Raises: InvalidRequest, NotSupported, QueueFull (nothing was queued), EngineClosed.
        """
        self._check_room(1)
        ticket = Ticket(self._engine.make_request(prompt, params, priority), self._abort)
        self._queue([ticket])
        return ticket

    @check_keywords
    def submit_samples(
        self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[Ticket]:
        """`submit` for `SamplingParams(n=)`: a ticket for each of the samples, in order."""
        self._check_room(1 if params is None else params.n)
        samples = self._engine.make_samples(prompt, params, priority)
        tickets = [Ticket(request, self._abort) for request in samples]
        self._queue(tickets)
        return tickets

    @check_keywords
    def generate(
        self, prompts: Any, params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Wait for all prompts, given as to `Engine.generate`; `n` outputs of each, in order.

        Raises: as `submit`, before anything was queued.
        """
        self._check_open()
        each, _ = as_prompt_list(prompts)
        samples = [one for prompt in each for one in self._engine.make_samples(prompt, params, 0)]
        tickets = [Ticket(request, self._abort) for request in samples]
        self._queue(tickets)
        return [ticket.result() for ticket in tickets]

    @check_keywords
    def load_adapter(self, name: str, directory: str | Path) -> None:
        """`Engine.load_adapter`, between two steps; the files are read while steps run."""
        self._check_open()
        adapter = self._engine.adapters.read(directory)
        self._between_steps(lambda: self._engine.adapters.put(name, adapter))

    @check_keywords
    def drop_adapter(self, name: str) -> None:
        """`Engine.drop_adapter`."""
        self._check_open()
        self._between_steps(lambda: self._engine.adapters.drop(name))

    @check_keywords
    def update_weights(
        self,
        weights: Given | None,
        draft: Given | None = None,
        policy: UpdatePolicy = "finish",
    ) -> int:
        """`Engine.update_weights`, between two steps; the values are checked while steps run."""
        self._check_open()
        update, version = self._engine.check_update(weights, draft, policy), 0

        def change() -> None:
            nonlocal version
            self._engine.apply_update(update)
            version = self._engine.weights_version

        self._between_steps(change, once_idle=policy == "finish")
        return version

    @property
    def weights_version(self) -> int:
        """`Engine.weights_version`."""
        return self._engine.weights_version

    def sleep(self) -> int:
        """`Engine.sleep`, between two steps."""
        self._check_open()
        given = 0

        def change() -> None:
            nonlocal given
            given = self._engine.fall_asleep()

        self._between_steps(change)
        return given

    def wake(self) -> None:
        """`Engine.wake`."""
        self._check_open()
        self._between_steps(self._engine.wake_up)

    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that requests may ask for."""
        return self._engine.adapters.names

    def _between_steps(self, change: Callable[[], None], *, once_idle: bool = False) -> None:
        """Wait until the engine's thread has run a call between two steps.  Raises: its errors,
        EngineClosed.

        Args: once_idle: requests that have begun end first; others begin after it.
        """
        done: Future[None] = Future()
        with self._wake:
            self._check_open()
            (self._once_idle if once_idle else self._to_do).append((change, done))
            self._wake.notify()
        done.result()

    def stats(self) -> EngineStats:
        """`Engine.stats`, also while a step runs."""
        return self._engine.stats()

    def health(self) -> EngineHealth:
        """The state of the thread; waits for no step."""
        self._process.check()
        began = self._step_began_ms
        with self._wake:
            if self._failure is not None:
                state: Literal["ready", "draining", "closed", "failed"] = "failed"
            elif self._is_closing:
                state = "closed"
            else:
                state = "draining" if self._is_draining else "ready"
            return EngineHealth(
                state=state,
                num_open=self._num_open,
                step_ms=0.0 if began is None else now_ms() - began,
                failure=None if self._failure is None else str(self._failure),
            )

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until the present ones have ended.

        Args:
            timeout: seconds.
        Returns: whether all have ended; `close` aborts the others.
        """
        self._process.check()
        with self._wake:
            self._is_draining = True
            return self._idle.wait_for(lambda: self._num_open == 0, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, close the engine, and wait for its thread.  Twice is harmless.

        Args:
            timeout: seconds to wait for the step that runs.
        Raises:
            EngineClosed: the engine could not be closed, or its thread had failed before.  If
                tickets were open, they ended with this error, and it is not raised here.  Another
                call retries the failed part, and raises the errors of `Engine.close`.
            TimeoutError: the step goes on; the engine is closed after it.
        In a forked child nothing is done.
        """
        if self._process.is_another:
            return
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
            self._check_room(len(tickets))
            self._num_open += len(tickets)
            self._arrived.extend(tickets)
            self._wake.notify()

    def _check_room(self, count: int) -> None:
        """Raises: EngineClosed; QueueFull where `count` more requests would be too many."""
        self._check_open()
        if self._max_waiting is None:
            return
        most = self._max_waiting + self._engine.geometry.config.max_batch_size
        if self._num_open + count > most:
            raise QueueFull(
                f"{self._num_open} requests are open: expected at most {most} with the {count} "
                f"that came (max_batch_size and max_waiting); try again when some have ended"
            )

    def _check_open(self) -> None:
        self._process.check()
        if self._is_closing:
            why = self._failure or "the engine was closed"
            raise EngineClosed(f"{why}; make another with compilespec.compile()")
        if self._is_draining:
            raise EngineClosed("the engine ends what it has, and takes no more; try another")

    def _abort(self, ticket: Ticket) -> None:
        self._process.check()
        with self._wake:
            self._to_abort.append(ticket)
            self._wake.notify()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step_began_ms = now_ms()
                self._attempt(self._engine.step)
                self._step_began_ms = None
                self._hand_out()
        except BaseException as error:
            logger.exception("the engine's thread failed; every request ends with that")
            self._failure = _told("the engine's thread failed", error)
        finally:
            self._end_all()

    def _take_orders(self) -> bool:
        """Wait for work; false once the engine is to be closed."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._arrived
                    or self._to_abort
                    or self._to_do
                    or self._once_idle
                    or self._is_closing
                    or self._engine.has_work
                )
            )
            if self._is_closing:
                return False
            to_do, self._to_do = self._to_do, deque()
            arrived, self._arrived = self._arrived, deque()
            to_abort, self._to_abort = self._to_abort, deque()
        _run_all(to_do)
        for ticket in arrived:
            self._open[ticket.request] = ticket
            self._engine.enqueue(ticket.request)
        for ticket in to_abort:
            self._attempt(self._engine.abort, ticket.request)
        self._run_once_idle()
        return True

    def _run_once_idle(self) -> None:
        """Run what waits for the requests that have begun, once they have ended."""
        with self._wake:
            is_idle = not self._engine.has_begun
            waiting = self._once_idle if is_idle else deque()
            self._once_idle = deque() if is_idle else self._once_idle
            self._engine.admit_new(not self._once_idle)
        _run_all(waiting)

    def _attempt(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call the engine; if it raises, the running requests have ended with the error."""
        try:
            call(*arguments)
        except Exception:
            logger.exception("a step failed; the requests that were running ended with it")

    def _hand_out(self) -> None:
        has_ended = False
        for request, ticket in list(self._open.items()):
            try:
                delta = self._engine.take_delta(request, request.sample)
            except Exception as error:
                logger.exception("the output of request %d cannot be read; it ends", request.id)
                self._attempt(self._engine.abort, request)
                request.output_text = None
                request.end(request.error or error)
                delta = self._engine.take_delta(request, request.sample)
            if delta is None:
                continue
            if delta.output is not None:
                has_ended = True
                del self._open[request]
            with self._wake:  # a reader that submits again at its end must find room
                self._num_open -= delta.output is not None
                ticket.give(delta, self._wake_ups)
                self._idle.notify_all()
        now = now_ms()
        if has_ended or now - self._woke_ms >= WAKE_UP_PAUSE_MS:
            self._wake_ups.send()
            self._woke_ms = now

    def _end_all(self) -> None:
        """Close the engine and end every ticket in any case."""
        with self._wake:
            self._is_closing = True
            for _, done in (*self._to_do, *self._once_idle):
                done.set_exception(EngineClosed("the engine was closed before it came to this"))
            self._to_do.clear()
            self._once_idle.clear()
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
                request.end(self._failure)
                self._untold = None
        self._hand_out()


atexit.register(EngineThread.close_all)
os.register_at_fork(after_in_child=EngineThread._all.clear)  # a forked child has no such threads


def _run_all(calls: Iterable[tuple[Callable[[], None], Future[None]]]) -> None:
    for change, done in calls:
        try:
            done.set_result(change())
        except Exception as error:
            done.set_exception(error)


def _told(what: str, error: BaseException) -> EngineClosed:
    message = (str(error).splitlines() or [""])[0]
    told = EngineClosed(f"{what} ({type(error).__name__}: {message})")
    told.__cause__ = error
    return told
