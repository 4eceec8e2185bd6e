"""The engine behind the routes: prompts are read on their own threads, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from compilespec.errors import SpecError
from compilespec.runtime.engine import Engine
from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.image_prompts import ReadPrompt
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.ticket import Ticket
from compilespec.runtime.token_bytes import TokenBytes
from compilespec.serving.errors import ApiError, api_error, bad_request
from compilespec.serving.options import ServerOptions

READERS = 2  # threads that read prompts

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """A prompt that was read, and the way to continue it."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None  # the given prompt
    read: ReadPrompt | None = None  # the prompt with its images; None: ids only


class Service:
    """An engine that the server owns from now on."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.tokenizer: Any = engine.tokenizer
        self.thread: EngineThread = engine.serve(max_waiting=options.max_waiting)
        self.spelled = TokenBytes(engine.tokenizer)
        self.created = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="compilespec-read")

    async def off_the_loop(self, call: Callable[[], T]) -> T:
        """Run work of some milliseconds on another thread.  Raises: ApiError, or the work's
        errors.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, call)
        except SpecError as error:
            raise api_error(error) from error

    async def submit(
        self, read: Callable[[], Sequence[ServedPrompt]], priority: int
    ) -> tuple[Sequence[ServedPrompt], list[Ticket]]:
        """Read prompts and queue all of their samples, in order, or none.

        Raises: ApiError.  Cancelled, it leaves nothing behind.
        """

        def call() -> tuple[Sequence[ServedPrompt], list[Ticket]]:
            prompts = read()
            return prompts, self._queue(prompts, priority)

        try:
            future: Future[tuple[Sequence[ServedPrompt], list[Ticket]]] = self._readers.submit(call)
        except RuntimeError as error:  # closed
            raise ApiError(503, "the server has stopped", code="stopping") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_abort)
            raise
        except SpecError as error:
            raise api_error(error) from error

    def close(self) -> None:
        """Abort all requests and close the engine."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.thread.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give as `model`: the target, or an adapter."""
        return (*self.options.model_names, *self.thread.adapter_names())

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names as its model; None: the target itself."""
        return None if name is None or name in self.options.model_names else name

    def name_of(self, name: str | None) -> str:
        """The name of the model in the answer to a request."""
        return self.adapter_of(name) or self.options.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raises: ApiError if a request names a model that is not served."""
        names = self.names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"there is no model {name!r}; served: {', '.join(names)}",
                code="model_not_found",
                param="model",
            )

    def check_count(self, count: int) -> None:
        """Raises: ApiError if a request asks for more samples than may ever be open."""
        waiting = self.options.max_waiting
        most = None if waiting is None else waiting + self.engine.geometry.max_batch_size
        if most is not None and count > most:
            raise bad_request(
                f"the request asks for {count} outputs (prompts times n): expected at most {most}; "
                "send it in parts, or start the server with a larger --max-waiting"
            )

    def _queue(self, prompts: Sequence[ServedPrompt], priority: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        try:
            for prompt in prompts:
                tickets += self.thread.submit_samples(
                    prompt.read or prompt.token_ids, prompt.params, priority=priority
                )
        except BaseException:
            for ticket in tickets:
                ticket.abort()
            raise
        return tickets


def _abort(future: Future[tuple[Sequence[ServedPrompt], list[Ticket]]]) -> None:
    if not future.cancelled() and future.exception() is None:
        for ticket in future.result()[1]:
            ticket.abort()
