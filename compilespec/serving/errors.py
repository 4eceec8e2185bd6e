"""Errors as clients see them: OpenAI's form, the cure in the message, no server internals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from compilespec.errors import (
    ContextExceeded,
    EngineClosed,
    GuideFailed,
    InvalidRequest,
    MissingDependency,
    NotSupported,
    QueueFull,
)

# Words of `compile()` and `SamplingParams`, and the names that a client of the server knows.
IN_API_WORDS = (
    (r"SamplingParams\.", ""),
    (r"\bmax_new_tokens\b", "max_tokens"),
    (r"\bmin_new_tokens\b", "min_tokens"),
    (r"\bguide\b(?=:| needs)", "response_format"),
    (r"^Choice: ", "response_format: "),
    (r"compile with (?:a )?(?:higher )?max_seq_len", "start the server with --max-seq-len"),
    (r"compile with kv_cache_tokens", "start the server with --kv-cache-tokens"),
    (
        r"needs an engine that was compiled with prompt_logprobs=True",
        "needs a server that was started with --prompt-logprobs",
    ),
    (
        r"set engine\.tokenizer\.chat_template, or give text",
        "ask /v1/completions, or start the server with --chat-template FILE",
    ),
    (r"compile with spec='suffix', or put", "start the server with --spec suffix, or put"),
    (r"compile with tokenizer=\.\.\.", "serve a model that has one"),
)

MESSAGES = "/v1/messages"  # begins the paths of Anthropic's protocol
_ANTHROPIC_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """An error of a request.

    Args:
        status: of HTTP.
        message: the expected and the actual value, and what to try.
        kind: OpenAI's `type`.
        code: for programs.
        param: the field at fault.
        retry_after: seconds after which a retry may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_KINDS.get(self.status, usual)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        """The answer to a request of `path`, in the form of its protocol."""
        body = self.anthropic_body if path.startswith(MESSAGES) else self.body
        return Response(
            orjson.dumps(body),
            status_code=self.status,
            headers={**self.headers, **(headers or {})},
            media_type="application/json",
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def server_error() -> ApiError:
    """The answer for faults that are not the client's."""
    return ApiError(
        500,
        "the server failed to answer; its log tells why, under the id in this reply's "
        "X-Request-Id; try again, or tell who runs it",
        kind="server_error",
        code="internal_error",
    )


def stopping() -> ApiError:
    return ApiError(
        503,
        "the server is stopping and takes no more requests; try again later",
        kind="service_unavailable_error",
        code="stopping",
        retry_after=5,
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer was not whole after {seconds:g} s; ask for fewer tokens, or start the server "
        "with a larger --request-timeout",
        kind="timeout_error",
        code="timeout",
    )


def api_error(error: BaseException) -> ApiError:
    """The answer for an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            f"{error}",
            kind="rate_limit_error",
            code="queue_full",
            retry_after=1,
        )
    if isinstance(error, EngineClosed):
        return stopping()
    if isinstance(error, InvalidRequest | NotSupported | GuideFailed | MissingDependency):
        message = in_api_words(str(error))
        field = re.match(r"(\w+): ", message)
        code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
        return bad_request(message, param=field[1] if field else None, code=code)
    return server_error()


def in_api_words(message: str) -> str:
    """A message of the engine in the names that clients know."""
    for pattern, words in IN_API_WORDS:
        message = re.sub(pattern, words, message)
    return message


def validation_error(errors: list[Any]) -> ApiError:
    """The answer for the first fault that pydantic finds."""
    first = errors[0]
    if first["loc"][:1] == ("prompt",) and len(first["loc"]) > 1:  # the first form of the field
        return bad_request(
            "prompt: expected a text, token ids, or a list of either, of one kind", param="prompt"
        )
    place = ".".join(str(part) for part in first["loc"])
    what = str(first["msg"]).removeprefix("Value error, ")
    return bad_request(f"{place}: {what}" if place else what, param=place or None)
