"""The deployment that takes HTTP: it reads and checks a request and passes it on to a replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from compilespec.serving.errors import ApiError, server_error, timed_out
from compilespec.serving.events import unless_left
from compilespec.serving.guard import Guard, cors
from compilespec.serving.options import ServerOptions
from compilespec.serving.ray.messages import Forwarded, is_stream
from compilespec.serving.ray.prefixes import prompt_keys

logger = logging.getLogger("compilespec.serving")


class Ingress:
    """Args: replicas: the handle of the engines' deployment."""

    def __init__(self, replicas: Any, options: ServerOptions) -> None:
        self._replicas = replicas.options(stream=True)
        self._options = options
        guard = Guard(self._forward, options, lambda path, status, seconds: None)
        self._app = cors(guard, options)

    async def __call__(self, request: Request) -> Response:
        return _Answer(self._app)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application.  Raises: ApiError if nothing was sent yet; ClientGone."""
        request = Request(scope, receive)
        forwarded = await _read(request)
        relay = _Relay(send)
        answer = self._replicas.answer.remote(forwarded)
        try:
            await unless_left(request, relay.run(answer, self._options.request_timeout_s))
        except Exception as error:
            told = _told(error, self._options)
            if told is None:
                raise
            await relay.end(told)
        finally:
            answer.cancel()  # no effect after its end


class _Answer(Response):
    """Hands Ray's ASGI on to an application."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Relay:
    """Sends a replica's answer, and its error if the replica fails in the middle."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_whole = False

    async def run(self, answer: Any, limit_s: float) -> None:
        async with asyncio.timeout(limit_s), contextlib.aclosing(_batches(answer)) as batches:
            async for batch in batches:
                for message in batch:
                    await self._pass_on(message)

    async def end(self, error: ApiError) -> None:
        """End the answer.  Raises: the error, if nothing was sent yet."""
        if self._start is None:
            raise error
        if self._is_whole:
            return
        if not is_stream(self._start):
            raise error  # the connection is cut: the part sent is no answer
        body = b"data: " + orjson.dumps(error.body) + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        await self._send(message)
        self._is_whole = message["type"] == "http.response.body" and not message.get("more_body")


async def _batches(answer: Any) -> AsyncGenerator[Any, None]:
    """An iterator with `aclose`, which Ray's iterators lack."""
    async for batch in answer:
        yield batch


async def _read(request: Request) -> Forwarded:
    body = await request.body()  # read by the guard
    client = request.scope.get("client")
    return Forwarded(
        method=request.method,
        path=request.url.path,
        query=request.scope.get("query_string", b""),
        headers=tuple((bytes(name), bytes(value)) for name, value in request.scope["headers"]),
        body=body,
        client=None if client is None else (str(client[0]), int(client[1])),
        keys=prompt_keys(body) if request.method == "POST" else (),
    )


def _told(error: Exception, options: ServerOptions) -> ApiError | None:
    """The answer for a failed call; None: the error is of another kind."""
    if isinstance(error, RayActorError):
        logger.warning("a replica ended with a request: %s", error)
        return ApiError(
            503,
            "the replica that was answering has ended, and this request with it; send it again",
            kind="service_unavailable_error",
            code="replica_lost",
            retry_after=1,
        )
    if isinstance(error, BackPressureError):
        return ApiError(
            429,
            "all replicas are busy, and as many requests wait as may; try again later",
            kind="rate_limit_error",
            code="queue_full",
            retry_after=1,
        )
    if isinstance(error, TimeoutError):
        return timed_out(options.request_timeout_s)
    if isinstance(error, RayError | RayServeException):
        logger.error("a call of a replica failed", exc_info=error)
        return server_error()
    return None
