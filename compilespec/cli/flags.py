"""Flags that commands share, and errors that name flags instead of keywords."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import did_you_mean, meant
from compilespec.pipeline.fields import CompileFields
from compilespec.serving.parsers.formats import FORMATS, REASONING

TREES = "paths of ranks such as 0,1,0.0,0.1, or top_k=4,depth=5,num_nodes=16"


class FlagParser(argparse.ArgumentParser):
    """Raises InvalidOption where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        raise InvalidOption(f"{message}; see {self.prog} --help")


def add_model_option(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """MODEL, or --model; `read_arguments` makes one of the two.

    Args:
        default: None where the command needs one.
    """
    said = "needed" if default is None else f"default: {default}"
    parser.add_argument(
        "model_word",
        nargs="?",
        metavar="MODEL",
        help="target: a directory, org/name of the hub, a GGUF file, org/name:Q4_K_M (a GGUF file "
        f"of the hub), or demo ({said})",
    )
    parser.add_argument("--model", metavar="DIR|NAME", help="the same as MODEL")
    parser.set_defaults(default_model=default)


def draft_counts(text: str) -> int | str | tuple[int, ...]:
    """`3`, `0,2,5` or `auto`.  Raises: ArgumentTypeError, which argparse reports."""
    if text == "auto":
        return text
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number, several such as 0,2,5, or auto; got {text!r}"
        ) from None
    return counts[0] if len(counts) == 1 else counts


def draft_tree(text: str) -> Any:
    """A `DraftTree`.  Raises: ArgumentTypeError, which argparse reports."""
    from compilespec.methods.draft_tree import DraftTree

    parts: list[str] = text.split(",")
    try:
        if "=" in text:
            pairs = [part.split("=") for part in parts]
            sizes = {name: int(size) for name, size in pairs}
            if len(sizes) < len(pairs):
                raise ValueError(text)
            return DraftTree(**sizes)  # type: ignore[arg-type]
        return DraftTree(choices=[tuple(map(int, part.split("."))) for part in parts])
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected {TREES}; got {text!r}") from None


KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, "TEXT"),
    "tuple[str, ...]": (str, "TEXT"),
    "Any": (str, "NAME"),
    "str | Path": (str, "DIR"),
    "str | GraphOptions": (str, "MODE"),
    "str | Path | Mapping[str, str | Path]": (str, "DIR"),
    "int | str | Sequence[int]": (draft_counts, "K|0,2,5|auto"),
    "DraftTree": (draft_tree, "0,1,0.0|top_k=4,depth=5,num_nodes=16"),
}  # types of fields: how their values are read, and shown
CHOICES = {
    "backend": ("inductor", "eager"),
    "acceptance": ("auto", "rejection", "block"),  # the others are lossy, or functions
    "layout": ("safeailab", "speculators"),
    "tool_format": ("auto", *FORMATS, "none"),
    "reasoning_parser": ("auto", *REASONING, "none"),
}
METAVARS = {
    "stored_responses_dir": "DIR",
    "start_from": "DIR", "draft_vocab_counts": "FILE", "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE", "ssl_ca_certs": "FILE", "dtype": "NAME", "host": "ADDRESS",
}  # fmt: skip
NO_FLAG = {
    "buckets": "sizes of two kinds",
    "logits_processor": "a function",
    "host_processors": "requests bring functions",
    "prompt_embeds": "requests bring tensors",
    "tensor_parallel_plan": "patterns of modules",
    **dict.fromkeys(("relaxed_topk", "relaxed_delta"), "of relaxed acceptance, which is lossy"),
    **dict.fromkeys(("begin_thinking_token_id", "end_thinking_token_id"), "of relaxed acceptance"),
    "force_num_accepted": "for benchmarks, which are Python",
    "model_names": "--served-model-name",
    "api_keys": "--api-key and --api-key-file",
    "allowed_origins": "--allowed-origin",
}  # fields of options, and the reason


