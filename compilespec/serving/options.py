"""How a server treats its clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption, is_integer

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `create_app` is told beside the engine; times in seconds."""

    model_names: tuple[str, ...] = ("default",)
    """What requests may name as `model`; answers have the first."""

    api_keys: tuple[str, ...] = ()
    """One of them must come with every request, but for / and /health; none: anybody may ask."""

    max_waiting: int | None = 256
    """Requests that may wait beside those that run; None: no limit."""

    max_body_bytes: int = 4 * 2**20
    """Size of a request."""

    read_timeout_s: float = 30.0
    """For a request to arrive."""

    request_timeout_s: float = 600.0
    """For an answer to be whole; what runs longer is aborted."""

    write_timeout_s: float = 60.0
    """For a client to take what was sent; one that does not is left."""

    allowed_origins: tuple[str, ...] = ()
    """Web pages that may ask, as "https://example.org"; "*" is any, none: those of the server."""

    tool_parser: str = "auto"
    """How the model writes tool calls: "hermes", "llama", "none", or by its template."""

    reasoning_parser: str = "auto"
    """How the model writes what it thinks: "think", "none", or by its template."""

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise _invalid("model_names", "at least one name", self.model_names)
        if not all(self.api_keys):
            raise _invalid("api_keys", "keys of at least one character", self.api_keys)
        if wrong := [one for one in self.allowed_origins if not ORIGIN.fullmatch(one)]:
            raise _invalid("allowed_origins", "'*' or scheme://host[:port], no path", wrong[0])
        if self.max_waiting is not None and (
            not is_integer(self.max_waiting) or self.max_waiting < 0
        ):
            raise _invalid("max_waiting", "an integer of at least 0, or None", self.max_waiting)
        for name in ("max_body_bytes", "read_timeout_s", "request_timeout_s", "write_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise _invalid(name, "a number above 0", value)
        for name, known in (
            ("tool_parser", ("auto", "hermes", "llama", "none")),
            ("reasoning_parser", ("auto", "think", "none")),
        ):
            if getattr(self, name) not in known:
                raise _invalid(name, f"one of {', '.join(known)}", getattr(self, name))


def _invalid(name: str, expected: str, got: Any) -> InvalidOption:
    return InvalidOption(f"{name}: expected {expected}, got {got!r}")
