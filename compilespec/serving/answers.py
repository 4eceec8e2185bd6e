"""Collects the results of tickets for answers, whole or piece by piece, within a request's time."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.responses import Response

from compilespec.errors import EngineClosed
from compilespec.runtime.outputs import Delta, GenerationOutput
from compilespec.runtime.ticket import Ticket
from compilespec.runtime.token_bytes import TokenBytes
from compilespec.serving.errors import api_error, stopping, timed_out
from compilespec.serving.options import ServerOptions
from compilespec.serving.protocol import StreamOptions
from compilespec.serving.service import ServedPrompt


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The fields that all chunks of an answer begin with."""

    kind: str
    """Of the object, such as "chat.completion"."""

    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


async def wait_all(tickets: Sequence[Ticket], options: ServerOptions) -> list[GenerationOutput]:
    """Wait for all outputs; any early end of the wait aborts them.

    Raises: ApiError: an output ended with an error, or the time is up.
    """
    try:
        async with asyncio.timeout(options.request_timeout_s):
            outputs = [await ticket.wait() for ticket in tickets]
    except TimeoutError as error:
        raise timed_out(options.request_timeout_s) from error
    finally:
        abort_open(tickets)
    for output in outputs:
        check_ended(output)
    return outputs


async def follow(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of the tickets with their indices as they come; waiting deltas come as one.

    Raises: ApiError: an output ended with an error.
    """
    async with contextlib.aclosing(_merged(tickets)) as steps:
        async for index, delta in steps:
            if delta.output is not None:
                check_ended(delta.output)
            yield index, delta


def json_answer(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


CUT = ("length", "deadline")  # reasons of an answer that is not whole


def check_ended(output: GenerationOutput) -> None:
    """Raises: ApiError where an output did not come to its end."""
    if output.error is not None:
        raise api_error(output.error) from output.error
    if output.finish_reason == "aborted":  # only the server's end does that
        raise stopping() from EngineClosed("aborted")


def abort_open(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        if not ticket.finished:
            ticket.abort()


def usage(
    outputs: Sequence[GenerationOutput], num_samples: int, *, num_hidden: int = 0
) -> dict[str, Any]:
    """Tokens of a request, in OpenAI's form; drafts that were accepted are completion tokens.

    Args: num_samples: outputs of each prompt; num_hidden: tokens of each that are not counted.
    """
    prompts = outputs[::num_samples]
    num_prompt = sum(len(output.prompt_token_ids) for output in prompts)
    num_new = sum(len(output.token_ids) - num_hidden for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(o.num_accepted_drafts for o in outputs),
            "rejected_prediction_tokens": sum(o.num_rejected_drafts for o in outputs),
        },
    }


class UsageCount:
    """The usage of an answer that comes in pieces."""

    def __init__(self, options: StreamOptions | None, prompts: Sequence[ServedPrompt]) -> None:
        self._is_continuous = options is not None and options.continuous_usage_stats
        self.is_asked = options is not None and (options.include_usage or self._is_continuous)
        self._num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_new = 0

    def add(self, delta: Delta) -> dict[str, Any]:
        """The `usage` fields of a chunk."""
        self._num_new += len(delta.token_ids)
        if not self._is_continuous:
            return {"usage": None} if self.is_asked else {}
        return {
            "usage": {
                "prompt_tokens": self._num_prompt,
                "completion_tokens": self._num_new,
                "total_tokens": self._num_prompt + self._num_new,
            }
        }


def ending(output: GenerationOutput, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """The reason why a choice ended; `stop_reason` is the stop string or stop id, None for EOS.
    OpenAI's API has no word for a deadline.
    """
    by = output.stopped_by
    if output.finish_reason == "deadline":
        return {"finish_reason": "length", "stop_reason": "deadline"}
    return {
        "finish_reason": output.finish_reason,
        "stop_reason": None if isinstance(by, int) and by in eos_token_ids else by,
    }


def marks(delta: Delta, spelled: TokenBytes) -> list[list[Any]]:
    """The bytes of each token, and a flag for drafts."""
    return [
        [list(spelled.shown(token)), flag]
        for token, flag in zip(delta.token_ids, delta.drafted, strict=True)
    ]


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several deltas of one request as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    has_logprobs = last.logprobs is not None
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        drafted=tuple(flag for delta in deltas for flag in delta.drafted),
        logprobs=[one for delta in deltas for one in delta.logprobs or ()]
        if has_logprobs
        else None,
    )


async def _merged(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Delta], None]:
    if len(tickets) == 1:
        async with contextlib.aclosing(tickets[0].batches()) as batches:
            async for deltas in batches:
                yield 0, joined(deltas)
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    async def read(index: int, ticket: Ticket) -> None:
        async for deltas in ticket.batches():
            queue.put_nowait((index, joined(deltas)))
        queue.put_nowait(None)

    readers = [asyncio.create_task(read(*item)) for item in enumerate(tickets)]
    try:
        num_open = len(tickets)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
