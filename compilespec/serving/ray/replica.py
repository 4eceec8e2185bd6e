"""The deployment of an engine: every replica compiles its own, or loads its steps from disk."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from starlette.types import Message

from compilespec.pipeline.entry import compile as compile_engine
from compilespec.serving.app import create_app
from compilespec.serving.options import ServerOptions
from compilespec.serving.ray.messages import Forwarded, messages
from compilespec.serving.service import Service

logger = logging.getLogger("compilespec.serving")
REPLICA_HEADER = b"x-replica"


class Replica:
    """Args: keywords: of `compile`, beside model and spec."""

    def __init__(
        self, model: str, spec: str, keywords: Mapping[str, Any], options: ServerOptions
    ) -> None:
        engine = compile_engine(model, spec, **keywords)
        self._app = create_app(engine, options)
        self._service: Service = self._app.state.service
        self._name = str(serve.get_replica_context().replica_id.unique_id).encode()

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """The messages of the application's answer.  If cancelled, the request is aborted."""
        answered = messages(self._app, request)
        try:
            async for batch in answered:
                for message in batch:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], (REPLICA_HEADER, self._name)]
                yield batch
        finally:
            await answered.aclose()

    def check_health(self) -> None:
        """Ray's health check; Ray replaces a replica that raises here."""
        health = self._service.thread.health()
        if health.state in ("failed", "closed"):
            raise RuntimeError(f"the engine is {health.state}: {health.failure}")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()
