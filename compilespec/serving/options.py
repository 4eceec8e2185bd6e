"""The server's address, and its limits for its clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption, is_integer
from compilespec.serving.parsers.formats import FORMATS, REASONING

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of `create_app` beside the engine; times in seconds."""

    model_names: tuple[str, ...] = ("default",)
    """The names that requests may give as `model`; answers have the first."""

    api_keys: tuple[str, ...] = ()
    """API keys, one of which every request must carry, except for / and /health; none: open to
    all.
    """

    admin_keys: tuple[str, ...] = ()
    """Keys, one of which requests to /v1/admin/ must carry; none: there are no such routes."""

    max_waiting: int | None = 256
    """Requests that may wait beyond those that run; None: no limit."""

    max_body_bytes: int = 4 * 2**20
    """The largest size of a request."""

    read_timeout_s: float = 30.0
    """Time for a request to arrive."""

    request_timeout_s: float = 600.0
    """Time for an answer; a longer one is aborted."""

    write_timeout_s: float = 60.0
    """Time for a client to read what was sent; a slower one is dropped."""

    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call the server, as "https://example.org"; "*" is any, none: its own
    pages.
    """

    stored_responses_mib: float = 64.0
    """MiB for answers of /v1/responses that later requests may continue; the oldest ones go."""

    stored_responses_dir: str | None = None
    """A folder in which they outlive the server; none: they are kept in memory."""

    tool_format: str = "auto"
    """The form in which the model writes tool calls, one of `parsers.formats.FORMATS`, "none", or
    by its template and its tokens.
    """

    reasoning_parser: str = "auto"
    """The form in which the model writes its reasoning: "think", "gemma4", "mistral", "none", or by
    its template.
    """

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise _invalid("model_names", "at least one name", self.model_names)
        if not all(self.api_keys):
            raise _invalid("api_keys", "keys of at least one character", self.api_keys)
        if not all(self.admin_keys):
            raise _invalid("admin_keys", "keys of at least one character", self.admin_keys)
        if wrong := [one for one in self.allowed_origins if not ORIGIN.fullmatch(one)]:
            raise _invalid("allowed_origins", "'*' or scheme://host[:port], no path", wrong[0])
        if self.max_waiting is not None and (
            not is_integer(self.max_waiting) or self.max_waiting < 0
        ):
            raise _invalid("max_waiting", "an integer of at least 0, or None", self.max_waiting)
        for name in ("max_body_bytes", "read_timeout_s", "request_timeout_s", "write_timeout_s",
                     "stored_responses_mib"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise _invalid(name, "a number above 0", value)
        for name, known in (
            ("tool_format", ("auto", *FORMATS, "none")),
            ("reasoning_parser", ("auto", *REASONING, "none")),
        ):
            if getattr(self, name) not in known:
                raise _invalid(name, f"one of {', '.join(known)}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The address of a server, its certificate, and its grace period."""

    host: str = "127.0.0.1"
    """The address to listen at; 127.0.0.1 is this machine alone."""

    port: int = 8000
    """The port; 0: any free one."""

    ssl_certfile: str | None = None
    """The certificate, with which HTTPS is served."""

    ssl_keyfile: str | None = None
    """The key of the certificate."""

    ssl_keyfile_password: str | None = None
    """The password of the key."""

    ssl_ca_certs: str | None = None
    """The authority for clients' certificates, which are then required."""

    drain_timeout_s: float = 60.0
    """Seconds for requests to end after SIGTERM; longer ones are aborted."""


def _invalid(name: str, expected: str, got: Any) -> InvalidOption:
    return InvalidOption(f"{name}: expected {expected}, got {got!r}")
