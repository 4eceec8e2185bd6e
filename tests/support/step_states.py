"""A plain-Python model of recurrent layers' state rows, for `step_model`: who took which token.

Nothing here computes a state.  A state row holds the provenance of all that it took, in order; a
ring keeps that of tokens which may still be rejected.  Each row of a pass reads the state after its
own token, which must hold the request's tokens 0..p, each once; and the convolution's window, which
must hold the W - 1 tokens before its own.

The rules (P columns; position p is kept in column p % P):

state      Holds the first `absorbed` tokens.  A pass takes the kept tokens from `absorbed` up to
           its own first one, then its own; what the last row that commits saw is written back,
           rows that do not commit are kept in the ring.  At position 0 it begins with nothing,
           values that an earlier owner of the row left.
window     The last W - 1 tokens and the K that may be rejected.  Nothing stands before position 0.
target     Decode: the row at L commits, its drafts do not; `absorbed` = L + 1.  Prefill: a chunk
           begins with the tokens that windowed drafters run again, and does not commit the ones
           that the next chunk runs again; `absorbed` counts what it committed.
drafter    (unshifted) The first pass finds L + 1 tokens in the state and commits the n emitted ones
           of its S; single passes commit nothing, but for the sampled token after a prompt.
K          Rings have the columns of the largest K, at any K of a step.

Source: `compilespec.ops.recurrence.reference`; Rules that a test may break are in `StateRules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Prefix = tuple[int, ...]


class StepModelError(Exception):
    """The modelled engine broke a rule."""


class UnwrittenState(StepModelError):
    """A column of a ring was read that nothing ever wrote."""


class ForeignState(StepModelError):
    """A state or a window holds a token of another request, or of a padded row."""


class StaleState(StepModelError):
    """A state or a window does not hold the request's current tokens, each once."""


class WrongCount(StepModelError):
    """`absorbed` is no number of tokens that a request can have."""


class StateRules:
    """The formulas of the states.  A test plants a fault by overriding one of them."""

    def num_kept(self, most_drafts: int) -> int:
        """Columns of a recurrence's ring; `most_drafts`: the largest K."""
        return max(1, most_drafts)

    def window_columns(self, width: int, num_kept: int) -> int:
        """Columns of a convolution's ring."""
        return width - 1 + num_kept

    def column(self, position: int, columns: int, num_draft_tokens: int) -> int:
        """Where a position is kept; the step's own K must not matter."""
        return position % columns

    def begins_empty(self, first: int) -> bool:
        """Whether a pass from position `first` forgets what the row held."""
        return first == 0

    def is_before_prompt(self, position: int) -> bool:
        """Whether a place of a convolution's window holds zeros."""
        return position < 0

    def take_from(self, absorbed: int, first: int, columns: int) -> int:
        """The first kept token that a pass from position `first` takes."""
        return max(absorbed, first - columns)

    def repeated_tokens(self, num_draft_tokens: int) -> int:
        """Prompt tokens that the next chunk of a windowed drafter's target runs again (H-22)."""
        return num_draft_tokens - 1

    def prompt_commits(self, end: int, num_repeated: int, finished: bool) -> int:
        """The position up to which a chunk commits."""
        return end if finished else max(0, end - num_repeated)

    def prompt_count(self, end: int, num_repeated: int, finished: bool) -> int:
        """`absorbed` after a chunk."""
        return end if finished else max(0, end - num_repeated)

    def commits(self, row: int) -> bool:
        """Whether row 0, 1, ... of a verify step commits."""
        return row < 1

    def count(self, seq_len: int, num_emitted: int, max_seq_len: int) -> int:
        """`absorbed` after a verify step from `seq_len`."""
        return min(seq_len + 1, max_seq_len)

    def draft_absorbed(self, seq_len: int) -> int:
        """Tokens in an unshifted drafter's state before the first pass of a decode step."""
        return seq_len + 1

    def draft_commits(self, row: int, num_emitted: int) -> bool:
        """Whether row 0, 1, ... of that pass commits."""
        return row < num_emitted

    def single_absorbed(self, new_seq_len: int, index: int) -> int:
        """Tokens in its state before single pass `index` (0 only after a prompt)."""
        return new_seq_len + (index > 0)

    def single_commits(self, index: int) -> bool:
        return index == 0

    def padded_states(self) -> Sequence[int]:
        """The state rows that a padded row advances."""
        return ()


