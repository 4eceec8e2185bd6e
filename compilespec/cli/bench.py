"""`compilespec bench`: every drafting method and K on the same prompts, against plain decoding."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compilespec.cli import report
from compilespec.cli.flags import add_draft_vocab_options, add_placement_options
from compilespec.cli.generate import (
    DEMO,
    add_quantize_options,
    compile_engine,
    load_quantized,
    print_json,
    read_prompts,
    set_threads,
)
from compilespec.cli.ranks import add_ranks_option
from compilespec.errors import DraftNotFound, InvalidOption, SpecError

if TYPE_CHECKING:
    from compilespec.cli.compare import Comparison
    from compilespec.runtime.engine import Engine

PLAIN = "plain"
COUPLED = "coupled"
RULES = (COUPLED, "rejection", "block")  # acceptance rules of the columns at TEMPERATURE
TEMPERATURE, SEED = 1.0, 1


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="acceptance length and speed of methods, compared with plain decoding",
        description="Decode the same prompts with every method and K, greedily and sampled, check "
        "the tokens, then print acceptance length, tokens per second and the ratio to plain "
        "decoding.",
    )
    add = parser.add_argument
    add("--model", default=DEMO, metavar="DIR|NAME", help="target checkpoint (default: demo)")
    add(
        "--methods",
        default="all",
        metavar="NAME[,NAME..]|all",
        help="drafting methods; all: those whose drafter is beside the target (default: all)",
    )
    add("--draft", metavar="DIR|NAME", help="drafter checkpoint, if one method is given")
    add(
        "--num-draft-tokens", type=int, nargs="+", default=[1, 3, 5], metavar="K",
        help="drafts per step (default: 1 3 5)",
    )  # fmt: skip
    add("--prompt", action="append", metavar="TEXT", help="prompt; may be repeated")
    add("--prompt-file", metavar="FILE", help="file with one prompt, '-' for stdin")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="timed rounds (default: %(default)s)")
    add("--backend", choices=("inductor", "eager"), help="default: inductor")
    add_placement_options(add)
    add_quantize_options(add)
    add_draft_vocab_options(add)
    add_ranks_option(add)
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add(
        "--sampled",
        default=COUPLED,
        metavar="RULE[,RULE..]|none",
        help="columns at temperature 1, by acceptance rule: coupled, rejection, block; each rule "
        "but the first compiles its own engines (default: coupled)",
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.cli import compare

    if min(args.num_draft_tokens) < 1 or args.rounds < 1:
        raise InvalidOption("--num-draft-tokens and --rounds: expected at least 1")
    if (args.tensor_parallel_size or 1) > 1:
        raise InvalidOption(
            "bench compares engines side by side, and ranks follow one at a time: time "
            "`compilespec generate --tensor-parallel-size` with each method instead"
        )
    rules = _rules(args)
    prompts = read_prompts(args)
    set_threads(args.threads)
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        engines = _entered(stack, _engines(args, skipped))
        plain = stack.enter_context(compile_engine(args, "none"))
        target = load_quantized(args, plain.plan()["dtype"]).model
        ids = [plain.encode(prompt) for prompt in prompts]

        def compared(
            engines: list[tuple[str, Engine]], temperature: float, **options: Any
        ) -> Comparison:
            about = {"max_new_tokens": args.max_new_tokens, "ignore_eos": True, "seed": SEED}
            ways = [
                compare.engine_way(name, engine, temperature=temperature, **about)
                for name, engine in (*engines, (PLAIN, plain))
            ]
            with report.status("running") as update:
                return compare.compare(
                    ways, ids, num_rounds=args.rounds, progress=update, **options
                )

        greedy = compared(engines, 0.0, margin=lambda ids: compare.logit_margin(target, ids))
        margin = functools.partial(
            compare.sampled_margin, target, temperature=TEMPERATURE, seed=SEED
        )
        sampled = {}
        for rule in rules:
            own = engines
            if rule != COUPLED:
                own = _entered(stack, _engines(args, skipped, rule))
            exact = rule == COUPLED
            sampled[rule] = compared(own, TEMPERATURE, margin=margin, same_tokens=exact)
        costs = {name: engine.plan()["compile"] for name, engine in (*engines, (PLAIN, plain))}
        return _report(args, greedy, {**plain.plan(), "compile": costs}, skipped, sampled)


def _rules(args: argparse.Namespace) -> list[str]:
    rules = [] if args.sampled == "none" else args.sampled.split(",")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise InvalidOption(
            f"--sampled: expected none, or rules among {', '.join(RULES)}; got {unknown[0]!r}"
        )
    return rules


def _entered(
    stack: contextlib.ExitStack, engines: Iterator[tuple[str, Engine]]
) -> list[tuple[str, Engine]]:
    return [(name, stack.enter_context(engine)) for name, engine in engines]


def _engines(
    args: argparse.Namespace, skipped: dict[str, str], acceptance: str = "auto"
) -> Iterator[tuple[str, Engine]]:
    """An engine for each method and K.  With --methods all, methods that cannot run are skipped."""
    for method in _methods(args):
        for count in sorted(set(args.num_draft_tokens)):
            try:
                engine = compile_engine(args, method, num_draft_tokens=count, acceptance=acceptance)
            except SpecError as error:
                if args.methods != "all":
                    raise
                reason = "no drafter beside the target" if isinstance(error, DraftNotFound) else ""
                skipped[f"{method} K={count}"] = reason or " ".join(str(error).split())
                continue
            yield f"{method} K={count}", engine


def _methods(args: argparse.Namespace) -> list[str]:
    from compilespec.methods.registry import METHODS, get_method

    if args.methods == "all":
        drafting = [m.capabilities for m in METHODS if m.capabilities.kind != "none"]
        return [capabilities.name for capabilities in drafting]
    names = [get_method(name).capabilities.name for name in args.methods.split(",")]
    if args.draft is not None and len(names) > 1:
        raise InvalidOption("--draft: expected one method, because a drafter fits no other")
    return names


def _report(
    args: argparse.Namespace,
    comparison: Comparison,
    plan: dict[str, Any],
    skipped: dict[str, str],
    sampled: dict[str, Comparison],
) -> int:
    """Print the table, or only the wrong tokens if there are any."""
    from compilespec.cli.compare import MARGINS

    limit = MARGINS[plan["dtype"]]
    titled = {f"T={TEMPERATURE:g} {rule}": other for rule, other in sampled.items()}
    wrong = [
        f"{row.name}{title and f', {title}'}: {report.describe_tokens(row)}"
        for title, other in {"": comparison, **titled}.items()
        for row in other.rows
        if any(parting.margin > limit for parting in row.partings)
    ]
    if args.json:
        others = {rule: other.as_dict() for rule, other in sampled.items()}
        print_json(
            {
                "comparison": comparison.as_dict(),
                "sampled": others,
                "temperature": TEMPERATURE,
                "skipped": skipped,
                "wrong": wrong,
                "plan": plan,
            }
        )
    elif wrong:
        for line in wrong:
            print(f"compilespec: wrong tokens, no speed is printed: {line}", file=sys.stderr)
    else:
        report.print_comparison(comparison, plan, titled)
        report.print_compile_seconds(plan["compile"])
        for name, reason in skipped.items():
            print(f"not run: {name}: {reason}", file=sys.stderr)
    return 1 if wrong else 0
