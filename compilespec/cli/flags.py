"""Flags that commands share, and errors that name flags instead of keywords."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import did_you_mean, meant

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


def add_placement_options(add: Callable[..., Any]) -> None:
    """--dtype, --device and --max-seq-len."""
    add("--dtype", metavar="NAME", help="float32, bfloat16, float16, float64 (default: as stored)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cpu)")
    add("--max-seq-len", type=int, metavar="N", help="longest prompt plus output")


def add_draft_vocab_options(add: Callable[..., Any]) -> None:
    """--draft-vocab-size and --draft-vocab-counts."""
    add("--draft-vocab-size", type=int, metavar="N", help="rows that the drafter's head keeps")
    add(
        "--draft-vocab-counts",
        metavar="FILE",
        help="counts or a text to choose them by (default: token_counts.json beside the target)",
    )


def add_tree_option(add: Callable[..., Any]) -> None:
    """--draft-tree."""
    add(
        "--draft-tree",
        type=draft_tree,
        metavar="TREE",
        help=f"drafts as a tree instead of a chain: {TREES}",
    )


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


def add_adapter_option(add: Callable[..., Any], *, by_name: bool) -> None:
    """--adapter."""
    if by_name:
        add(
            "--adapter",
            action="append",
            metavar="[NAME=]DIR",
            help="a LoRA adapter that clients choose with the model's name NAME; may be repeated; "
            "without NAME= one that is merged into the target",
        )
    else:
        add("--adapter", metavar="DIR", help="a LoRA adapter, merged into the target")


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
    switch = f"({'|'.join(one for one in flags if isinstance(vars(args)[one], bool)) or '(?!)'})"
    start = r"(?<![\w.'\"/-])"
    for form in (
        rf"{start}{switch}=True\b",
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
    return {name: f"--{name.replace('_', '-')}" for name in vars(args) if name != "run"}
