"""Bodies of requests in OpenAI's names; our own fields stand beside them (its `extra_body`).

Unknown fields are refused, so that nothing is silently ignored.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from starlette.requests import Request

from compilespec.serving.errors import bad_request, validation_error

# Fields of other servers, and our names for them.
ELSEWHERE = {
    "guided_json": 'response_format={"type": "json_schema", ...}',
    "guided_regex": 'response_format={"type": "regex", "regex": ...}',
    "guided_choice": 'response_format={"type": "choice", "choice": [...]}',
    "structured_outputs": "response_format",
    "regex": 'response_format={"type": "regex", "regex": ...}',
    "json_schema": 'response_format={"type": "json_schema", ...}',
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "prompt_logprobs": "echo with logprobs, in /v1/completions",
    "best_of": "n",
    "suffix": "prompt (there is no infilling)",
    "functions": "tools",
    "function_call": "tool_choice",
}


# Fields that are not taken, with the values that ask for nothing; null asks for nothing in any
# field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
}


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else () if value is None else value


class Asked(BaseModel):
    """A part of a request, without its null fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Asked):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Our field and vLLM's: usage in every chunk."""

    include_obfuscation: bool = False
    """No effect: chunks are never padded."""


class Own(Asked):
    """The fields of ours that every protocol's requests for text have."""

    num_draft_tokens: int | None = None
    deadline_seconds: float | None = None
    priority: int = 0


OWN = tuple(Own.model_fields)


class Sampling(Own):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Our own fields.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] | None = None
    compact_json: bool = True
    """No white space between the parts of guided JSON."""
    return_token_ids: bool = False
    mark_drafts: bool = False
    """Chunks say which tokens were drafts."""


class CompletionRequest(Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wants_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, texts or ids, one or many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class ChatRequest(Sampling):
    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None

    # Our own fields.
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true; give it, too")
        return self

    @property
    def wants_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Asked):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    """The special tokens that the tokenizer puts around a prompt; a chat template writes its
    own.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Asked):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, form: type[Body]) -> Body:
    """The body of a request, checked.  Raises: ApiError."""
    try:
        data = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is no JSON: {error}; send one JSON object") from error
    if not isinstance(data, dict):
        raise bad_request(f"the body is a {type(data).__name__}: expected one JSON object")
    for name in [name for name in data if name not in form.model_fields]:
        if data[name] is not None and not _asks_nothing(name, data):
            raise bad_request(f"there is no field {name!r}{_instead(name, form)}", param=name)
        del data[name]
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from error


def _asks_nothing(name: str, data: dict[str, Any]) -> bool:
    """True where a field that is not taken has its default value."""
    return data[name] in NEUTRAL.get(name, ()) or (
        name == "best_of" and data[name] == data.get("n")
    )


def _instead(name: str, form: type[BaseModel]) -> str:
    near = ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, form.model_fields)), "")
    return f"; did you mean {near}?" if near else "; leave it out"
