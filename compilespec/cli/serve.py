"""`compilespec serve`: an HTTP server in OpenAI's protocol over one engine."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilespec.cli.flags import (
    add_adapter_option,
    add_draft_vocab_options,
    add_model_option,
    add_placement_options,
    add_tree_option,
)
from compilespec.cli.generate import (
    DEMO,
    add_quantize_options,
    compile_engine,
    draft_counts,
    set_threads,
    spec_of,
)
from compilespec.cli.ranks import add_ranks_option, is_first_rank
from compilespec.errors import InvalidOption

if TYPE_CHECKING:
    from compilespec.serving.options import ServerOptions

KEY_VARIABLE = "COMPILESPEC_API_KEY"
OF_SERVER = (
    "max_waiting", "max_body_bytes", "read_timeout_s", "request_timeout_s", "write_timeout_s",
    "tool_parser", "reasoning_parser",
)  # fmt: skip
OF_BINDING = (
    "host", "port", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs",
    "drain_timeout_s",
)  # fmt: skip
OF_ENGINE = (
    "max_batch_size", "max_prefill_tokens", "kv_cache_tokens", "max_step_tokens", "max_adapters",
    "max_adapter_rank",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="answer OpenAI's protocol over HTTP",
        description="Compile a model and a drafter, and serve them: /v1/completions, "
        "/v1/chat/completions, /v1/models, /health, /metrics, a page at /.  SIGTERM ends it when "
        "its requests have ended.",
    )
    add = parser.add_argument
    add_model_option(parser, default=DEMO)
    add("--spec", help="drafting method (default: eagle3 for the demo, else none)")
    add("--draft", metavar="DIR|NAME", help="drafter checkpoint (default: beside the target)")
    add(
        "--num-draft-tokens",
        type=draft_counts,
        metavar="K",
        help="drafts per step (default: checkpoint's); several, as in 0,2,5: each step uses the "
        "fastest",
    )
    add("--backend", choices=("inductor", "eager"), help="default: inductor")
    add_placement_options(add)
    add_quantize_options(add)
    add_adapter_option(add, by_name=True)
    add("--max-adapters", type=int, metavar="N", help="adapters that can be loaded at once")
    add("--max-adapter-rank", type=int, metavar="N", help="highest rank that there is room for")
    add_draft_vocab_options(add)
    add_tree_option(add)
    add_ranks_option(add)
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--max-batch-size", type=int, metavar="N", help="requests that run at once (default: 8)")
    add("--max-prefill-tokens", type=int, metavar="N", help="tokens of a prefill (default: 2048)")
    add("--max-step-tokens", type=int, metavar="N", help="tokens of a step, prefill and decode")
    add("--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache")
    add(
        "--prompt-logprobs",
        action="store_true",
        help="let completions ask for echo with logprobs, as evaluations do",
    )
    add("--chat-template", metavar="FILE", help="a chat template in place of the model's own")
    _add_server_options(parser.add_argument_group("server").add_argument)
    parser.set_defaults(run=run, json=False)


def _add_server_options(add: Any) -> None:
    add("--host", metavar="ADDRESS", help="where to listen (default: 127.0.0.1, this machine)")
    add("--port", type=int, metavar="N", help="default: 8000; 0: any that is free")
    add(
        "--served-model-name", action="append", metavar="NAME", help="name of the model for clients"
    )
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"what clients must send; may be repeated (better: the variable {KEY_VARIABLE}, or "
        "--api-key-file)",
    )
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin ask, as https://example.org, or * for any; may be "
        "repeated (default: the server's own alone)",
    )
    add("--max-waiting", type=int, metavar="N", help="requests that may wait (default: 256)")
    add("--max-body-bytes", type=int, metavar="N", help="size of a request (default: 4 MiB)")
    for name, what in (
        ("read", "for a request to arrive (default: 30)"),
        ("request", "for an answer to be whole (default: 600)"),
        ("write", "for a client to take what was sent (default: 60)"),
        ("drain", "for requests to end after SIGTERM (default: 60)"),
    ):
        dest = f"{name}_timeout_s"
        add(f"--{name}-timeout", dest=dest, type=float, metavar="SECONDS", help=what)
    add("--tool-parser", choices=("auto", "hermes", "llama", "none"), help="default: auto")
    add("--reasoning-parser", choices=("auto", "think", "none"), help="default: auto")
    add("--ssl-certfile", metavar="FILE", help="certificate: serve HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="its key")
    add("--ssl-keyfile-password", metavar="TEXT", help="of the key")
    add("--ssl-ca-certs", metavar="FILE", help="clients must have a certificate of these")
    add(
        "--quiet",
        action="store_true",
        help="print the address and warnings alone, no line a request",
    )


def run(args: argparse.Namespace) -> int:
    from compilespec.serving import run as serve
    from compilespec.serving.process import Binding, check

    options = server_options(args)  # check before minutes of compiling
    binding = Binding(**_given(args, OF_BINDING))
    if is_first_rank():  # the others listen nowhere
        check(binding)
    template = _read(args.chat_template, "--chat-template")
    set_threads(args.threads)
    _log(quiet=args.quiet)
    _warn_if_open(binding.host, options)
    changes: dict[str, Any] = _given(args, OF_ENGINE)
    if args.prompt_logprobs:
        changes["prompt_logprobs"] = True
    engine = compile_engine(args, spec_of(args), **changes)
    if template is not None:
        if engine.tokenizer is None:
            raise InvalidOption("--chat-template: the model has no tokenizer to apply it")
        engine.tokenizer.chat_template = template  # type: ignore[attr-defined]
    return serve(engine, options, binding)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Raises: InvalidOption, MissingDependency."""
    from compilespec.serving import ServerOptions

    names = args.served_model_name or [Path(str(args.model)).name or str(args.model)]
    if not args.served_model_name and str(args.model).count("/") == 1:
        names = [str(args.model).rstrip("/")]  # org/name
    return ServerOptions(
        model_names=tuple(names),
        api_keys=_keys(args),
        allowed_origins=tuple(args.allowed_origin or ()),
        **_given(args, OF_SERVER),
    )


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key or ())
    keys += (_read(args.api_key_file, "--api-key-file") or "").split()
    if variable := os.environ.get(KEY_VARIABLE):
        keys.append(variable)
    if args.api_key_file is not None and not keys:
        raise InvalidOption("--api-key-file: expected a key a line, got none")
    return tuple(keys)


def _read(name: str | None, flag: str) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{flag} {name}: expected a UTF-8 text file; {error}") from error


def _log(*, quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    serving = logging.getLogger("compilespec.serving")
    serving.addHandler(handler)
    serving.propagate = False
    serving.setLevel(logging.WARNING if quiet else logging.INFO)


def _warn_if_open(host: str, options: ServerOptions) -> None:
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not options.api_keys:
        logging.getLogger("compilespec.serving").warning(
            "%s may be reached from other machines, and anybody there may ask: set %s", host,
            KEY_VARIABLE,
        )  # fmt: skip
