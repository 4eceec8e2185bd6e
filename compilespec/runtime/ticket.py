"""One prompt that an engine's thread serves: its result, or what it gives as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from compilespec.runtime.outputs import Delta, GenerationOutput
from compilespec.runtime.request import Request


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