class Taken(NamedTuple):
    """A token that a state or a ring holds: whose, and the tokens up to it."""

    request: int
    prefix: Prefix


@dataclass
class StateRow:
    """One row of one model's recurrent layers; nothing clears it when its owner changes."""

    held: tuple[Taken, ...] = ()
    recent: dict[int, Taken] = field(default_factory=dict)  # of the recurrence, by column
    window: dict[int, Taken] = field(default_factory=dict)  # of the convolution


@dataclass(frozen=True)
class StatePass:
    """The live rows of one request in one pass: consecutive positions from `first`."""

    row: int
    request: int
    first: int
    prefixes: Sequence[Prefix]  # what each row's token was computed from
    law: Callable[[int], Prefix]  # what the token at a position must be computed from
    absorbed: int
    commits: Sequence[bool]
    num_draft_tokens: int  # the step's K

    @property
    def where(self) -> str:
        return f"request {self.request}, from position {self.first}"


class States:
    """The recurrent layers of the target (group 0) and of an unshifted drafter (1)."""

    def __init__(self, width: int, most_drafts: int, rules: StateRules) -> None:
        self.width, self.rules = width, rules
        self.num_kept = rules.num_kept(most_drafts)
        self.num_window = rules.window_columns(width, self.num_kept)
        self.rows: dict[tuple[int, int], StateRow] = {}
        self.absorbed: dict[int, int] = {}  # of the target, by state row

    def run(self, group: int, call: StatePass) -> None:
        """What both operators do, and that each row reads what it must."""
        row = self.rows.setdefault((group, call.row), StateRow())
        mine = [Taken(call.request, prefix) for prefix in call.prefixes]
        if mine:
            self._convolve(row, call, mine)
            self._recur(row, call, mine)

    def spoil(self) -> None:
        """A padded row: it must leave all states alone."""
        for number in self.rules.padded_states():
            row = self.rows.setdefault((0, number), StateRow())
            row.held = (*row.held, Taken(-1, ()))

    def set_absorbed(self, row: int, count: int, max_seq_len: int) -> None:
        if not 0 <= count <= max_seq_len:
            raise WrongCount(f"row {row}: {count} tokens, max_seq_len {max_seq_len}")
        self.absorbed[row] = count

    def _recur(self, row: StateRow, call: StatePass, mine: Sequence[Taken]) -> None:
        held = () if self.rules.begins_empty(call.first) else row.held
        start = self.rules.take_from(call.absorbed, call.first, self.num_kept)
        for position in range(start, call.first):
            column = self.rules.column(position, self.num_kept, call.num_draft_tokens)
            held = (*held, _kept(row.recent, column, call))
        for place, (token, commits) in enumerate(zip(mine, call.commits, strict=True)):
            held, position = (*held, token), call.first + place
            wanted = [call.law(before) for before in range(position + 1)]
            _check(held, wanted, call, f"the state after position {position}")
            if commits:
                row.held = held
            else:
                column = self.rules.column(position, self.num_kept, call.num_draft_tokens)
                row.recent[column] = token

    def _convolve(self, row: StateRow, call: StatePass, mine: Sequence[Taken]) -> None:
        before = range(call.first - self.width + 1, call.first)
        read = [position for position in before if not self.rules.is_before_prompt(position)]
        columns = [self.rules.column(p, self.num_window, call.num_draft_tokens) for p in read]
        found = [_kept(row.window, column, call) for column in columns]
        last = call.first + len(mine)
        wanted = [call.law(position) for position in (*read, *range(call.first, last))]
        _check((*found, *mine), wanted, call, f"the window before position {call.first}")
        for place, token in list(enumerate(mine, call.first))[-self.num_window :]:
            row.window[self.rules.column(place, self.num_window, call.num_draft_tokens)] = token


def _kept(ring: dict[int, Taken], column: int, call: StatePass) -> Taken:
    if column not in ring:
        raise UnwrittenState(f"column {column}, {call.where}")
    return ring[column]


def _check(held: Sequence[Taken], wanted: Sequence[Prefix], call: StatePass, what: str) -> None:
    owners = {token.request for token in held} - {call.request}
    if owners:
        raise ForeignState(f"{call.where}: {what} holds tokens of {owners}")
    got = [token.prefix for token in held]
    if got != list(wanted):
        raise StaleState(f"{call.where}: {what} holds {got}, not {list(wanted)}")
