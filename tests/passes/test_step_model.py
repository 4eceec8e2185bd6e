"""The step model against itself: right rules survive every schedule, each planted fault is caught.

Source: requirements T06-T08, T10, T11 (at the level of slots and tokens), H-4, H-9, H-16, H-21 to
H-23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_model import (
    Chain,
    ConflictingWrite,
    ForeignRead,
    FreedInFlight,
    Kind,
    NotReserved,
    OutputMismatch,
    OutsideLength,
    PaddedWrite,
    Prefix,
    Rules,
    StaleRead,
    StepModelError,
    UnwrittenRead,
    WrongRow,
)
from tests.support.step_schedules import (
    KINDS,
    MODULE_ROWS,
    NONE,
    RECYCLED,
    TARGET_ROWS,
    UNSHIFTED,
    Schedule,
    kind_id,
)


@pytest.mark.parametrize("num_draft_tokens", range(6), ids="K{}".format)
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_right_rules_survive_every_schedule(
    kind: tuple[Kind, Chain], num_draft_tokens: int
) -> None:
    @settings(derandomize=True, deadline=None, max_examples=20, database=None)
    @given(
        st.builds(
            Schedule,
            kind=st.just(kind),
            num_draft_tokens=st.just(num_draft_tokens),
            seed=st.integers(0, 2**32),
            max_rows=st.integers(1, 4),
            max_seq_len=st.integers(2, 32),
            block_size=st.integers(1, 8),
            num_requests=st.integers(1, 6),
            overlap=st.booleans(),
            ring_size=st.integers(0, 3),
            agreement=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
            eos_rate=st.sampled_from([0.0, 0.05, 0.3]),
            whole_prompts=st.booleans(),
            plain_rate=st.sampled_from([0.0, 0.0, 0.3]),
            abort_rate=st.sampled_from([0.0, 0.05]),
        )
    )
    def check(schedule: Schedule) -> None:
        schedule.run()

    check()


# Planted faults.


class PairsSamePosition(Rules):
    def paired_token(self, own: Sequence[int], following: Sequence[int], row: int) -> int:
        return own[row]


class PairsTwoAhead(Rules):
    def paired_token(self, own: Sequence[int], following: Sequence[int], row: int) -> int:
        return following[min(row + 1, len(following) - 1)]


class GathersRowN(Rules):
    def gather_row(self, num_committed: int) -> int:
        return num_committed


class GathersRowBefore(Rules):
    def gather_row(self, num_committed: int) -> int:
        return max(0, num_committed - 2)


class GathersLastRow(Rules):
    """Keeps the packed batch's last row, as if every draft had been accepted."""

    def gather_row(self, num_committed: int) -> int:
        return 10**6


class SinglesOneEarly(Rules):
    def single_slot(self, kind: Kind, new_seq_len: int, index: int) -> int:
        return super().single_slot(kind, new_seq_len, index) - 1


class SinglesOneLate(Rules):
    def single_slot(self, kind: Kind, new_seq_len: int, index: int) -> int:
        return super().single_slot(kind, new_seq_len, index) + 1


class SinglesStay(Rules):
    """Positions are not advanced between single passes (A9)."""

    def single_slot(self, kind: Kind, new_seq_len: int, index: int) -> int:
        return super().single_slot(kind, new_seq_len, min(index, 1))


class FirstPassOneEarly(Rules):
    def first_slot(self, kind: Kind, seq_len: int) -> int:
        return super().first_slot(kind, seq_len) - 1


class FirstPassOneLate(Rules):
    def first_slot(self, kind: Kind, seq_len: int) -> int:
        return super().first_slot(kind, seq_len) + 1


class WindowOfK(Rules):
    """H-21: the window's first row is not written."""

    def window_rows(self, chain: Chain, module: int, num_draft_tokens: int) -> int:
        return num_draft_tokens


class WindowOfS(Rules):
    """K+1 rows for every module: enough for module_rows, not for target_rows."""

    def window_rows(self, chain: Chain, module: int, num_draft_tokens: int) -> int:
        return num_draft_tokens + 1


class WindowEndsLate(Rules):
    def window_end(self, seq_len: int, num_committed: int) -> int:
        return seq_len + num_committed


class WindowEndsEarly(Rules):
    def window_end(self, seq_len: int, num_committed: int) -> int:
        return seq_len + num_committed - 2


class RingOneOld(Rules):
    def ring_start(self, num_committed: int) -> int:
        return num_committed - 1


class PrefillsOneModule(Rules):
    """H-22: only the first module sees the prompt."""

    def prefill_modules(self, num_draft_tokens: int) -> int:
        return 1


