"""HTTP requests and answers between deployments, in ASGI's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

DISCONNECT: Message = {"type": "http.disconnect"}


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """A request that was read completely."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None
    keys: tuple[bytes, ...]
    """The keys of its prompt, for the router."""

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


async def messages(app: ASGIApp, request: Forwarded) -> AsyncGenerator[list[Message], None]:
    """The messages of an application's answer as they come; waiting ones come together.

    Closed or cancelled, it tells the application that the client has left, and waits for its end.
    """
    queue: asyncio.Queue[Message] = asyncio.Queue()
    has_left, is_given = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await has_left.wait()
        return DISCONNECT

    async def send(message: Message) -> None:
        queue.put_nowait(message)

    task = asyncio.ensure_future(app(request.scope(), receive, send))
    task.add_done_callback(lambda _: queue.put_nowait(DISCONNECT))
    try:
        while True:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            if batch[-1] is DISCONNECT:
                del batch[-1]
                if batch:
                    yield batch
                break
            yield batch
        task.result()
    finally:
        has_left.set()
        if not task.done():
            await asyncio.wait([task])


def is_stream(start: Message) -> bool:
    """True where the answer with this beginning streams server-sent events."""
    headers: list[tuple[Any, Any]] = list(start.get("headers", ()))
    kinds = [value for name, value in headers if bytes(name).lower() == b"content-type"]
    return any(bytes(kind).startswith(b"text/event-stream") for kind in kinds)
