"""The server process: uvicorn, signals, and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
import time
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from compilespec.errors import EngineClosed, InvalidOption
from compilespec.runtime.engine import Engine
from compilespec.serving.app import create_app
from compilespec.serving.options import Binding, ServerOptions
from compilespec.serving.service import Service

logger = logging.getLogger("compilespec.serving")
CLOSE_TIMEOUT_S = 30.0  # seconds for the running step
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed in use
SWITCH_INTERVAL_S = 0.0005  # seconds after which the engine's thread yields the interpreter
MAX_HEAD_BYTES = 64 * 2**10  # the largest head of a request
REPLY_TIMEOUT_S = 5  # seconds for clients to read complete answers


def check(binding: Binding) -> None:
    """Check the address and the certificate before an engine is compiled.

    Raises: InvalidOption: nothing can listen there, or the certificate cannot be read.
    """
    listen(binding).close()
    if binding.ssl_certfile is None:
        if binding.ssl_keyfile is not None or binding.ssl_ca_certs is not None:
            raise InvalidOption("ssl_keyfile and ssl_ca_certs need ssl_certfile: give it, too")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        password = binding.ssl_keyfile_password or ""
        context.load_cert_chain(binding.ssl_certfile, binding.ssl_keyfile, password)
        if binding.ssl_ca_certs is not None:
            context.load_verify_locations(binding.ssl_ca_certs)
    except OSError as error:
        raise InvalidOption(f"the certificate cannot be read: {error}; check its files") from error


def run(
    engine: Engine, options: ServerOptions | None = None, binding: Binding | None = None
) -> int:
    """Serve until a signal comes.  SIGTERM or SIGINT: take no more requests and finish the present
    ones; a second one aborts them.

    Returns: the exit code, 1 where the engine failed.
    Raises: InvalidOption: nothing can listen there, or the certificate cannot be read.
    """
    binding = binding or Binding()
    check(binding)
    listener = listen(binding)
    app = create_app(engine, options)
    service: Service = app.state.service
    try:
        server = make_server(app, binding)
        server.config.load()
        _announce(binding, listener)
        prefer_short_pauses()
        server.run(sockets=[listener])
    finally:
        listener.close()
        try:
            service.close()
        except (EngineClosed, TimeoutError) as error:
            logger.error("the engine was not closed: %s", error)
    return int(server.has_failed)


def make_server(app: FastAPI, binding: Binding) -> Server:
    """A uvicorn server for `create_app`'s application; it serves on `listen`'s socket."""

    class Limited(Connection):
        head_timeout_s = app.state.service.options.read_timeout_s

    config = uvicorn.Config(
        app,
        http=Limited,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        lifespan="off",
        timeout_graceful_shutdown=REPLY_TIMEOUT_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=binding.ssl_certfile,
        ssl_keyfile=binding.ssl_keyfile,
        ssl_keyfile_password=binding.ssl_keyfile_password,
        ssl_ca_certs=binding.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if binding.ssl_ca_certs else ssl.CERT_NONE,
    )
    return Server(config, app.state.service, binding.drain_timeout_s)


class Connection(H11Protocol):
    """Closes if the head of a request does not arrive in time, from its first byte on, or from the
    beginning of the connection.  (Between requests uvicorn's own limit holds, `KEEP_ALIVE_S`.)

    httptools is faster, but has no limit for heads and loses bodies of upgrades.
    """

    head_timeout_s: float
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.head_timeout_s, self.timeout_keep_alive_handler
            )

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Server(uvicorn.Server):
    """Ends when its requests have ended, or its engine has failed."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.has_failed = False
        self._service, self._drain_timeout_s = service, drain_timeout_s
        self._num_signals = 0
        self._drains_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1  # `on_tick` sees it within 0.1 s

    async def on_tick(self, counter: int) -> bool:
        health = self._service.thread.health()
        if health.state == "failed":
            logger.error("the engine failed, the server exits: %s", health.failure)
            self.has_failed = True
            return True
        if self._num_signals > 1:
            return True
        if self._num_signals and self._drains_until is None:
            self._drains_until = time.monotonic() + self._drain_timeout_s
            self._service.thread.drain(timeout=0)
            logger.info("stopping: %d requests are open", health.num_open)
        elif self._drains_until is not None and (
            health.num_open == 0 or time.monotonic() > self._drains_until
        ):
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await asyncio.to_thread(self._service.thread.close, CLOSE_TIMEOUT_S)
        except (EngineClosed, TimeoutError) as error:
            logger.error("the engine was not closed: %s", error)
        await super().shutdown(sockets)


def prefer_short_pauses() -> None:
    """Shorten the turns of the interpreter's threads, and exclude present objects (torch, the
    program) from garbage collection, for this process.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


def listen(binding: Binding) -> socket.socket:
    family = socket.AF_INET6 if ":" in binding.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets with a named protocol.  With it, parts of
    # an answer wait for the client's acknowledgements, 40 ms each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((binding.host, binding.port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidOption(
            f"cannot listen on {binding.host}:{binding.port}: {error}; choose another host= or "
            "port="
        ) from error
    return listener


def _announce(binding: Binding, listener: socket.socket) -> None:
    scheme = "https" if binding.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"serving on {scheme}://{host}:{port}", file=sys.stderr, flush=True)
