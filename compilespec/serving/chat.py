"""/v1/chat/completions: conversations answered through the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from compilespec.runtime.outputs import Delta, GenerationOutput
from compilespec.runtime.ticket import Ticket
from compilespec.serving.answers import (
    Frame,
    UsageCount,
    abort_open,
    ending,
    follow,
    json_answer,
    marks,
    usage,
    wait_all,
)
from compilespec.serving.events import EventStream, unless_left
from compilespec.serving.logprobs import chat_logprobs
from compilespec.serving.params import read_guide, read_params
from compilespec.serving.parsers.parts import Parser, Parts, ToolCall, read_json
from compilespec.serving.protocol import ChatRequest, read_body
from compilespec.serving.service import ServedPrompt, Service
from compilespec.serving.tools import Reading, read_tools


async def answer_chat(service: Service, request: Request) -> Response:
    """Raises: ApiError, ClientGone."""
    asked = await read_body(request, ChatRequest)
    service.check_model(asked.model)
    service.check_count(asked.n or 1)
    answer = Chat(service, asked)
    prompts, tickets = await unless_left(request, service.submit(answer.read, asked.priority))
    if asked.stream:
        events = answer.events(prompts, tickets)
        return EventStream(events, service.options, lambda: abort_open(tickets))
    outputs = await unless_left(request, wait_all(tickets, service.options))
    return json_answer(answer.whole(outputs))


class Chat:
    """One request and its answer, in as many samples as the request asks for."""

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        self._service, self._asked = service, asked
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        name = service.name_of(asked.model)
        self._frame = Frame(kind=kind, model=name, prefix="chatcmpl")
        self._reading: Reading | None = None

    def read(self) -> list[ServedPrompt]:
        """Read the prompt; not on the event loop.  Raises: SpecError, ApiError."""
        asked, engine = self._asked, self._service.engine
        tools = read_tools(asked, self._service)
        read = engine.read(chat_prompt(asked, tools.shown))
        ids = list(read.ids)
        self._reading = tools.reading(ids)
        chosen = self._reading.guide(read_guide(asked))
        chosen["shown_token_ids"] = self._reading.shown_token_ids
        chosen["adapter"] = self._service.adapter_of(asked.model)
        params = read_params(asked, engine, len(ids), chosen)
        return [ServedPrompt(token_ids=ids, params=params, read=read)]

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return self._frame.around(choices, usage=usage(outputs, len(outputs)))

    async def events(
        self, prompts: Sequence[ServedPrompt], tickets: Sequence[Ticket]
    ) -> AsyncGenerator[dict[str, Any], None]:
        count = UsageCount(self._asked.stream_options, prompts)
        outputs: dict[int, GenerationOutput] = {}
        streams = [_Stream(self.parser()) for _ in tickets]
        async for index, delta in follow(tickets):
            choice = self._piece(index, delta, streams[index])
            if delta.output is not None:
                outputs[index] = delta.output
            if choice is not None:
                yield self._frame.around([choice], **count.add(delta))
        if count.is_asked:
            ended = [outputs[index] for index in range(len(tickets))]
            yield self._frame.around([], usage=usage(ended, len(ended)))

    def parser(self) -> Parser:
        assert self._reading is not None, "the prompt is read before its answer"
        return self._reading.parser()

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        parser = self.parser()
        parts = parser.add(output.text or "") + parser.finish()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parts.content if parts.content or not parts.calls else None,
        }
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [call.as_dict() for call in parts.calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None
            if output.logprobs is None
            else chat_logprobs(output.logprobs, self._service.spelled),
            **self._ending(output, has_calls=bool(parts.calls)),
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _piece(self, index: int, delta: Delta, stream: _Stream) -> dict[str, Any] | None:
        """The fields that a delta adds to a choice; None: nothing yet."""
        asked = self._asked
        told = stream.add(delta)
        wants_all = asked.logprobs or asked.mark_drafts or asked.return_token_ids
        if not told and delta.output is None and not wants_all:
            return None
        choice: dict[str, Any] = {"index": index, "delta": told, "finish_reason": None}
        if delta.logprobs is not None:
            choice["logprobs"] = chat_logprobs(delta.logprobs, self._service.spelled)
        if delta.output is not None:
            choice |= self._ending(delta.output, has_calls=stream.num_calls > 0)
        if asked.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if asked.mark_drafts:
            choice["drafted"] = marks(delta, self._service.spelled)
        return choice

    def _ending(self, output: GenerationOutput, *, has_calls: bool) -> dict[str, Any]:
        told = ending(output, self._service.engine.eos_token_ids)
        if has_calls and told["finish_reason"] == "stop":
            told["finish_reason"] = "tool_calls"
        return told


class _Stream:
    """One choice of a streamed answer."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self._is_begun = parser, False
        self.num_calls = 0

    def add(self, delta: Delta) -> dict[str, Any]:
        """The `delta` of a chunk; empty where there is nothing to send yet."""
        parts = self._parser.add(delta.text)
        if delta.output is not None:
            parts += self._parser.finish()
        told = self._told(parts)
        if not self._is_begun and (told or delta.output is not None):
            told = {"role": "assistant", "content": "", **told}
            self._is_begun = True
        return told

    def _told(self, parts: Parts) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if parts.content:
            told["content"] = parts.content
        if parts.reasoning:
            told["reasoning_content"] = parts.reasoning
        if parts.calls:
            told["tool_calls"] = [self._call(call) for call in parts.calls]
        return told

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """A call that begins, or more arguments of the last one."""
        self.num_calls += bool(call.name)
        told = call.as_dict() if call.name else {"function": {"arguments": call.arguments}}
        return {"index": self.num_calls - 1, **told}


def chat_prompt(asked: Any, tools: Sequence[Any] | None) -> dict[str, Any]:
    """The prompt for the engine: the messages in the form that templates read."""
    prompt: dict[str, Any] = {"messages": [_message(one) for one in asked.messages]}
    if tools:
        prompt["tools"] = list(tools)
    options = dict(getattr(asked, "chat_template_kwargs", None) or {})
    effort = getattr(asked, "reasoning_effort", None)
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    if options:
        prompt["template_options"] = options
    return prompt


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message without nulls; OpenAI's "developer" becomes "system", and arguments of calls become
    objects.
    """
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("role") == "developer":
        message["role"] = "system"
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call) for call in calls]
    if "reasoning" in message:  # vLLM's name
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if isinstance(calls, list) or isinstance(message.get("reasoning_content"), str):
        message.setdefault("content", "")
    return message


def _call(given: Any) -> Any:
    """A call with its arguments as an object, if they are one."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        return given
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = read_json(arguments or "{}")
        except ValueError:
            return given
    return {**given, "function": {**function, "arguments": arguments}}
