"""The output of `generate`: streamed text, a summary, a table.  Text and tables go to stdout, the
rest to stderr.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from compilespec.cli.compare import Comparison, Parting, SpeedRow
    from compilespec.progress import Progress as StartRecord
    from compilespec.runtime.engine import Engine
    from compilespec.runtime.outputs import Delta
    from compilespec.runtime.stats import EngineStats


MIN_SPENT_S = 2.0  # seconds in a stage before its end is estimated


class OutputPrinter:
    """Gathers the deltas of all prompts and prints their texts in order.

    The first unfinished prompt is printed live; the others wait for their turn.
    """

    def __init__(self, prompts: Sequence[str], *, quiet: bool, num_samples: int = 1) -> None:
        from rich.console import Console

        self.errors: dict[int, str] = {}  # by prompt
        self._num_samples = num_samples
        prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._token_ids: list[list[int]] = [[] for _ in prompts]
        self._outputs: dict[int, Any] = {}
        self._console = Console(quiet=quiet)
        self._current = -1
        self._num_printed = 0

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._token_ids[delta.index] += delta.token_ids
        if delta.output is not None:
            self._outputs[delta.index] = delta.output
            if delta.output.error is not None:
                prompt = delta.index // self._num_samples
                self.errors[prompt] = " ".join(str(delta.output.error).split())
        self._print()

    def close(self) -> None:
        """Print the waiting texts; after an interrupt, no more will follow."""
        while self._current < len(self._prompts) - 1 and any(self._texts[self._current + 1 :]):
            self._begin(self._current + 1)
            self._print_current()
        if self._current >= 0 and not self._texts[self._current].endswith("\n"):
            self._write("\n")

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._token_ids))

    def results(self) -> list[dict[str, Any]]:
        """Plain data per prompt, for JSON; a prompt that was interrupted is "aborted"."""
        return [self._result(index) for index in range(len(self._prompts))]

    def _result(self, index: int) -> dict[str, Any]:
        output = self._outputs.get(index)
        result: dict[str, Any] = {
            "prompt": self._prompts[index],
            "text": self._texts[index],
            "token_ids": self._token_ids[index],
            "finish_reason": "aborted" if output is None else output.finish_reason,
        }
        if output is not None:
            result |= {
                "prompt_token_ids": output.prompt_token_ids,
                "emitted_per_step": output.emitted_per_step,
                "acceptance_length": output.acceptance_length,
                "seed": output.seed,
            }
        if index // self._num_samples in self.errors:
            result["error"] = self.errors[index // self._num_samples]
        return result

    def _print(self) -> None:
        if self._current < 0:
            self._begin(0)
        self._print_current()
        while self._current in self._outputs and self._current + 1 < len(self._prompts):
            self._begin(self._current + 1)
            self._print_current()

    def _begin(self, index: int) -> None:
        if self._current >= 0:
            self._write("\n")
        self._current, self._num_printed = index, 0
        if len(self._prompts) > 1:
            self._write(f"--- {self._title(index)}\n", style="bold")
        if self._console.is_terminal:
            self._write(self._prompts[index], style="dim")

    def _title(self, index: int) -> str:
        prompt, sample = divmod(index, self._num_samples)
        title = f"prompt {prompt + 1} of {len(self._prompts) // self._num_samples}"
        if self._num_samples > 1:
            title += f", sample {sample + 1} of {self._num_samples}"
        return title

    def _print_current(self) -> None:
        text = self._texts[self._current]
        if len(text) > self._num_printed:
            self._write(text[self._num_printed :])
            self._num_printed = len(text)

    def _write(self, text: str, style: str | None = None) -> None:
        self._console.out(text, end="", style=style, highlight=False)


@contextlib.contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something runs; yields a function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status(text) as spinner:
        yield spinner.update


@contextlib.contextmanager
def starting(
    text: str, *, quiet: bool = False
) -> Iterator[Callable[[StartRecord], None] | Literal[False] | None]:
    """Show the progress of starting in a line that disappears; yields the value for `progress=`:
    None where stderr is no terminal, and `compile` prints lines itself; False if `quiet`.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Live
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    if quiet or not sys.stderr.isatty():
        yield False if quiet else None
        return
    words = TextColumn("{task.description}", table_column=Column(overflow="fold", ratio=1))
    columns = SpinnerColumn(), TimeElapsedColumn(), words
    left = _Left()
    with Live(*columns, console=Console(stderr=True), transient=True, expand=True) as live:
        task = live.add_task(escape(text), total=None)
        yield lambda record: live.update(
            task, description=escape(f"{text}: {record}{left.of(record)}"), refresh=True
        )


