"""/v1/responses: OpenAI's protocol of items over the same conversations as chat completions.

A request is read as a chat, its items as messages; the answer goes back as items, whole or as
events.  Answers are stored, unless `store` is false, so that the next request can continue them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.ticket import Ticket
from compilespec.serving.answers import CUT, abort_open, follow, json_answer, usage, wait_all
from compilespec.serving.chat import Chat
from compilespec.serving.errors import ApiError, bad_request
from compilespec.serving.events import EventStream, unless_left
from compilespec.serving.parsers.parts import Parts
from compilespec.serving.protocol import OWN, ChatRequest, Own, StreamOptions, read_body
from compilespec.serving.service import ServedPrompt, Service
from compilespec.serving.stored import StoredResponses

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"

Items = list[dict[str, Any]]


class ResponsesRequest(Own):
    """A conversation of items that is answered."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"

    # Accepted without effect.
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Our own fields.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def answer_responses(service: Service, stored: StoredResponses, request: Request) -> Response:
    """Raises: ApiError, ClientGone."""
    asked = await read_body(request, ResponsesRequest)
    service.check_model(asked.model)
    before: Items = []
    if asked.previous_response_id is not None:
        record = await find_stored(service, stored, asked.previous_response_id)
        before = record["items"]
    answer = _ItemAnswer(service, stored, asked, before)
    prompts, tickets = await unless_left(request, service.submit(answer.chat.read, asked.priority))
    if asked.stream:
        return EventStream(
            answer.events(prompts, tickets),
            service.options,
            lambda: abort_open(tickets),
            as_event=answer.error,
        )
    (output,) = await unless_left(request, wait_all(tickets, service.options))
    return json_answer(await answer.whole(output))


async def stored_response(service: Service, stored: StoredResponses, name: str) -> Response:
    """Raises: ApiError."""
    record = await find_stored(service, stored, name)
    return json_answer(record["response"])


async def stored_input(service: Service, stored: StoredResponses, name: str) -> Response:
    """The items of a request and those before it.  Raises: ApiError."""
    record = await find_stored(service, stored, name)
    items = record["items"][: len(record["items"]) - len(record["response"]["output"])]
    ids = [item.get("id") for item in items] or [None]
    listed = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1]}
    return json_answer({**listed, "has_more": False})


async def remove_stored(service: Service, stored: StoredResponses, name: str) -> Response:
    """Raises: ApiError."""
    if not await service.off_the_loop(lambda: stored.remove(name)):
        raise _not_stored(name)
    return json_answer({"id": name, "object": "response", "deleted": True})


async def find_stored(service: Service, stored: StoredResponses, name: str) -> dict[str, Any]:
    """Raises: ApiError."""
    record = await service.off_the_loop(lambda: stored.get(name))
    if record is None:
        raise _not_stored(name)
    return record


