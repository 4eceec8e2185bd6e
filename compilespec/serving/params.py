"""Sampling parameters of requests."""

from __future__ import annotations

from typing import Any

from compilespec.runtime.blocks import num_blocks_for
from compilespec.runtime.engine import Engine
from compilespec.runtime.guides import Choice, JsonSchema, Regex
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.serving.errors import bad_request
from compilespec.serving.protocol import ChatRequest, CompletionRequest, Sampling

SAME = (
    "temperature", "top_p", "min_p", "n", "seed", "presence_penalty", "frequency_penalty",
    "logit_bias", "repetition_penalty", "stop_token_ids", "ignore_eos", "allowed_token_ids",
    "bad_token_ids", "num_draft_tokens", "deadline_seconds",
)  # fmt: skip
OPENAI_TEMPERATURE = 1.0  # the temperature if neither the request nor the checkpoint has one
COMPLETION_TOKENS = 16  # OpenAI's default there; chats may fill the context


def read_params(
    asked: CompletionRequest | ChatRequest, engine: Engine, num_prompt_tokens: int, chosen: Any
) -> SamplingParams:
    """The parameters of one prompt; the checkpoint's fill those that the request leaves out.

    Args: chosen: its guide and its adapter, by the names of `SamplingParams`.

    Raises: InvalidRequest, ApiError.
    """
    given = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    if asked.top_k is not None:
        given["top_k"] = max(asked.top_k, 0)  # -1 is "all" elsewhere
    if asked.min_tokens is not None:
        given["min_new_tokens"] = asked.min_tokens
    return SamplingParams(
        **{
            "temperature": OPENAI_TEMPERATURE,
            **engine.generation_defaults,
            **given,
            "max_new_tokens": _max_new_tokens(asked, engine, num_prompt_tokens),
            "stop": asked.stop,
            "logprobs": asked.wants_logprobs,
            "prompt_logprobs": _prompt_logprobs(asked),
            "prediction": _prediction(asked.prediction),
            **chosen,
        }
    )


def read_guide(asked: Sampling) -> Any:
    """The guide that `response_format` stands for.  Raises: ApiError, InvalidRequest."""
    form = asked.response_format or {"type": "text"}
    kind, is_compact = form.get("type"), asked.compact_json
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonSchema({"type": "object"}, compact=is_compact)
    if kind == "json_schema":
        told = form.get("json_schema")
        schema = told.get("schema") if isinstance(told, dict) else None
        if not isinstance(schema, dict):
            raise _bad_format('{"type": "json_schema", "json_schema": {"schema": {...}}}')
        return JsonSchema(schema, compact=is_compact)
    if kind == "regex":
        if not isinstance(form.get("regex"), str):
            raise _bad_format('{"type": "regex", "regex": "..."}')
        return Regex(form["regex"])
    if kind == "choice":
        choice = form.get("choice")
        if not isinstance(choice, list) or not all(isinstance(one, str) for one in choice):
            raise _bad_format('{"type": "choice", "choice": ["...", "..."]}')
        return Choice(choice)
    raise _bad_format("a type of text, json_object, json_schema, regex or choice")


def _prediction(given: dict[str, Any] | None) -> str | None:
    """The text that the output may repeat (OpenAI's predicted outputs).  Raises: ApiError."""
    if given is None:
        return None
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    )
    if given.get("type") != "content" or not is_text or set(given) != {"type", "content"}:
        raise bad_request(
            'prediction: expected {"type": "content", "content": "..."}, or a list of text parts',
            param="prediction",
        )
    return "".join(part["text"] for part in parts or ())


def _bad_format(expected: str) -> Exception:
    return bad_request(f"response_format: expected {expected}", param="response_format")


def _prompt_logprobs(asked: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(asked, ChatRequest) or not asked.echo:
        return None
    return asked.logprobs


def _max_new_tokens(
    asked: CompletionRequest | ChatRequest, engine: Engine, num_prompt_tokens: int
) -> int:
    wanted = asked.max_tokens
    if isinstance(asked, ChatRequest):
        if asked.max_completion_tokens is not None:
            wanted = asked.max_completion_tokens
        if wanted is None:
            return _room(engine, num_prompt_tokens)
    elif wanted is None:
        return min(COMPLETION_TOKENS, _room(engine, num_prompt_tokens))
    elif wanted == 0 and asked.echo:
        return 1  # which is not shown
    if wanted == 0:
        raise bad_request(
            "max_tokens: expected at least 1, or 0 together with echo, got 0", param="max_tokens"
        )
    return wanted


def _room(engine: Engine, num_prompt_tokens: int) -> int:
    """The number of new tokens that fit beside the prompt."""
    sizes = engine.geometry
    length = min(sizes.config.max_seq_len, sizes.config.num_blocks * sizes.config.block_size)
    while num_blocks_for(sizes, length) > sizes.config.num_blocks:
        length -= sizes.config.block_size
    return max(1, length - num_prompt_tokens)
