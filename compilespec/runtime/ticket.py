"""One prompt that an engine's thread serves: its result, or its additions as they come."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import NamedTuple

from compilespec.runtime.forks import Process
from compilespec.runtime.outputs import Delta, GenerationOutput
from compilespec.runtime.request import Request


class WakeUps:
    """The event loops to wake: each is called once for all of its sleepers."""

    def __init__(self) -> None:
        self._events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        self._events.setdefault(loop, []).append(event)

    def send(self) -> None:
        """Wake them."""
        for loop, events in self._events.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_set_all, events)
        self._events = {}


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Ticket:
    """One submitted prompt: wait for its result, or read it as it comes.

    Unread additions wait here; the engine never waits for a reader.
    """

    def __init__(self, request: Request, abort: Callable[[Ticket], None]) -> None:
        self.request = request
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._output: GenerationOutput | None = None
        self._changed = threading.Condition()
        self._process = Process()
        self._sleepers: dict[asyncio.Event, _Sleeper] = {}

    @property
    def finished(self) -> bool:
        return self._output is not None

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the end.

        Args:
            timeout: seconds.
        Raises: TimeoutError; the request goes on.  NotSupported in a forked child.
        """
        self._process.check()
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
        """The additions of each step, once each; leaving early aborts the request."""
        self._process.check()
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

    async def batches(self) -> AsyncGenerator[list[Delta], None]:
        """Like `__aiter__`, but joins all additions since the last time."""
        try:
            while True:
                await self._sleep(self._has_news)
                with self._changed:
                    deltas, self._deltas = list(self._deltas), deque()
                    if not deltas and self.finished:
                        return
                if deltas:
                    yield deltas
        finally:
            if not self.finished:
                self.abort()

    def give(self, delta: Delta, wake_ups: WakeUps | None = None) -> None:
        """Add a delta, or with `delta.output` the end; the engine's thread calls it.

        Args: wake_ups: collects the sleepers in event loops, for the caller to wake; None: wakes
        them here.
        """
        ours = WakeUps() if wake_ups is None else wake_ups
        with self._changed:
            self._deltas.append(delta)
            self._output = delta.output
            self._changed.notify_all()
            awake = [event for event, sleeper in self._sleepers.items() if sleeper.until()]
            for event in awake:
                ours.add(self._sleepers.pop(event).loop, event)
        if wake_ups is None:
            ours.send()

    def _has_news(self) -> bool:
        return bool(self._deltas) or self.finished

    async def _sleep(self, until: Callable[[], bool]) -> None:
        """Let the event loop go on until `until` holds; `give` checks it with the lock held."""
        self._process.check()
        event = asyncio.Event()
        with self._changed:
            if until():
                return
            self._sleepers[event] = _Sleeper(asyncio.get_running_loop(), until)
        try:
            await event.wait()
        finally:
            with self._changed:
                self._sleepers.pop(event, None)


class _Sleeper(NamedTuple):
    """A sleeper in an event loop, and its condition."""

    loop: asyncio.AbstractEventLoop
    until: Callable[[], bool]
