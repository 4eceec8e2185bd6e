"""/v1/completions: prompts continued."""

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
from compilespec.serving.errors import bad_request
from compilespec.serving.events import EventStream, unless_left
from compilespec.serving.logprobs import TextOffsets, completion_logprobs
from compilespec.serving.params import read_guide, read_params
from compilespec.serving.protocol import CompletionRequest, read_body
from compilespec.serving.service import ServedPrompt, Service


async def complete(service: Service, request: Request) -> Response:
    """Raises: ApiError, ClientGone."""
    asked = await read_body(request, CompletionRequest)
    service.check_model(asked.model)
    service.check_count(len(asked.prompts) * (asked.n or 1))
    if asked.stream and asked.echo and asked.logprobs is not None:
        raise bad_request("echo with logprobs comes in one piece; leave out stream", "stream")
    frame = Frame(kind="text_completion", model=service.name_of(asked.model), prefix="cmpl")
    answer = _Completion(service, asked, frame)
    prompts, tickets = await unless_left(request, service.submit(answer.read, asked.priority))
    if asked.stream:
        events = answer.events(prompts, tickets)
        return EventStream(events, service.options, lambda: abort_open(tickets))
    outputs = await unless_left(request, wait_all(tickets, service.options))
    return json_answer(answer.whole(prompts, outputs))


class _Completion:
    """One request and its answer.  Output i belongs to prompt i // n."""

    def __init__(self, service: Service, asked: CompletionRequest, frame: Frame) -> None:
        self._service, self._asked, self._frame = service, asked, frame
        self._num_samples = asked.n or 1
        self._num_hidden = int(asked.max_tokens == 0)  # the engine emits at least one

    def read(self) -> list[ServedPrompt]:
        """Read the prompts; not on the event loop.  Raises: SpecError, ApiError."""
        asked, engine = self._asked, self._service.engine
        chosen = {
            "guide": read_guide(asked), "adapter": self._service.adapter_of(asked.model),
        }  # fmt: skip
        prompts = []
        for given in asked.prompts:
            ids = engine.encode(given)
            text = given if isinstance(given, str) else None
            if asked.echo and text is None and engine.tokenizer is not None:
                text = str(engine.tokenizer.decode(ids))
            params = read_params(asked, engine, len(ids), chosen)
            prompts.append(ServedPrompt(token_ids=ids, params=params, text=text))
        return prompts

    def whole(
        self, prompts: Sequence[ServedPrompt], outputs: Sequence[GenerationOutput]
    ) -> dict[str, Any]:
        choices = [
            self._choice(index, prompts[index // self._num_samples], output)
            for index, output in enumerate(outputs)
        ]
        return self._frame.around(choices, usage=self._usage(outputs))

    async def events(
        self, prompts: Sequence[ServedPrompt], tickets: Sequence[Ticket]
    ) -> AsyncGenerator[dict[str, Any], None]:
        count = UsageCount(self._asked.stream_options, prompts)
        outputs: dict[int, GenerationOutput] = {}
        places: dict[int, TextOffsets] = {}  # by output
        async for index, delta in follow(tickets):
            prompt = prompts[index // self._num_samples]
            is_first = index not in places
            at = places.setdefault(index, TextOffsets(self._service.spelled))
            choice = self._piece(index, delta, at)
            if is_first and self._asked.echo:
                choice["text"] = (prompt.text or "") + choice["text"]
            if delta.output is not None:
                outputs[index] = delta.output
            yield self._frame.around([choice], **count.add(delta))
        if count.is_asked:
            ended = [outputs[index] for index in range(len(tickets))]
            yield self._frame.around([], usage=self._usage(ended))

    def _usage(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        return usage(outputs, self._num_samples, num_hidden=self._num_hidden)

    def _choice(self, index: int, prompt: ServedPrompt, output: GenerationOutput) -> dict[str, Any]:
        asked, text, ids = self._asked, output.text or "", output.token_ids
        if self._num_hidden:
            text, ids = "", []
        told = (prompt.text or "") + text if asked.echo else text
        logprobs = None
        if output.logprobs is not None:
            entries = output.logprobs[: len(ids)]
            shown, before = [*ids], list[Any]()
            if asked.echo:
                shown, before = [*prompt.token_ids, *ids], list(output.prompt_logprobs or ())
            spelled = self._service.spelled
            places = TextOffsets(spelled, told if asked.echo else None)
            logprobs = completion_logprobs(shown, [*before, *entries], spelled, places)
        choice = {
            "index": index,
            "text": told,
            "logprobs": logprobs,
            **ending(output, self._service.engine.eos_token_ids),
        }
        if self._num_hidden:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if asked.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt.token_ids}
        return choice

    def _piece(self, index: int, delta: Delta, places: TextOffsets) -> dict[str, Any]:
        """The fields that a delta adds to a choice."""
        hides = bool(self._num_hidden)
        ids = () if hides else delta.token_ids
        logprobs = None
        if delta.logprobs is not None and not hides:
            logprobs = completion_logprobs(ids, delta.logprobs, self._service.spelled, places)
        choice: dict[str, Any] = {
            "index": index,
            "text": "" if hides else delta.text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if delta.output is not None:
            choice |= ending(delta.output, self._service.engine.eos_token_ids)
            if hides:
                choice |= {"finish_reason": "length", "stop_reason": None}
        if self._asked.return_token_ids:
            choice["token_ids"] = list(ids)
        if self._asked.mark_drafts:
            choice["drafted"] = marks(delta, self._service.spelled)
        return choice