class ChunkTakesSampled(Rules):
    """H-4: an unfinished chunk is followed by the sampled token."""

    def next_token(self, prompt: Prefix, end: int, sampled: int, ahead: int) -> int | None:
        return sampled


class OneNextToken(Rules):
    """Only one prompt token after the chunk is known: right, because boundary rows run again."""

    def next_token(self, prompt: Prefix, end: int, sampled: int, ahead: int) -> int | None:
        return super().next_token(prompt, end, sampled, ahead) if ahead == 1 else None


class BoundaryNotRerun(Rules):
    def boundary_rows(self, num_draft_tokens: int) -> int:
        return 0


class BoundaryTooShort(OneNextToken):
    def boundary_rows(self, num_draft_tokens: int) -> int:
        return num_draft_tokens - 2


class HolesNotReplayed(Rules):
    """H-23."""

    def replayed_pairs(self, num_missing: int) -> int:
        return 0


class WritesPastTheEnd(Rules):
    def place(self, position: int, max_seq_len: int) -> int | None:
        return position if position >= 0 else None


class ClampsToTheEnd(Rules):
    """H-16: the last slot is written again."""

    def place(self, position: int, max_seq_len: int) -> int | None:
        return min(position, max_seq_len - 1) if position >= 0 else None


class ClampsToZero(Rules):
    """H-9: rows before the prompt write slot 0."""

    def place(self, position: int, max_seq_len: int) -> int | None:
        return max(position, 0) if position < max_seq_len else None


class WritesBeforeZero(Rules):
    """H-9: rows before the prompt are not masked."""

    def place(self, position: int, max_seq_len: int) -> int | None:
        return position if position < max_seq_len else None


class AdvancesByAccepted(Rules):
    def advance(self, num_emitted: int) -> int:
        return num_emitted - 1


class AdvancesTooFar(Rules):
    def advance(self, num_emitted: int) -> int:
        return num_emitted + 1


class ReservesForNoStepInFlight(Rules):
    def reserved(self, known_len: int, num_draft_tokens: int, in_flight: int) -> int:
        return super().reserved(known_len, num_draft_tokens, 0)


class Reserves2K(Rules):
    """One token less than must be reserved."""

    def reserved(self, known_len: int, num_draft_tokens: int, in_flight: int) -> int:
        return super().reserved(known_len, num_draft_tokens, in_flight) - 1


class FreesAtOnce(Rules):
    def may_free(self, named_in_flight: bool) -> bool:
        return True


class PaddedWritesSlot(Rules):
    def padded_slot(self) -> int:
        return 0


class PaddedUpdatesState(Rules):
    def padded_state_row(self) -> int | None:
        return 0


@dataclass(frozen=True)
class Fault:
    """A planted fault: which kinds and smallest K it hurts, and what the model must raise."""

    rules: type[Rules]
    raises: tuple[type[StepModelError], ...]
    kinds: tuple[tuple[Kind, Chain], ...]
    min_k: int = 1
    options: tuple[tuple[str, Any], ...] = ()


WINDOWED = (MODULE_ROWS, TARGET_ROWS)
SINGLES = (RECYCLED, UNSHIFTED)
DRAFTERS = (*SINGLES, *WINDOWED)
HOLE = (UnwrittenRead, ForeignRead)  # nobody wrote the slot, or only an earlier owner of its block
STALE = (StaleRead,)
LATE = (("overlap", True),)
FULL = (("agreement", 1.0), ("eos_rate", 0.0))
PLAIN = (("ring_size", 8), ("plain_rate", 0.7), ("eos_rate", 0.0))
TIGHT = (("block_size", 1), ("overlap", True), ("agreement", 1.0), ("eos_rate", 0.0))

