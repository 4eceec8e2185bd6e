"""Recurrent layers in the step model: right rules survive every schedule, faults are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_model import Chain, Kind, Rules, StepModel, Toy
from tests.support.step_schedules import (
    KINDS,
    MODULE_ROWS,
    NONE,
    TARGET_ROWS,
    UNSHIFTED,
    Schedule,
    kind_id,
)
from tests.support.step_states import (
    ForeignState,
    StaleState,
    StepModelError,
    UnwrittenState,
    WrongCount,
)

WINDOWED = (MODULE_ROWS, TARGET_ROWS)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4], ids="K{}".format)
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_right_rules_survive_every_schedule(
    kind: tuple[Kind, Chain], num_draft_tokens: int
) -> None:
    @settings(derandomize=True, deadline=None, max_examples=10, database=None)
    @given(
        st.builds(
            Schedule,
            kind=st.just(kind),
            num_draft_tokens=st.just(num_draft_tokens),
            seed=st.integers(0, 2**32),
            max_rows=st.integers(1, 3),
            max_seq_len=st.integers(2, 24),
            block_size=st.integers(1, 8),
            num_requests=st.integers(1, 5),
            overlap=st.booleans(),
            ring_size=st.integers(0, 3),
            agreement=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
            eos_rate=st.sampled_from([0.0, 0.05, 0.3]),
            whole_prompts=st.booleans(),
            plain_rate=st.sampled_from([0.0, 0.0, 0.3]),
            abort_rate=st.sampled_from([0.0, 0.05]),
            conv_width=st.integers(1, 5),
            fewer_rate=st.sampled_from([0.0, 0.5]),
            preempt_rate=st.sampled_from([0.0, 0.1]),
        )
    )
    def check(schedule: Schedule) -> None:
        schedule.run()

    check()


# Planted faults.


class CommitsADraft(Rules):
    def commits(self, row: int) -> bool:
        return row < 2


class CommitsAllRows(Rules):
    def commits(self, row: int) -> bool:
        return True


class CommitsNothing(Rules):
    def commits(self, row: int) -> bool:
        return False


class CountStays(Rules):
    """`absorbed` is not advanced by the row that a step commits."""

    def count(self, seq_len: int, num_emitted: int, max_seq_len: int) -> int:
        return min(seq_len, max_seq_len)


class CountsAccepted(Rules):
    """As if the drafts that were accepted had been taken at once."""

    def count(self, seq_len: int, num_emitted: int, max_seq_len: int) -> int:
        return min(seq_len + num_emitted, max_seq_len)


class CountsPastTheEnd(Rules):
    def count(self, seq_len: int, num_emitted: int, max_seq_len: int) -> int:
        return seq_len + 1


class RingOneShort(Rules):
    def num_kept(self, most_drafts: int) -> int:
        return most_drafts - 1


class WindowOneShort(Rules):
    def window_columns(self, width: int, num_kept: int) -> int:
        return super().window_columns(width, num_kept) - 1


class WindowOfWidth(Rules):
    """No room for what may be rejected."""

    def window_columns(self, width: int, num_kept: int) -> int:
        return width


class ColumnsOfTheStep(Rules):
    """Steps of another K keep a position elsewhere."""

    def column(self, position: int, columns: int, num_draft_tokens: int) -> int:
        return position % max(1, num_draft_tokens)


class TakesTheWholeRing(Rules):
    def take_from(self, absorbed: int, first: int, columns: int) -> int:
        return max(0, first - columns)


class TakesNothingKept(Rules):
    def take_from(self, absorbed: int, first: int, columns: int) -> int:
        return first


class KeepsTheLastOwners(Rules):
    def begins_empty(self, first: int) -> bool:
        return False


class ForgetsAlways(Rules):
    def begins_empty(self, first: int) -> bool:
        return True


class ReadsBeforeThePrompt(Rules):
    def is_before_prompt(self, position: int) -> bool:
        return False


class RepeatedTakenTwice(Rules):
    """Chunks commit what the next one runs again."""

    def repeated_tokens(self, num_draft_tokens: int) -> int:
        return 0


class RepeatsOneToken(Rules):
    """Of the K-1 that are run again."""

    def repeated_tokens(self, num_draft_tokens: int) -> int:
        return 1


class PromptHeldBack(Rules):
    """The end of a prompt does not commit either, though it is counted."""

    def prompt_commits(self, end: int, num_repeated: int, finished: bool) -> int:
        return max(0, end - num_repeated)


class CountsRepeated(Rules):
    """Harmless: a chunk that follows finds no token between the count and its first one."""

    def prompt_count(self, end: int, num_repeated: int, finished: bool) -> int:
        return end


class PromptHeldBackAndCounted(PromptHeldBack):
    """The first verify step takes them from the ring; but a prompt that is held back whole leaves
    the state of the row's last owner.
    """

    def prompt_count(self, end: int, num_repeated: int, finished: bool) -> int:
        return max(0, end - num_repeated)


class DrafterKeepsRejected(Rules):
    def draft_commits(self, row: int, num_emitted: int) -> bool:
        return True


class DrafterKeepsOneMore(Rules):
    def draft_commits(self, row: int, num_emitted: int) -> bool:
        return row <= num_emitted


class DrafterDropsBonus(Rules):
    def draft_commits(self, row: int, num_emitted: int) -> bool:
        return row < num_emitted - 1


class DrafterTakesStartAgain(Rules):
    """The token at L was taken by the step before."""

    def draft_absorbed(self, seq_len: int) -> int:
        return seq_len


class SinglesTakeBonusAgain(Rules):
    def single_absorbed(self, new_seq_len: int, index: int) -> int:
        return new_seq_len


class SinglesForgetEachOther(Rules):
    def single_absorbed(self, new_seq_len: int, index: int) -> int:
        return new_seq_len + index


class SinglesCommit(Rules):
    def single_commits(self, index: int) -> bool:
        return True


class SampledNotCommitted(Rules):
    def single_commits(self, index: int) -> bool:
        return False


class PaddedAdvancesRow(Rules):
    def padded_states(self) -> Sequence[int]:
        return (0,)


@dataclass(frozen=True)
class Fault:
    """A planted fault: which kinds and smallest K it hurts, and what the model must raise."""

    rules: type[Rules]
    raises: tuple[type[StepModelError], ...]
    kinds: tuple[tuple[Kind, Chain], ...] = (NONE, UNSHIFTED)
    min_k: int = 1
    options: tuple[tuple[str, Any], ...] = ()


STALE = (StaleState,)
ELSEWHERE = (UnwrittenState, ForeignState, StaleState)  # a column that holds something else
DRAFTER = (UNSHIFTED,)
LATE = (("overlap", True),)
FEWER = (("fewer_rate", 0.6), ("agreement", 0.95))

FAULTS = (
    Fault(CommitsADraft, ELSEWHERE),
    Fault(CommitsAllRows, ELSEWHERE),
    Fault(CommitsNothing, STALE, min_k=0),
    Fault(CountStays, ELSEWHERE, min_k=0),
    Fault(CountsAccepted, STALE),
    Fault(CountsPastTheEnd, (WrongCount,), options=LATE),
    Fault(RingOneShort, STALE, min_k=2),
    Fault(WindowOneShort, STALE),
    Fault(WindowOfWidth, STALE, min_k=2),
    Fault(ColumnsOfTheStep, ELSEWHERE, min_k=3, options=FEWER),
    Fault(TakesTheWholeRing, ELSEWHERE),
    Fault(TakesNothingKept, STALE),
    Fault(KeepsTheLastOwners, (ForeignState,), min_k=0),
    Fault(ForgetsAlways, STALE, min_k=0),
    Fault(ReadsBeforeThePrompt, ELSEWHERE, min_k=0),
    Fault(RepeatedTakenTwice, STALE, WINDOWED, 2),
    Fault(RepeatsOneToken, STALE, WINDOWED, 3),
    Fault(PromptHeldBack, STALE, WINDOWED, 2),
    Fault(PromptHeldBackAndCounted, (ForeignState, StaleState), WINDOWED, 2),
    Fault(DrafterKeepsRejected, STALE, DRAFTER),
    Fault(DrafterKeepsOneMore, STALE, DRAFTER),
    Fault(DrafterDropsBonus, STALE, DRAFTER),
    Fault(DrafterTakesStartAgain, ELSEWHERE, DRAFTER),
    Fault(SinglesTakeBonusAgain, ELSEWHERE, DRAFTER, 2),
    Fault(SinglesForgetEachOther, STALE, DRAFTER, 3),
    Fault(SinglesCommit, ELSEWHERE, DRAFTER, 2),
    Fault(SampledNotCommitted, STALE, DRAFTER),
    Fault(PaddedAdvancesRow, (ForeignState,), min_k=0),
)


def schedule(kind: tuple[Kind, Chain], count: int, seed: int, **options: Any) -> Schedule:
    return Schedule(kind=kind, num_draft_tokens=count, seed=seed, conv_width=3, **options)


@pytest.mark.parametrize(
    ("fault", "kind", "num_draft_tokens"),
    [
        pytest.param(fault, kind, k, id=f"{fault.rules.__name__}-{kind_id(kind)}-K{k}")
        for fault in FAULTS
        for kind in fault.kinds
        for k in sorted({fault.min_k, max(fault.min_k, 1), 3, 4})
    ],
)
def test_planted_fault_is_caught(
    fault: Fault, kind: tuple[Kind, Chain], num_draft_tokens: int
) -> None:
    caught: list[type[StepModelError]] = []
    for seed in range(12):
        try:
            schedule(kind, num_draft_tokens, seed, **dict(fault.options)).run(fault.rules())
        except StepModelError as error:
            caught.append(type(error))
        if len(caught) == 2:
            break
    assert caught, "no schedule caught the fault"
    assert set(caught) <= set(fault.raises)


@pytest.mark.parametrize("num_draft_tokens", [2, 4], ids="K{}".format)
def test_an_unfinished_chunk_may_count_what_it_holds_back(num_draft_tokens: int) -> None:
    for seed in range(4):
        schedule(MODULE_ROWS, num_draft_tokens, seed).run(CountsRepeated())


# What rows and rings hold after a step.


def one_row(kind: tuple[Kind, Chain], count: int, agreement: float) -> StepModel:
    return StepModel(
        kind[0], count, chain=kind[1], max_rows=1, max_seq_len=32, block_size=32, conv_width=3,
        oracle=Toy(agreement=agreement, eos_rate=0.0),
    )  # fmt: skip


def test_a_state_is_one_token_ahead_of_what_was_rejected() -> None:
    """Nothing is accepted: the state holds the step's first token, the ring its drafts."""
    model = one_row(NONE, 3, 0.0)
    row = model.admit([1, 2, 3, 4, 5])
    model.prefill([(row, 5)])
    assert model.states is not None
    assert model.states.absorbed[row] == 5
    for length in (5, 6, 7):
        model.decode([row])
        state = model.states.rows[0, row]
        assert (len(state.held), model.states.absorbed[row]) == (length + 1, length + 1)
        kept = {len(token.prefix) - 1 for token in state.recent.values()}
        assert kept == {length + 1, length + 2, length + 3}
        assert len(state.window) == 5 == model.states.num_window


