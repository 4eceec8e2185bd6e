"""`compilespec bench`: every drafting method and K on the same prompts, against plain decoding."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compilespec.cli import report
from compilespec.cli.flags import add_engine_options
from compilespec.cli.generate import (
    DEMO,
    compile_engine,
    load_quantized,
    print_json,
    read_prompts,
    set_threads,
)
from compilespec.cli.ranks import is_first_rank
from compilespec.errors import DraftNotFound, InvalidOption, RankLost, RanksDiffer, SpecError

if TYPE_CHECKING:
    from compilespec.cli.compare import Comparison, Timed
    from compilespec.runtime.engine import Engine

UNUSED = (
    "spec", "num_draft_tokens", "acceptance", "draft_tree", "prompt_logprobs", "adapters",
    "max_adapters", "max_adapter_rank",
)  # fmt: skip
PLAIN = "plain"
GREEDY = "greedy"
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
    add_engine_options(parser, default=DEMO, without=UNUSED)
    add(
        "--methods",
        default="all",
        metavar="NAME[,NAME..]|all",
        help="drafting methods; all: those whose drafter is beside the target (default: all)",
    )
    add(
        "--num-draft-tokens", type=int, nargs="+", default=[1, 3, 5], metavar="K",
        help="drafts per step (default: 1 3 5)",
    )  # fmt: skip
    add("-p", "--prompt", action="append", metavar="TEXT", help="prompt; may be repeated")
    add("--prompt-file", metavar="FILE", help="file with one prompt, '-' for stdin")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="timed rounds (default: %(default)s)")
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
    if min(args.num_draft_tokens) < 1 or args.rounds < 1:
        raise InvalidOption("--num-draft-tokens and --rounds: expected at least 1")
    _methods(args)  # bad values are refused before anything compiles
    rules = _rules(args)
    measured = _Measured(args, read_prompts(args))
    set_threads(args.threads)
    skipped: dict[str, str] = {}
    if (args.tensor_parallel_size or 1) > 1:
        _measure_in_turn(args, measured, rules, skipped)
    else:
        _measure_side_by_side(args, measured, rules, skipped)
    if not is_first_rank():
        return 0
    sampled = {rule: measured.compared(rule) for rule in rules}
    return _report(args, measured.compared(GREEDY), measured.plan, skipped, sampled)


class _Measured:
    """The texts and times of the engines, by title: greedy, or by a rule."""

    def __init__(self, args: argparse.Namespace, prompts: list[str]) -> None:
        self.plan: dict[str, Any] = {}
        self._args, self._prompts = args, prompts
        self._ids: list[list[int]] = []
        self._timed: dict[str, Timed] = {}

    def begin(self, plain: Engine) -> None:
        """Take the prompts' ids and the plan from plain decoding."""
        self._ids = [plain.encode(prompt) for prompt in self._prompts]
        self.plan = {**plain.plan(), "compile": {}}

    def take(self, titles: Sequence[str], engines: Sequence[tuple[str, Engine]]) -> None:
        """Measure engines by turns, under each title."""
        from compilespec.cli import compare

        about = {"max_new_tokens": self._args.max_new_tokens, "ignore_eos": True, "seed": SEED}
        for name, engine in engines:
            self.plan["compile"].setdefault(name, engine.plan()["compile"])
        for title in titles:
            temperature = 0.0 if title == GREEDY else TEMPERATURE
            ways = [
                compare.engine_way(name, engine, temperature=temperature, **about)
                for name, engine in engines
            ]
            with report.status("running") as update:
                self._timed.setdefault(title, compare.Timed()).add(
                    compare.measure(ways, self._ids, num_rounds=self._args.rounds, progress=update)
                )

    def compared(self, title: str) -> Comparison:
        """The table of a title."""
        from compilespec.cli import compare

        def margin(prefix: Sequence[int]) -> float:
            if title == GREEDY:
                return compare.logit_margin(self._target, prefix)
            return compare.sampled_margin(self._target, prefix, temperature=TEMPERATURE, seed=SEED)

        return compare.judge(
            self._timed[title], self._ids, reference=PLAIN, margin=margin,
            same_tokens=title in (GREEDY, COUPLED),
        )  # fmt: skip

    @functools.cached_property
    def _target(self) -> Any:
        return load_quantized(self._args, self.plan["dtype"]).model


def _measure_side_by_side(
    args: argparse.Namespace, measured: _Measured, rules: list[str], skipped: dict[str, str]
) -> None:
    """Run all engines at once, by turns, so that all see the same load of the machine."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(compile_engine(args, "none"))
        measured.begin(plain)
        for acceptance, titles in _groups(rules):
            engines = [
                (name, stack.enter_context(engine))
                for name, engine in _engines(args, skipped, acceptance)
            ]
            measured.take(titles, [*engines, (PLAIN, plain)])


def _measure_in_turn(
    args: argparse.Namespace, measured: _Measured, rules: list[str], skipped: dict[str, str]
) -> None:
    """One engine after another: the ranks of a job follow one at a time."""
    if (plain := _opened(args, "none")) is not None:
        with plain:
            measured.begin(plain)
            measured.take((GREEDY, *rules), [(PLAIN, plain)])
    for acceptance, titles in _groups(rules):
        for name, engine in _engines(args, skipped, acceptance):
            with engine:
                measured.take(titles, [(name, engine)])


def _groups(rules: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Map values of acceptance= to the titles that engines compiled with them are measured
    under.
    """
    yield "auto", [GREEDY, *(rule for rule in rules if rule == COUPLED)]
    yield from ((rule, [rule]) for rule in rules if rule != COUPLED)


def _rules(args: argparse.Namespace) -> list[str]:
    rules = [] if args.sampled == "none" else args.sampled.split(",")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise InvalidOption(
            f"--sampled: expected none, or rules among {', '.join(RULES)}; got {unknown[0]!r}"
        )
    return rules


def _engines(
    args: argparse.Namespace, skipped: dict[str, str], acceptance: str
) -> Iterator[tuple[str, Engine]]:
    """Compile an engine for each method and K.  --methods all skips methods that cannot run."""
    for method in _methods(args):
        for count in sorted(set(args.num_draft_tokens)):
            try:
                engine = _opened(args, method, num_draft_tokens=count, acceptance=acceptance)
            except SpecError as error:
                if args.methods != "all" or isinstance(error, RankLost | RanksDiffer):
                    raise
                reason = "no drafter beside the target" if isinstance(error, DraftNotFound) else ""
                skipped[f"{method} K={count}"] = reason or " ".join(str(error).split())
                continue
            if engine is not None:
                yield f"{method} K={count}", engine


def _opened(args: argparse.Namespace, spec: str, **changes: Any) -> Engine | None:
    """An engine; None on ranks that have followed it to its end."""
    try:
        return compile_engine(args, spec, **changes)
    except SystemExit:
        if is_first_rank():
            raise
        return None


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