FAULTS = (
    Fault(PairsSamePosition, STALE, DRAFTERS),
    Fault(PairsTwoAhead, STALE, DRAFTERS),
    Fault(GathersRowN, (WrongRow,), SINGLES),
    Fault(GathersRowBefore, (WrongRow,), SINGLES),
    Fault(GathersLastRow, (WrongRow,), SINGLES),
    Fault(SinglesOneEarly, STALE, (RECYCLED,), 2),
    Fault(SinglesOneEarly, (StaleRead, WrongRow), (UNSHIFTED,), 2),
    Fault(SinglesOneLate, HOLE, (RECYCLED,), 2),
    Fault(SinglesOneLate, (*HOLE, WrongRow), (UNSHIFTED,), 2),
    Fault(SinglesStay, STALE, (RECYCLED,), 3),
    Fault(SinglesStay, (StaleRead, WrongRow), (UNSHIFTED,), 3),
    Fault(FirstPassOneEarly, STALE, SINGLES),
    Fault(FirstPassOneLate, (*HOLE, StaleRead, NotReserved), SINGLES),
    Fault(WindowOfK, HOLE, WINDOWED, 1, FULL),
    Fault(WindowOfS, STALE, (TARGET_ROWS,), 2, FULL),
    Fault(WindowEndsLate, (*HOLE, WrongRow), WINDOWED),
    Fault(WindowEndsEarly, (WrongRow,), WINDOWED),
    Fault(RingOneOld, STALE, WINDOWED),
    Fault(PrefillsOneModule, HOLE, WINDOWED, 2),
    Fault(ChunkTakesSampled, STALE, (RECYCLED, *WINDOWED)),
    Fault(BoundaryNotRerun, HOLE, (MODULE_ROWS,), 2),
    Fault(BoundaryTooShort, HOLE, (MODULE_ROWS,), 2),
    Fault(HolesNotReplayed, (*HOLE, StaleRead), DRAFTERS, 1, PLAIN),
    Fault(WritesPastTheEnd, (OutsideLength,), KINDS, 2),
    Fault(WritesPastTheEnd, (OutsideLength,), KINDS, 1, LATE),
    Fault(ClampsToTheEnd, (ConflictingWrite, StaleRead), KINDS, 2),
    Fault(ClampsToTheEnd, (ConflictingWrite, StaleRead), KINDS, 1, LATE),
    Fault(ClampsToZero, (ConflictingWrite, StaleRead), WINDOWED, 2),
    Fault(WritesBeforeZero, (OutsideLength,), WINDOWED, 2),
    Fault(AdvancesByAccepted, (StaleRead, OutputMismatch), KINDS, 0),
    Fault(AdvancesTooFar, (*HOLE, StaleRead, NotReserved), KINDS, 0),
    Fault(ReservesForNoStepInFlight, (NotReserved,), KINDS, 1, TIGHT),
    Fault(Reserves2K, (NotReserved,), (UNSHIFTED,), 1, TIGHT),
    Fault(FreesAtOnce, (FreedInFlight,), KINDS, 0, LATE),
    Fault(PaddedWritesSlot, (PaddedWrite,), KINDS, 0),
    Fault(PaddedUpdatesState, (PaddedWrite,), KINDS, 0),
)
FAULT_CASES = [
    pytest.param(fault, kind, k, id=f"{fault.rules.__name__}-{kind_id(kind)}-K{k}-{index}")
    for index, fault in enumerate(FAULTS)
    for kind in fault.kinds
    for k in range(fault.min_k, 6)
]


@pytest.mark.parametrize(("fault", "kind", "num_draft_tokens"), FAULT_CASES)
def test_planted_fault_is_caught(
    fault: Fault, kind: tuple[Kind, Chain], num_draft_tokens: int
) -> None:
    caught: list[type[StepModelError]] = []
    options = dict(fault.options)
    for seed in range(12):
        schedule = Schedule(kind=kind, num_draft_tokens=num_draft_tokens, seed=seed, **options)
        try:
            schedule.run(fault.rules())
        except StepModelError as error:
            caught.append(type(error))
        if len(caught) == 2:
            break
    assert caught, "no schedule caught the fault"
    assert set(caught) <= set(fault.raises)


@dataclass(frozen=True)
class Harmless:
    """A weaker rule that is still right for these kinds."""

    rules: type[Rules]
    kinds: tuple[tuple[Kind, Chain], ...]
    options: tuple[tuple[str, Any], ...] = ()
    strict_hidden: bool = True


HARMLESS = (
    Harmless(
        OneNextToken, (RECYCLED, *WINDOWED)
    ),  # the boundary rows run again: one token is enough
    Harmless(BoundaryNotRerun, (TARGET_ROWS,)),  # its slots shift instead
    Harmless(WindowOfS, (MODULE_ROWS,), FULL),
    Harmless(WindowOfS, (TARGET_ROWS,), FULL, strict_hidden=False),  # tokens right, states recycled
    Harmless(Reserves2K, (NONE, RECYCLED, *WINDOWED), TIGHT),  # only unshifted reaches L + 2K
)


@pytest.mark.parametrize("num_draft_tokens", range(1, 6), ids="K{}".format)
@pytest.mark.parametrize(
    ("harmless", "kind"),
    [
        pytest.param(harmless, kind, id=f"{harmless.rules.__name__}-{kind_id(kind)}")
        for harmless in HARMLESS
        for kind in harmless.kinds
    ],
)
def test_weaker_rule_is_enough(
    harmless: Harmless, kind: tuple[Kind, Chain], num_draft_tokens: int
) -> None:
    options = dict(harmless.options)
    for seed in range(4):
        schedule = Schedule(kind=kind, num_draft_tokens=num_draft_tokens, seed=seed, **options)
        schedule.run(harmless.rules(), strict_hidden=harmless.strict_hidden)