def add_engine_options(
    parser: argparse.ArgumentParser, *, default: str | None, without: Sequence[str] = ()
) -> None:
    """MODEL, --spec, --draft, and a flag for each keyword of `compile()`.

    Args:
        default: the model; None where the command needs one.
        without: keywords that the command has no use for, or reads itself.
    """
    add = parser.add_argument
    add_model_option(parser, default=default)
    if "spec" not in without:
        demo = "eagle3 for the demo, else " if default else ""
        add("--spec", help=f"drafting method (default: {demo}none)")
    add("--draft", metavar="DIR|NAME", help="drafter checkpoint (default: beside the target)")
    add("--dtype", metavar="NAME", help="float32, bfloat16, float16, float64 (default: as stored)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    add_fields(add, CompileFields, without=without)
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")


def add_fields(
    add: Callable[..., Any],
    record: type[Any],
    *,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> None:
    """A flag for each field of a record of options; None where it is not given."""
    told = _sentences(record)
    for field in dataclasses.fields(record):
        name = field.name
        if name in NO_FLAG or name in without or (only is not None and name not in only):
            continue
        form: dict[str, Any] = {"default": None, "help": _help(told.get(name, ""), field.default)}
        kind = str(field.type).removesuffix(" | None")
        if kind in ("bool", "bool | str"):
            form["action"] = (
                "store_true" if field.default is False else argparse.BooleanOptionalAction
            )
        elif name in CHOICES:
            form["choices"] = CHOICES[name]
        else:
            form["type"], form["metavar"] = KINDS[kind]
            seconds = "SECONDS" if name.endswith("_s") else form["metavar"]
            form["metavar"] = METAVARS.get(name, seconds)
        if kind.startswith("tuple"):
            form["action"] = "append"
        add(flag_of(name), dest=name, **form)


def _sentences(record: type[Any]) -> dict[str, str]:
    """The documentation of each field: given to `keyword`, or the string under the field."""
    told = {field.name: field.metadata.get("doc", "") for field in dataclasses.fields(record)}
    if not any(told.values()):
        (made,) = ast.parse(inspect.getsource(record)).body
        assert isinstance(made, ast.ClassDef)
        for one, below in itertools.pairwise(made.body):
            match one, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    told[name] = inspect.cleandoc(text).replace("\n", " ")
    return told


def _help(told: str, default: Any) -> str:
    """The first sentence."""
    text = told.partition(".  ")[0].removesuffix(".").replace("%", "%%")
    if default is None:
        return re.sub(r"\b(with )?None( takes| is|:)?", "by default", text)
    return text if isinstance(default, bool) or default == () else f"{text} (default: {default})"


def flag_of(name: str) -> str:
    """The flag of a keyword: values of one flag are given one at a time, seconds need no unit."""
    return "--" + {"adapters": "adapter"}.get(name, name.removesuffix("_s")).replace("_", "-")


def compile_keywords(args: argparse.Namespace, spec: str) -> dict[str, Any]:
    """The keywords of `compile()` that were given; those of drafters if the method drafts."""
    names = ["draft", "dtype", "device", *(one.name for one in dataclasses.fields(CompileFields))]
    given = given_of(args, names)
    if "adapters" in given:
        given["adapters"] = read_adapters(given["adapters"])
    drafts = may_draft(spec)
    return {name: value for name, value in given.items() if drafts or "draft" not in name}


def given_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of flags that were given, by keyword."""
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def may_draft(spec: str) -> bool:
    """True where the method drafts, or `auto` may choose one that does.  Raises: UnknownMethod."""
    from compilespec.methods.registry import get_method

    method = get_method(spec).capabilities
    return method.kind != "none" or method.chooses


def read_adapters(given: str | Sequence[str] | None) -> str | dict[str, str] | None:
    """Read the value of --adapter for `compile(adapters=)`.  Raises: InvalidOption."""
    if given is None or isinstance(given, str):
        return given
    named = dict(value.split("=", 1) for value in given if "=" in value)
    if len(named) == len(given):
        return named
    if len(given) > 1:
        raise InvalidOption(
            "--adapter: expected one DIR, which is merged, or NAME=DIR each, with names of their "
            f"own; got {', '.join(given)}"
        )
    return given[0]


def read_arguments(parser: FlagParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command.  Raises: InvalidOption, also for unknown flags."""
    args, unknown = parser.parse_known_args(argv)
    if hasattr(args, "model_word"):
        unknown = _take_model(args, unknown)
    if unknown:
        given = next((one for one in unknown if one.startswith("-")), unknown[0]).partition("=")[0]
        ours = meant(given.lstrip("-"), _flags(args), "SamplingParams", "compile")
        name, _, remark = ours.partition(" ")
        near = f"did you mean {_flags(args)[name]}{remark and f' {remark}'}?" if ours else ""
        raise InvalidOption(f"no argument {given}; {near or f'see {parser.prog} --help'}")
    return args


def _take_model(args: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Set `model` from the word, which argparse may have left behind flags; returns what else was
    left.
    """
    given = [one for one in (vars(args).pop("model_word"), args.model) if one is not None]
    default = vars(args).pop("default_model")
    if not given and unknown and not any(one.startswith("-") for one in unknown):
        given, unknown = unknown[:1], unknown[1:]
    if len(given) > 1:
        raise InvalidOption(f"MODEL: expected one, got {' and '.join(given)}")
    if unknown and not unknown[0].startswith("-") and hasattr(args, "prompt"):
        raise InvalidOption(f"no argument {unknown[0]!r}; give a text as --prompt TEXT")
    args.model = given[0] if given else default
    if args.model is None:
        raise InvalidOption("MODEL is needed: a directory, org/name of the hub, or a GGUF file")
    return unknown


def in_flags(message: str, args: argparse.Namespace) -> str:
    """An error message with the command's flags in place of the keywords that they stand for.

    A keyword is recognised by its form: after `SamplingParams.`, before `=`, by an underscore, or
    as the first word, before "must" or a colon.
    """
    flags = _flags(args)
    name = f"({'|'.join(flags) or '(?!)'})"
    long = f"({'|'.join(one for one in flags if '_' in one) or '(?!)'})"
    start = r"(?<![\w.'\"/-])"
    for form in (
        rf"{start}{name}=True\b",
        rf"{start}SamplingParams\.{name}\b",
        rf"{start}{name}=(?P<value>(?=[^\s,;).]))?",
        rf"{start}{long}(?![\w'\"/]|\.\w)",
        rf"^{name}(?= must|:)",
    ):
        message = re.sub(form, lambda found: _flag_of(found, flags), message)
    return message


def _flag_of(found: re.Match[str], flags: dict[str, str]) -> str:
    has_value = found.groupdict().get("value") is not None
    return flags[found.group(1)] + (" " if has_value else "")


def _flags(args: argparse.Namespace) -> dict[str, str]:
    """The command's flags by keyword."""
    return {name: flag_of(name) for name in vars(args) if name != "run"}
