"""/v1/messages: Anthropic's protocol over the same conversations as chat completions.

A request is read as a chat, its blocks as messages in OpenAI's form; the answer goes back as
blocks, whole or as events.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.ticket import Ticket
from compilespec.serving.answers import CUT, abort_open, follow, json_answer, wait_all
from compilespec.serving.chat import Chat, chat_prompt
from compilespec.serving.errors import bad_request
from compilespec.serving.events import EventStream, unless_left
from compilespec.serving.parsers.parts import Parts, read_json
from compilespec.serving.protocol import OWN, Asked, ChatRequest, Own, read_body
from compilespec.serving.service import ServedPrompt, Service
from compilespec.serving.tools import read_tools

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountRequest(Asked):
    """A conversation whose tokens are counted."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest, Own):
    """A conversation that is answered."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # Accepted without effect.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # Our own fields.
    seed: int | None = None


async def answer_messages(service: Service, request: Request) -> Response:
    """Raises: ApiError, ClientGone."""
    asked = await read_body(request, MessagesRequest)
    service.check_model(asked.model)
    answer = _Message(service, asked)
    prompts, tickets = await unless_left(request, service.submit(answer.chat.read, asked.priority))
    if asked.stream:
        events = answer.events(prompts, tickets)
        return EventStream(
            events,
            service.options,
            lambda: abort_open(tickets),
            as_event=lambda error: error.anthropic_body,
        )
    (output,) = await unless_left(request, wait_all(tickets, service.options))
    return json_answer(answer.whole(output))


async def count_tokens(service: Service, request: Request) -> Response:
    """Raises: ApiError."""
    asked = await read_body(request, CountRequest)
    service.check_model(asked.model)

    def count() -> int:
        chat = _as_chat(asked)
        return len(service.engine.encode(chat_prompt(chat, read_tools(chat, service).shown)))

    number = await service.off_the_loop(count)
    return json_answer({"input_tokens": number})


class _Message:
    def __init__(self, service: Service, asked: MessagesRequest) -> None:
        self._service, self._id = service, f"msg_{uuid.uuid4().hex[:24]}"
        self._model = service.name_of(asked.model)
        self.chat = Chat(service, _as_chat(asked, **_sampling(asked)))

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        parser = self.chat.parser()
        parts = parser.add(output.text or "") + parser.finish()
        cached = output.num_cached_tokens
        return {
            **self._message(list(_blocks(parts))),
            **self._ending(output, has_calls=bool(parts.calls)),
            "usage": _usage(len(output.prompt_token_ids), cached, len(output.token_ids)),
        }

    async def events(
        self, prompts: Sequence[ServedPrompt], tickets: Sequence[Ticket]
    ) -> AsyncGenerator[dict[str, Any], None]:
        num_prompt = len(prompts[0].token_ids)
        empty = {"stop_reason": None, "stop_sequence": None, "usage": _usage(num_prompt, 0, 0)}
        yield {"type": "message_start", "message": {**self._message([]), **empty}}
        parser, blocks = self.chat.parser(), _OpenBlocks()
        async for _, delta in follow(tickets):
            parts = parser.add(delta.text)
            if delta.output is not None:
                parts += parser.finish()
            for event in blocks.add(parts):
                yield event
            if delta.output is not None:
                output = delta.output
                for event in blocks.close():
                    yield event
                yield {
                    "type": "message_delta",
                    "delta": self._ending(output, has_calls=blocks.has_calls),
                    "usage": _usage(num_prompt, output.num_cached_tokens, len(output.token_ids)),
                }
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _ending(self, output: GenerationOutput, *, has_calls: bool) -> dict[str, Any]:
        by = output.stopped_by if isinstance(output.stopped_by, str) else None
        reason = "max_tokens" if output.finish_reason in CUT else "end_turn"
        if output.finish_reason == "stop" and (by is not None or has_calls):
            reason = "tool_use" if by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": by}


class _OpenBlocks:
    """The blocks of a streamed answer, of which the last one may still grow."""

    def __init__(self) -> None:
        self._kind, self._index, self.has_calls = "", -1, False

    def add(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """The events of the additions to an answer."""
        if parts.reasoning:
            yield from self._open("thinking", thinking="", signature="")
            yield self._grow("thinking_delta", thinking=parts.reasoning)
        if parts.content:
            yield from self._open("text", text="")
            yield self._grow("text_delta", text=parts.content)
        for call in parts.calls:
            if call.name:
                self.has_calls = True
                yield from self.close()
                yield from self._open("tool_use", id=call.id, name=call.name, input={})
            if call.arguments:
                yield self._grow("input_json_delta", partial_json=call.arguments)

    def close(self) -> Iterator[dict[str, Any]]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        if kind == self._kind:
            return
        yield from self.close()
        self._kind, self._index = kind, self._index + 1
        block = {"type": kind, **fields}
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _grow(self, kind: str, **fields: Any) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _blocks(parts: Parts) -> Iterator[dict[str, Any]]:
    if parts.reasoning:
        yield {"type": "thinking", "thinking": parts.reasoning, "signature": ""}
    if parts.content:
        yield {"type": "text", "text": parts.content}
    for call in parts.calls:
        try:
            arguments = read_json(call.arguments or "{}")
        except ValueError:  # cut by max_tokens
            arguments = {}
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _usage(num_prompt: int, num_cached: int, num_new: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_new,
    }


# --- a request as a chat ---


def _sampling(asked: MessagesRequest) -> dict[str, Any]:
    same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", *OWN)
    given = {name: getattr(asked, name) for name in same}
    return {**given, "stop": asked.stop_sequences}


def _as_chat(asked: CountRequest, **sampling: Any) -> ChatRequest:
    """Raises: ApiError."""
    messages = [] if asked.system is None else [{"role": "system", "content": _text(asked.system)}]
    for place, message in enumerate(asked.messages):
        messages += _read_message(message, f"messages.{place}")
    if messages and messages[-1]["role"] == "assistant":
        raise bad_request(
            "messages: the last one is the assistant's: expected a user's; an answer that goes on "
            "with given text is made by /v1/completions",
            param="messages",
        )
    options: dict[str, Any] = {}
    if asked.thinking is not None:
        kind = asked.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad_request(f"thinking: expected a known type, got {kind!r}", param="thinking")
        options["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    if asked.tools:
        options["tools"] = [_read_tool(tool) for tool in asked.tools]
    if choice := asked.tool_choice:
        options |= _read_choice(choice)
    given = {name: value for name, value in sampling.items() if value is not None}
    return ChatRequest(messages=messages, **options, **given)


def _read_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind, options = choice.get("type"), dict[str, Any]()
    if kind == "tool" and isinstance(choice.get("name"), str):
        chosen: Any = {"type": "function", "function": {"name": choice["name"]}}
    elif kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise bad_request(
            'tool_choice: expected a type of auto, any, none, or tool with a "name", got '
            f"{choice!r:.80}",
            param="tool_choice",
        )
    options["tool_choice"] = chosen
    if choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    return options


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise bad_request(
            f"tools: expected a name and an input_schema, got {tool!r:.80}; tools that a server "
            "runs itself are not built",
            param="tools",
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _read_message(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """A message in OpenAI's form; results of tools become messages before it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant") or not isinstance(content, str | list):
        raise bad_request(
            f"{place}: expected a role of user or assistant, and a text or blocks as content",
            param="messages",
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    read: dict[str, Any] = {"role": role}
    before, parts = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and role == "user":
            parts.append(_image(block, f"{place}.content.{number}"))
        elif kind == "tool_result" and role == "user":
            result = _text(block.get("content") or "")
            result = f"Error: {result}" if block.get("is_error") else result
            call_id = block.get("tool_use_id")
            before.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind == "thinking" and role == "assistant":
            read["reasoning_content"] = read.get("reasoning_content", "") + block.get(
                "thinking", ""
            )
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            read.setdefault("tool_calls", []).append(call)
        else:
            raise bad_request(
                f"{place}.content.{number}: blocks of type {kind!r} are not taken from the {role}",
                param="messages",
            )
    is_text = all(part["type"] == "text" for part in parts)
    if parts or role == "assistant":
        read["content"] = "\n".join(part["text"] for part in parts) if is_text else parts
        return [*before, read]
    return before


def _image(block: dict[str, Any], place: str) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise bad_request(
            f"{place}: expected an image with a source of base64; nothing is downloaded here",
            param="messages",
        )
    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: str | list[dict[str, Any]]) -> str:
    """Blocks of text as one text.  Raises: ApiError."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            raise bad_request(f"expected blocks of text, got {block!r:.80}", param="messages")
    return "\n".join(block["text"] for block in blocks)