class _ItemAnswer:
    """One request, its answer, and what is stored of both."""

    def __init__(
        self, service: Service, stored: StoredResponses, asked: ResponsesRequest, before: Items
    ) -> None:
        self._service, self._stored, self._asked = service, stored, asked
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._input = [*before, *_items(asked.input)]
        self._answer = _OutputItems()
        self._num_events = 0
        self.chat = Chat(service, _as_chat(asked, self._input))

    async def whole(self, output: GenerationOutput) -> dict[str, Any]:
        """The response, which is stored."""
        parser = self.chat.parser()
        parts = parser.add(output.text or "") + parser.finish()
        for _ in (*self._answer.add(parts), *self._answer.close(_status(output))):
            pass
        return await self._ended(output)

    async def events(
        self, prompts: Sequence[ServedPrompt], tickets: Sequence[Ticket]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer."""
        begun = self._response(IN_PROGRESS)
        for kind in ("created", IN_PROGRESS):
            yield self._numbered({"type": f"response.{kind}", "response": begun})
        parser = self.chat.parser()
        async for _, delta in follow(tickets):
            parts = parser.add(delta.text)
            if delta.output is not None:
                parts += parser.finish()
            for event in self._answer.add(parts):
                yield self._numbered(event)
            if delta.output is not None:
                status = _status(delta.output)
                for event in self._answer.close(status):
                    yield self._numbered(event)
                ended = await self._ended(delta.output)
                yield self._numbered({"type": f"response.{status}", "response": ended})

    def error(self, error: ApiError) -> dict[str, Any]:
        """The event of an error."""
        told = error.body["error"]
        told = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return self._numbered({"type": "error", **told})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    async def _ended(self, output: GenerationOutput) -> dict[str, Any]:
        status = _status(output)
        response = self._response(status)
        response["output"] = self._answer.items
        response["completed_at"] = int(time.time()) if status == COMPLETED else None
        if status == INCOMPLETE:
            is_late = output.finish_reason == "deadline"
            reason = "deadline" if is_late else "max_output_tokens"
            response["incomplete_details"] = {"reason": reason}

        def count_and_store() -> None:
            response["usage"] = self._usage(output)
            if self._asked.store:
                record = {"response": response, "items": [*self._input, *self._answer.items]}
                response["store"] = self._stored.put(self._id, record)

        await self._service.off_the_loop(count_and_store)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._service.name_of(asked.model),
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "store": asked.store,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    def _usage(self, output: GenerationOutput) -> dict[str, Any]:
        """Tokens of reasoning are counted by encoding its text again."""
        told, tokenizer = usage([output], 1), self._service.tokenizer
        reasoning = (item for item in self._answer.items if item["type"] == "reasoning")
        thoughts = "".join(map(_texts, reasoning))
        num_thought = len(tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": min(num_thought, told["completion_tokens"]),
                **told["completion_tokens_details"],
            },
            "total_tokens": told["total_tokens"],
        }


def _status(output: GenerationOutput) -> str:
    return INCOMPLETE if output.finish_reason in CUT else COMPLETED


# --- an answer as items ---


class _OutputItems:
    """The items of an answer, of which the last one may still grow."""

    def __init__(self) -> None:
        self.items: Items = []
        self._is_open = False

    def add(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """The events of the additions to an answer."""
        if parts.reasoning:
            yield from self._grow("reasoning", "reasoning_text", parts.reasoning)
        if parts.content:
            yield from self._grow("message", "output_text", parts.content)
        for call in parts.calls:
            if call.name:
                yield from self.close(COMPLETED)
                called = {"call_id": call.id, "name": call.name, "arguments": ""}
                yield self._begin("function_call", "fc", **called)
            if call.arguments:
                item = self.items[-1]
                item["arguments"] += call.arguments
                told = {**self._place(), "delta": call.arguments}
                yield {"type": "response.function_call_arguments.delta", **told}

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """The last events of the open item."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **told}
        else:
            (part,) = item["content"]
            told = {**self._place(), "content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            kind = f"response.{part['type']}.done"
            yield {"type": kind, **told, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **told, "part": dict(part)}
        told = {"output_index": len(self.items) - 1, "item": dict(item)}
        yield {"type": "response.output_item.done", **told}

    def _grow(self, kind: str, part_kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self.close(COMPLETED)
            is_text = kind == "message"
            fields: dict[str, Any] = {"role": "assistant"} if is_text else {"summary": []}
            yield self._begin(kind, "msg" if is_text else "rs", **fields, content=[])
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self.items[-1]["content"].append(part)
            told = {**self._place(), "content_index": 0, "part": dict(part)}
            yield {"type": "response.content_part.added", **told}
        self.items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        told = {**self._place(), "content_index": 0, "delta": text, **more}
        yield {"type": f"response.{part_kind}.delta", **told}

    def _begin(self, kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
        name = f"{prefix}_{uuid.uuid4().hex}"
        item = {"type": kind, "id": name, "status": IN_PROGRESS, **fields}
        self.items.append(item)
        self._is_open = True
        shown = {name: list(one) if name == "content" else one for name, one in item.items()}
        told = {"output_index": len(self.items) - 1, "item": shown}
        return {"type": "response.output_item.added", **told}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


# --- a request as a chat ---


def _as_chat(asked: ResponsesRequest, items: Items) -> ChatRequest:
    """Raises: ApiError."""
    reading = _Messages()
    if asked.instructions is not None:
        reading.messages.append({"role": "system", "content": asked.instructions})
    for item in items:
        reading.add(item)
    messages = reading.messages
    if not messages or messages[-1]["role"] == "assistant":
        raise bad_request(
            "input: the last item is the assistant's, or there is none: expected a user's message "
            "or the output of a call",
            param="input",
        )
    same = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p",
            "seed", *OWN, "chat_template_kwargs")  # fmt: skip
    given = {name: getattr(asked, name) for name in same}
    given["max_tokens"] = asked.max_output_tokens
    given["response_format"] = _read_format((asked.text or {}).get("format"))
    given["reasoning_effort"] = (asked.reasoning or {}).get("effort")
    given["tools"] = [_read_tool(tool) for tool in asked.tools or ()] or None
    given["tool_choice"] = _read_choice(asked.tool_choice)
    given = {name: value for name, value in given.items() if value is not None}
    return ChatRequest(messages=messages, **given)


class _Messages:
    """Items as messages: reasoning, text and calls of the assistant in a row are one message."""

    def __init__(self) -> None:
        self.messages: Items = []

    def add(self, item: dict[str, Any]) -> None:
        """Raises: ApiError."""
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            thoughts = _texts(item)
            if not thoughts:
                raise bad_request(
                    "input: reasoning without its text: leave the item out, or name the "
                    "response by previous_response_id",
                    param="input",
                )
            self._turn("reasoning_content")["reasoning_content"] = thoughts
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self._turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output", ""))}
            self.messages.append({"role": "tool", **said})
        else:
            raise bad_request(
                f"input: items of type {kind!r} are not taken; expected message, reasoning, "
                "function_call or function_call_output",
                param="input",
            )

    def _add_message(self, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "system", "developer", "assistant") or not isinstance(
            content, str | list
        ):
            raise bad_request(
                "input: expected messages with a role of user, system, developer or assistant, and "
                f"a text or parts as content; got {item!r:.80}",
                param="input",
            )
        if role == "assistant":
            self._turn("content", "tool_calls")["content"] = _text(content)
            return
        parts = content if isinstance(content, str) else [_part(part) for part in content]
        if not isinstance(parts, str) and all(part["type"] == "text" for part in parts):
            parts = "\n".join(part["text"] for part in parts)
        self.messages.append({"role": role, "content": parts})

    def _turn(self, *full: str) -> dict[str, Any]:
        """The assistant's message that goes on; a new one where it has one of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in full):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _items(given: str | Items) -> Items:
    """The input as items, each with an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [{"type": "message", "id": f"item_{uuid.uuid4().hex}", **item} for item in given]


def _part(part: Any) -> dict[str, Any]:
    """A part of a message in the form of chat completions.  Raises: ApiError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise bad_request(
        f"input: parts of type {kind!r} are not taken, or lack their text or image: {part!r:.80}",
        param="input",
    )


def _text(content: str | list[Any]) -> str:
    """Parts of text as one text.  Raises: ApiError."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise bad_request(
            "input: answers and outputs of calls are texts; put images into a user's message",
            param="input",
        )
    return "\n".join(part["text"] for part in parts)


def _texts(item: dict[str, Any]) -> str:
    """The text of a reasoning item."""
    return "".join(part.get("text", "") for part in item.get("content") or ())


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise bad_request(
            f'tools: expected a type of "function" and a name, got {tool!r:.80}; tools that a '
            "server runs itself are not built",
            param="tools",
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _read_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise bad_request(
        "tool_choice: expected auto, none, required, or a type of function with a name, got "
        f"{choice!r:.80}",
        param="tool_choice",
    )


def _read_format(given: Any) -> dict[str, Any] | None:
    """`text.format` as the `response_format` of chat completions.  Raises: ApiError."""
    if given is None or given == {"type": "text"}:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_schema":
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}
    if kind == "json_object":
        return {"type": "json_object"}
    raise bad_request(
        f"text.format: expected a type of text, json_object or json_schema, got {given!r:.80}",
        param="text",
    )


def _not_stored(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no stored response {name!r}: it was made with store: false, or removed for "
        "newer ones; send the conversation as input, or start the server with a larger "
        "--stored-responses-mib",
        code="previous_response_not_found",
        param="previous_response_id",
    )