class _Left:
    """Estimates how much longer a stage with counted steps takes."""

    def __init__(self) -> None:
        self._stage = ("", False)
        self._started = 0.0

    def of(self, record: StartRecord) -> str:
        """The estimate in words; "" where too little is known."""
        now, stage = time.perf_counter(), (record.stage, record.total is None)
        if stage != self._stage:
            self._stage, self._started = stage, now
        counted = re.search(r"(\d+) of (\d+)", record.detail)
        inside = (int(counted[1]) - 1) / int(counted[2]) if counted else 0.0
        done = ((record.index or 1) - 1 + inside) / (record.total or 1)
        spent = now - self._started
        if not done or spent < MIN_SPENT_S:
            return ""
        return f"; about {spent * (1 - done) / done:.0f} s left"


def print_unused_defaults(defaults: Mapping[str, Any]) -> None:
    """Print a line on stderr if the checkpoint asks for sampling and decoding is greedy."""
    flags = [
        f"--{name.replace('_', '-')} {defaults[name]}"
        for name in ("temperature", "top_k", "top_p", "min_p")
        if name in defaults
    ]
    if flags:
        _note(
            f"decoding greedily; generation_config.json asks for sampling: {' '.join(flags)} "
            "(--temperature 0 declines)"
        )


def print_ended_at_once(results: Sequence[Mapping[str, Any]], engine: Engine) -> None:
    """Print a line on stderr for each output that has no token but EOS."""
    for index, result in enumerate(results):
        ids = result["token_ids"]
        if len(ids) != 1 or ids[0] not in engine.eos_token_ids:
            continue
        name = engine.tokenizer.decode(ids, skip_special_tokens=False) if engine.tokenizer else ""
        which = f"prompt {index + 1}: " if len(results) > 1 else ""
        _note(
            f"{which}the model ended at once: its first token was EOS ({name or 'id'} {ids[0]}); a "
            "chat model may need its chat template around the prompt (--chat); --ignore-eos "
            "continues"
        )


def _note(text: str) -> None:
    print(f"compilespec: note: {text}", file=sys.stderr)


def print_summary(
    num_tokens: int, elapsed_s: float, stats: EngineStats, *, interrupted: bool
) -> None:
    from rich.console import Console

    parts = [
        f"{num_tokens} tokens in {elapsed_s:.2f} s",
        f"{num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s",
        f"acceptance length {stats.acceptance_length:.2f}",
        f"prefill {stats.prefill_ms:.0f} ms",
        f"decode {stats.decode_ms:.0f} ms",
    ]
    if interrupted:
        parts.insert(0, "interrupted")
    Console(stderr=True).print("; ".join(parts), style="dim", highlight=False, soft_wrap=True)


def print_comparison(
    comparison: Comparison,
    plan: Mapping[str, Any],
    sampled: Mapping[str, Comparison] | None = None,
    *,
    tokenizer: Any = None,
) -> None:
    """Which ways have the same tokens, one line per way, and where they part.

    Args:
        sampled: comparisons by title; each adds three columns.
        tokenizer: prints the tokens that differ as text; None: as ids.
    """
    from rich.console import Console

    from compilespec.cli.compare import MARGINS

    dtype = str(plan["dtype"])
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file has no width
        console.width = 140
    for line in _verdicts(comparison, MARGINS[dtype]):
        console.print(line, style="bold")
    console.print(_comparison_table(comparison, plan, sampled or {}))
    for line in _explained_partings(comparison, dtype, MARGINS[dtype], tokenizer):
        console.print(line)


def _verdicts(comparison: Comparison, limit: float) -> Iterator[str]:
    """A line for each pair of ways whose tokens were compared, speculation against plain first."""
    for row in comparison.rows:
        if row.plain_partings is not None:
            same = _same_prompts(comparison, row.plain_partings)
            so = _consequence(row.plain_partings, limit) or ": speculation changed no token"
            compared = f"{row.num_tokens} tokens compared in this run"
            yield f"{row.name} against {comparison.plain}: {same}, {compared}{so}."
    for row in comparison.rows:
        if row.name == comparison.plain != comparison.reference:
            same = _same_prompts(comparison, row.partings)
            so = _consequence(row.partings, limit)
            yield f"{row.name} against {comparison.reference}: {same}{so}."


def _consequence(partings: Sequence[Parting], limit: float) -> str:
    """The meaning of the partings in short; "" if there are none."""
    if not partings:
        return ""
    if all(parting.margin <= limit for parting in partings):
        return "; the others part at near ties, which is no error (see below the table)"
    return "; WRONG TOKENS (see below the table)"


def _same_prompts(comparison: Comparison, partings: Sequence[Parting]) -> str:
    total = comparison.num_prompts
    same = f"{total - len(partings)} of {total}" if partings else f"all {total}"
    return f"{same} prompts identical" if total > 1 else f"{total - len(partings)} of 1 identical"


