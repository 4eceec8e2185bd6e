"""Streamed answers (server-sent events), and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from compilespec.serving.errors import ApiError, api_error, timed_out
from compilespec.serving.options import ServerOptions

logger = logging.getLogger("compilespec.serving")

T = TypeVar("T")


class ClientGone(Exception):
    """The client left before the answer."""


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled once the client has left.

    Raises: ClientGone, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


class EventStream(Response):
    """Sends objects as they come.  Stops at once when the client leaves, or reads nothing.

    Args:
        objects: of JSON; an error that it raises becomes the last event.
        on_end: called at the end in any case.
        as_event: the object that tells an error, where events have the names of their objects'
            types; None: the form of completions, whose last event is [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        objects: AsyncGenerator[dict[str, Any], None],
        options: ServerOptions,
        on_end: Callable[[], object],
        *,
        as_event: Callable[[ApiError], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._objects, self._options, self._on_end = objects, options, on_end
        self._as_event = as_event
        self._sends_since: float | None = None  # by the loop's clock; None: nothing is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writes = asyncio.ensure_future(self._write(send))
        gone = (asyncio.ensure_future(_left(receive)), asyncio.ensure_future(self._stalled()))
        try:
            await asyncio.wait((writes, *gone), return_when=asyncio.FIRST_COMPLETED)
            if not writes.done():
                raise ClientGone
            writes.result()
        finally:
            self._on_end()
            await _cancel(writes, *gone)
            await self._objects.aclose()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._send(send, start)
        limit = self._options.request_timeout_s
        try:
            async with asyncio.timeout(limit):
                async for one in self._objects:
                    await self._send_event(send, one)
        except ClientGone:
            raise
        except Exception as error:
            told = timed_out(limit) if isinstance(error, TimeoutError) else api_error(error)
            if told.status == 500:
                logger.exception("a stream ended with an error")
            await self._send_event(send, self._as_event(told) if self._as_event else told.body)
        if self._as_event is None:
            await self._send_data(send, b"data: [DONE]\n\n")
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, one: dict[str, Any]) -> None:
        name = f"event: {one['type']}\n".encode() if self._as_event else b""
        await self._send_data(send, name + b"data: " + orjson.dumps(one) + b"\n\n")

    async def _send_data(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        self._sends_since = asyncio.get_running_loop().time()
        try:
            await send(message)
        except OSError as error:
            raise ClientGone from error
        self._sends_since = None

    async def _stalled(self) -> None:
        """Ends once the client has read nothing for the allowed time: one timer for all events."""
        loop, limit = asyncio.get_running_loop(), self._options.write_timeout_s
        while True:
            since = loop.time() if self._sends_since is None else self._sends_since
            left = since + limit - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