def test_accepted_drafts_are_taken_by_the_next_step() -> None:
    model = one_row(NONE, 3, 1.0)
    row = model.admit([1, 2, 3, 4, 5])
    model.prefill([(row, 5)])
    assert model.states is not None
    for length in (5, 9, 13):
        model.decode([row])
        assert len(model.states.rows[0, row].held) == length + 1


def test_a_chunk_holds_back_what_the_next_one_runs_again() -> None:
    model = one_row(MODULE_ROWS, 4, 0.5)
    row = model.admit(range(9))
    assert model.states is not None
    held = []
    for length in (2, 4, 3):
        model.prefill([(row, length)])
        held.append((len(model.states.rows[0, row].held), model.states.absorbed[row]))
    assert held == [(0, 0), (3, 3), (9, 9)]


def test_a_drafters_state_ends_at_the_last_emitted_token() -> None:
    for agreement, advance in ((0.0, 1), (1.0, 4)):
        model = one_row(UNSHIFTED, 3, agreement)
        row = model.admit([1, 2, 3, 4, 5])
        model.prefill([(row, 5)])
        assert model.states is not None
        for step in range(3):
            assert len(model.states.rows[1, row].held) == 6 + step * advance
            model.decode([row])


def test_a_drafter_with_states_takes_part_in_every_step() -> None:
    model = one_row(UNSHIFTED, 2, 0.5)
    row = model.admit([1, 2])
    model.prefill([(row, 2)])
    with pytest.raises(ValueError, match="must see every token"):
        model.decode([row], num_draft_tokens=0)
