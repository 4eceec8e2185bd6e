"""The guard before the routes: ids, keys, sizes, one line of log per request.

A request is read whole, within its size and time, before any of our code looks at it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compilespec.serving.errors import ApiError, server_error
from compilespec.serving.events import ClientGone
from compilespec.serving.options import ServerOptions

logger = logging.getLogger("compilespec.serving")
MAX_READ_BYTES = 64 * 2**20  # bytes read of a request that is refused for its size
OPEN_PATHS = ("/", "/health")  # open without a key: they show nothing of the model
ADMIN_PATHS = "/v1/admin/"  # begins those that only an admin key opens
_ID = re.compile(r"[\w.:-]{1,64}")

Observe = Callable[[str, int, float], object]


def cors(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Answers preflight requests of browsers, and adds the CORS headers to all answers."""
    if not options.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "X-Replica", "Retry-After"),
    )


class Guard:
    """ASGI middleware.

    Args:
        observe: called with path, status and seconds of every request.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, observe: Observe) -> None:
        self._app, self._options, self._observe = app, options, observe
        self._digests = [_digest(key.encode()) for key in options.api_keys]
        self._admins = [_digest(key.encode()) for key in options.admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            messages = await self._admit(scope, headers, receive)
            await self._app(scope, messages, answer)
        except ApiError as error:
            await _refuse(error, scope, receive, answer)
        except ClientGone:
            status = 499
        except Exception:
            logger.exception("request %s failed", request_id)
            if not status:
                await _refuse(server_error(), scope, receive, answer)
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope["path"], status, seconds)
            logger.info(
                "%s %s %s %s %d %.0f ms", request_id, _client(scope), scope["method"],
                scope["path"], status or 499, seconds * 1e3,
            )  # fmt: skip

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read and check a request.  Raises: ApiError, ClientGone."""
        limit, objection = self._options.max_body_bytes, self._objection(scope, headers)
        try:
            async with asyncio.timeout(self._options.read_timeout_s):
                body = await _read(receive, 0 if objection else limit)
        except TimeoutError as error:
            late = ApiError(408, "the request did not arrive in time; send it again")
            raise objection or late from error
        if objection is not None:
            raise objection
        if body is None:
            raise ApiError(
                413,
                f"the request is larger than {limit} bytes; shorten it, or start the server with a "
                "larger --max-body-bytes",
                code="request_too_large",
            )
        return _given_back(body, receive)

    def _objection(self, scope: Scope, headers: Headers) -> ApiError | None:
        """The fault of a request that shows before its body; None if there is none."""
        is_admin = self._admins and scope["path"].startswith(ADMIN_PATHS)
        if keys := self._admins if is_admin else self._digests:
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            scheme, _, key = given.partition(" ")
            digest = _digest(key.strip().encode("latin-1"))  # the bytes that came
            matches = [hmac.compare_digest(digest, known) for known in keys]
            is_known = scheme.lower() == "bearer" and any(matches)
            if not is_known and scope["path"] not in OPEN_PATHS:
                kind = "admin" if is_admin else "API"
                return ApiError(
                    401,
                    f"this needs an {kind} key: send the header 'Authorization: Bearer KEY'",
                    kind="authentication_error",
                    code="invalid_api_key",
                )
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return ApiError(415, "expected Content-Type: application/json")
        return None


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body; None if it is longer than allowed.

    It is still read to its end, within bounds: closing a connection with unread bytes resets it,
    and its client may lose the answer.
    """
    parts, size, more = list[bytes](), 0, True
    while more and size < MAX_READ_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
        if size <= limit:
            parts.append(message.get("body", b""))
    return b"".join(parts) if size <= limit else None


def _given_back(body: bytes, receive: Receive) -> Receive:
    """Gives the body at once, then later messages, such as the client's leaving."""
    is_given = False

    async def messages() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return messages


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in (408, 413):  # part of the request may not have been read
        headers["Connection"] = "close"
    await error.response(scope["path"], headers)(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "-"
