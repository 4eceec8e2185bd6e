"""`compilespec bench`: every drafting method and K on the same prompts, beside plain decoding."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compilespec.cli import report
from compilespec.cli.generate import (
    DEMO,
    add_quantize_options,
    compile_engine,
    load_quantized,
    print_json,
    read_prompts,
    set_threads,
)
from compilespec.errors import DraftNotFound, InvalidOption, SpecError

if TYPE_CHECKING:
    from compilespec.cli.compare import Comparison, Way
    from compilespec.runtime.engine import Engine

# How far apart the two best logits may be where two ways part, as a share of the dtype's rounding:
# a wider gap is no near tie, and the tokens are wrong.
MARGINS = {"bfloat16": 0.25, "float16": 0.05, "float32": 1e-4, "float64": 1e-9}
PLAIN = "plain"


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="acceptance length and speed of methods, beside plain decoding",
        description="Decode the same prompts with every method and K, check the tokens, then print "
        "acceptance length, tokens per second and the ratio to plain decoding.",
    )
    add = parser.add_argument
    add("--model", default=DEMO, metavar="DIR|demo", help="target checkpoint (default: demo)")
    add(
        "--methods",
        default="all",
        metavar="NAME[,NAME..]|all",
        help="drafting methods; all: those whose drafter lies beside the target (default: all)",
    )
    add("--draft", metavar="DIR", help="drafter checkpoint, if one method is given")
    add(
        "--num-draft-tokens", type=int, nargs="+", default=[1, 3, 5], metavar="K",
        help="drafts per step (default: 1 3 5)",
    )  # fmt: skip
    add("--prompt", action="append", metavar="TEXT", help="prompt; may be repeated")
    add("--prompt-file", metavar="FILE", help="file with one prompt, '-' for stdin")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="timed rounds (default: %(default)s)")
    add("--backend", choices=("inductor", "eager"), help="default: inductor")
    add("--dtype", help="default: the checkpoint's")
    add("--max-seq-len", type=int, metavar="N", help="longest prompt plus output")
    add_quantize_options(add)
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.cli import compare

    if min(args.num_draft_tokens) < 1 or args.rounds < 1:
        raise InvalidOption("--num-draft-tokens and --rounds: expected at least 1")
    prompts = read_prompts(args)
    set_threads(args.threads)
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        engines = [(name, stack.enter_context(engine)) for name, engine in _engines(args, skipped)]
        plain = stack.enter_context(compile_engine(args, "none"))
        ways = [_way(name, engine, args.max_new_tokens) for name, engine in engines]
        ways.append(_way(PLAIN, plain, args.max_new_tokens))
        target = load_quantized(args, plain.plan()["dtype"])
        with report.status("running") as update:
            comparison = compare.compare(
                ways,
                [plain.encode(prompt) for prompt in prompts],
                margin=lambda prefix: compare.logit_margin(target.model, prefix),
                num_rounds=args.rounds,
                progress=update,
            )
        return _report(args, comparison, plain.plan(), skipped)


def _engines(args: argparse.Namespace, skipped: dict[str, str]) -> Iterator[tuple[str, Engine]]:
    """An engine for each method and K.  With --methods all, what cannot run here is skipped."""
    for method in _methods(args):
        for count in sorted(set(args.num_draft_tokens)):
            try:
                engine = compile_engine(args, method, num_draft_tokens=count)
            except SpecError as error:
                if args.methods != "all":
                    raise
                reason = "no drafter beside the target" if isinstance(error, DraftNotFound) else ""
                skipped[f"{method} K={count}"] = reason or " ".join(str(error).split())
                continue
            yield f"{method} K={count}", engine


def _methods(args: argparse.Namespace) -> list[str]:
    from compilespec.methods import METHODS, get_method

    if args.methods == "all":
        drafting = [m.capabilities for m in METHODS if m.capabilities.kind != "none"]
        return [capabilities.name for capabilities in drafting]
    names = [get_method(name).capabilities.name for name in args.methods.split(",")]
    if args.draft is not None and len(names) > 1:
        raise InvalidOption("--draft: give one method with it, a drafter fits no other")
    return names


def _way(name: str, engine: Engine, max_new_tokens: int) -> Way:
    from compilespec.cli.compare import engine_way

    return engine_way(name, engine, max_new_tokens=max_new_tokens, ignore_eos=True)


def _report(
    args: argparse.Namespace,
    comparison: Comparison,
    plan: dict[str, Any],
    skipped: dict[str, str],
) -> int:
    """Print the table, or, when tokens are wrong, only that."""
    limit = MARGINS[plan["dtype"]]
    wrong = [
        f"{row.name}: {report.describe_tokens(row)}"
        for row in comparison.rows
        if any(parting.margin > limit for parting in row.partings)
    ]
    if args.json:
        print_json(
            {"comparison": comparison.as_dict(), "skipped": skipped, "wrong": wrong, "plan": plan}
        )
    elif wrong:
        for line in wrong:
            print(f"compilespec: wrong tokens, no speed is printed: {line}", file=sys.stderr)
    else:
        report.print_comparison(comparison, plan)
        for name, reason in skipped.items():
            print(f"not run: {name}: {reason}", file=sys.stderr)
    return 1 if wrong else 0
