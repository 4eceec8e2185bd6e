"""The ids that a drafter with a trimmed head may propose: those that occur most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compilespec.errors import InvalidOption
from compilespec.methods.capabilities import Capabilities
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.pipeline.options import CompileOptions
from compilespec.program import Traced
from compilespec.runtime.token_counts import FILE_NAME, SUFFIXES, check_counts, read_counts
from compilespec.tracing.capture import output_widths
from compilespec.tracing.load import Target

WAYS = (
    "give draft_vocab_counts= a file that engine.save_token_counts(path) wrote, a text file, or "
    "counts by token id"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocabulary:
    """The ids that a trimmed head may propose."""

    ids: Tensor  # int64 [N], ascending
    coverage: float  # their share of all counted tokens
    num_rows: int  # of the whole head
    source: str  # of the counts

    def describe(self) -> str:
        return (
            f"draft head trimmed to {len(self.ids)} of {self.num_rows} rows, which are "
            f"{self.coverage:.1%} of the tokens counted in {self.source}"
        )


def check_has_head(options: CompileOptions, method: Capabilities) -> None:
    """Refuse the keywords for a method without a head to trim, before anything is loaded.

    Raises: InvalidOption.
    """
    size = options.draft_vocab_size
    if size is None:
        return
    if method.chooses:
        raise InvalidOption(
            f"draft_vocab_size={size} needs a method with a head, which spec={method.name!r} may "
            "not pick: name the method"
        )
    if not any(call.startswith("propose") for call in LOOPS[method.kind].calls(1)):
        raise InvalidOption(
            f"draft_vocab_size={size} needs a drafter with a head, and spec={method.name!r} has "
            "none: leave it out"
        )


def choose_draft_ids(
    options: CompileOptions, target: Target, vocab_size: int, calls: Mapping[str, Traced]
) -> DraftVocabulary | None:
    """The ids to keep, by counts; ties go to the smaller id.  None: all.

    Args:
        vocab_size: V, the ids of the target.
        calls: the captured calls of the drafter.
    Raises: InvalidOption (no counts, not of this target, nothing to trim).
    """
    size = options.draft_vocab_size
    if size is None:
        return None
    num_rows = _num_rows(calls, vocab_size)
    if size >= num_rows:
        raise InvalidOption(
            f"draft_vocab_size must be below the {num_rows} ids that the drafter's head knows; got "
            f"{size}: leave it out"
        )
    counts_V, source = count_tokens(options.draft_vocab_counts, target, vocab_size)
    best = counts_V[:num_rows].sort(descending=True, stable=True).indices[:size]
    ids = best.sort().values
    coverage = float(counts_V[ids].sum() / counts_V.sum())
    return DraftVocabulary(ids=ids, coverage=coverage, num_rows=num_rows, source=source)


def _num_rows(calls: Mapping[str, Traced], vocab_size: int) -> int:
    """Ids of the target that a drafter's head can propose.

    Raises: InvalidOption if it has other ids, which stand for some of the target's.
    """
    known = vocab_size
    for name, call in calls.items():
        if not name.startswith("propose"):
            continue
        _, *offered = output_widths(call)
        if len(offered) > 1:
            raise InvalidOption(
                f"draft_vocab_size needs a drafter that proposes all ids of the target; this one's "
                f"vocabulary is reduced to {offered[0]} of {vocab_size}: leave it out"
            )
        known = min([known, *offered])
    return known


def count_tokens(given: Any, target: Target, vocab_size: int) -> tuple[Tensor, str]:
    """Counts by id, float64 [V], and their source.

    Args:
        given: `draft_vocab_counts`: a file of counts or of text, texts, counts by id; None looks
            for `token_counts.json` beside the target.
    Raises: InvalidOption.
    """
    if given is None:
        found = target.directory and target.directory / FILE_NAME
        if not found or not found.is_file():
            place = f", and {target.directory} holds no {FILE_NAME}" if target.directory else ""
            raise InvalidOption(
                f"draft_vocab_size= needs counts of tokens to choose by, and none were given{place}"
                f": {WAYS}"
            )
        given = found
    if isinstance(given, str | Path):
        if Path(given).suffix in SUFFIXES:
            return read_counts(given, vocab_size), str(given)
        with Path(given).open(encoding="utf-8", errors="replace") as lines:
            return _count_texts(lines, target, vocab_size, str(given)), str(given)
    if isinstance(given, Sequence) and given and all(isinstance(text, str) for text in given):
        return _count_texts(given, target, vocab_size, "the texts given"), "the texts given"
    return check_counts(given, vocab_size, "what was given"), "the counts given"


def _count_texts(texts: Iterable[str], target: Target, vocab_size: int, source: str) -> Tensor:
    """Raises: InvalidOption (no tokenizer, no text)."""
    if target.tokenizer is None:
        raise InvalidOption(
            f"draft_vocab_counts: the target has no tokenizer to count {source} with: give "
            "tokenizer=, or counts by token id"
        )
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(target.tokenizer.encode(text, add_special_tokens=False))
    return check_counts(counts, vocab_size, source)
