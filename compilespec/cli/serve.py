"""`compilespec serve`: an HTTP server in OpenAI's protocol over one engine."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import Any

from compilespec.cli.flags import add_engine_options, add_fields, given_of
from compilespec.cli.generate import DEMO, compile_engine, set_threads, spec_of
from compilespec.cli.ranks import is_first_rank
from compilespec.errors import InvalidOption
from compilespec.serving.options import Binding, ServerOptions

KEY_VARIABLE = "COMPILESPEC_API_KEY"
ADMIN_KEY_VARIABLE = "COMPILESPEC_ADMIN_KEY"


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="answer OpenAI's protocol over HTTP",
        description="Compile a model and a drafter, and serve them: /v1/completions, "
        "/v1/chat/completions, /v1/models, /health, /metrics, a page at /.  SIGTERM ends it when "
        "its requests have ended.",
    )
    add = parser.add_argument
    add_engine_options(parser, default=DEMO, without=("adapters",))
    add(
        "--adapter",
        action="append",
        dest="adapters",
        metavar="[NAME=]DIR",
        help="a LoRA adapter that clients choose with the model's name NAME; may be repeated; "
        "without NAME= one that is merged into the target",
    )
    add("--chat-template", metavar="FILE", help="a chat template in place of the model's own")
    _add_server_options(parser.add_argument_group("server").add_argument)
    parser.set_defaults(run=run, json=False)


def _add_server_options(add: Any) -> None:
    add_fields(add, Binding)
    add_fields(add, ServerOptions)
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
    add(
        "--admin-key",
        action="append",
        metavar="KEY",
        help="open /v1/admin/, where the weights are changed, to clients that send this key; may "
        f"be repeated (better: the variable {ADMIN_KEY_VARIABLE})",
    )
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin ask, as https://example.org, or * for any; may be "
        "repeated (default: the server's own alone)",
    )
    add(
        "--quiet",
        action="store_true",
        help="print the address and warnings alone, no line a request",
    )


def run(args: argparse.Namespace) -> int:
    from compilespec.serving import run as serve
    from compilespec.serving.process import check

    options = server_options(args)  # check before minutes of compiling
    binding = Binding(**_given(args, Binding))
    if is_first_rank():  # the others listen nowhere
        check(binding)
    template = _read(args.chat_template, "--chat-template")
    set_threads(args.threads)
    _log(quiet=args.quiet)
    _warn_if_open(binding.host, options)
    engine = compile_engine(args, spec_of(args))
    if template is not None:
        if engine.tokenizer is None:
            raise InvalidOption("--chat-template: the model has no tokenizer to apply it")
        engine.tokenizer.chat_template = template  # type: ignore[attr-defined]
    return serve(engine, options, binding)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Raises: InvalidOption, MissingDependency."""
    names = args.served_model_name or [Path(str(args.model)).name or str(args.model)]
    if not args.served_model_name and str(args.model).count("/") == 1:
        names = [str(args.model).rstrip("/")]  # org/name
    return ServerOptions(
        model_names=tuple(names),
        api_keys=_keys(args),
        admin_keys=_admin_keys(args),
        allowed_origins=tuple(args.allowed_origin or ()),
        **_given(args, ServerOptions),
    )


def _given(args: argparse.Namespace, record: type[Any]) -> dict[str, Any]:
    return given_of(args, [field.name for field in dataclasses.fields(record)])


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key or ())
    keys += (_read(args.api_key_file, "--api-key-file") or "").split()
    if variable := os.environ.get(KEY_VARIABLE):
        keys.append(variable)
    if args.api_key_file is not None and not keys:
        raise InvalidOption("--api-key-file: expected a key a line, got none")
    return tuple(keys)


def _admin_keys(args: argparse.Namespace) -> tuple[str, ...]:
    variable = os.environ.get(ADMIN_KEY_VARIABLE)
    return (*(args.admin_key or ()), *([variable] if variable else []))


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