def _comparison_table(
    comparison: Comparison, plan: Mapping[str, Any], sampled: Mapping[str, Comparison]
) -> Any:
    from rich.table import Table

    sizes = (
        f"{comparison.num_prompts} prompts one at a time, median of {comparison.num_rounds} rounds"
    )
    settings = [str(plan[name]) for name in ("dtype", "device", "backend") if name in plan]
    table = Table(title=", ".join([sizes, *settings]), title_justify="left")
    table.add_column("")
    for column in ("tokens/s", "ratio", "acceptance length"):
        table.add_column(column, justify="right", min_width=_longest_word(column))
    compared = [name for name in (comparison.plain, comparison.reference) if name is not None]
    for name in compared:
        table.add_column(f"tokens against {name}", min_width=_longest_word(name))
    others = {title: {row.name: row for row in other.rows} for title, other in sampled.items()}
    for title in others:
        for column in ("tokens/s", "ratio", "acceptance length"):
            table.add_column(f"{title}: {column}", justify="right")
    for row in comparison.rows:
        table.add_row(
            row.name,
            *_speed_cells(row),
            *(_token_cell(comparison, row, name) for name in compared),
            *(cell for rows in others.values() for cell in _speed_cells(rows.get(row.name))),
        )
    return table


def _longest_word(text: str) -> int:
    """The width below which a column would cut its heading."""
    return max(map(len, text.split()))


def _token_cell(comparison: Comparison, row: SpeedRow, name: str) -> str:
    """A way's tokens compared with those of the way `name`."""
    partings = row.partings if name == comparison.reference else row.plain_partings
    if row.name == name:
        return "reference"
    if partings is None:
        return ""
    if not partings:
        return "identical"
    return _same_prompts(comparison, partings)


def _explained_partings(
    comparison: Comparison, dtype: str, limit: float, tokenizer: Any
) -> Iterator[str]:
    """A paragraph for each place where tokens part, once for all ways that part there alike, and
    one that explains near ties.  `limit`: the widest near tie of the dtype.
    """
    ways: dict[tuple[Parting, str | None], list[str]] = {}
    for row in comparison.rows:
        for other, partings in (
            (comparison.plain, row.plain_partings), (comparison.reference, row.partings)
        ):  # fmt: skip
            for parting in partings or ():
                ways.setdefault((parting, other), []).append(row.name)
    for (parting, other), names in ways.items():
        got, wanted = (_token_text(token, tokenizer) for token in (parting.got, parting.expected))
        judged = (
            f"a near tie: {dtype} rounding alone moves scores that far"
            if parting.margin <= limit
            else f"more than {dtype} rounding explains ({limit:g}): one of them is wrong, please "
            "report it"
        )
        yield (
            f"Prompt {parting.prompt + 1} parts at token {parting.token}: {' and '.join(names)} "
            f"wrote {got}, {other} wrote {wanted}. There the model's two best tokens have scores "
            f"(logits) {parting.margin:.3g} apart, {judged}."
        )
    if any(parting.margin <= limit for parting, _ in ways):
        yield (
            "A near tie is no error: the same numbers, added up in another order, round to a "
            "different last digit, so that either token may be the best, and the text continues "
            "from it. Different programs add in different orders."
        )


def _token_text(token: int | None, tokenizer: Any) -> str:
    if token is None:
        return "nothing more"
    return f"id {token}" if tokenizer is None else repr(tokenizer.decode([token]))


def _speed_cells(row: SpeedRow | None) -> tuple[str, str, str]:
    """Tokens per second, ratio and acceptance length."""
    if row is None:
        return "", "", ""
    accepted = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
    return f"{row.tokens_per_second:.1f}", f"{row.ratio:.2f}x", accepted


def print_compile_seconds(costs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print a line per way on stderr: the time of lowering, and whether the start was warm."""
    from rich.console import Console

    for name, phases in costs.items():
        seconds = sum(phase["seconds"] for phase in phases.values())
        if not seconds:
            continue  # interpreted
        cold = [phase for phase, cost in phases.items() if not cost["from_cache"]]
        start = f"compiled {', '.join(cold)}" if cold else "all from the cache"
        text = f"{name}: lowered in {seconds:.1f} s ({start})"
        Console(stderr=True).print(text, style="dim", highlight=False, soft_wrap=True)


def describe_tokens(row: SpeedRow) -> str:
    """Say "identical", or where each prompt's tokens part and by what margin."""
    if row.identical:
        return "identical"
    return "; ".join(
        f"prompt {parting.prompt + 1} parts at token {parting.token} (margin {parting.margin:.3g})"
        for parting in row.partings
    )
