"""What the step model records: the numbers that a real graph's inputs are compared with.

Source: requirements T06-T08, T10, T11 (at the level of slots and tokens), H-4, H-9, H-16, H-21 to
H-23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.step_model import (
    PAD,
    Chain,
    Forced,
    Hidden,
    Kind,
    Prefix,
    RingOverrun,
    RowRecord,
    StepModel,
    StepRecord,
    Toy,
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


def one_row(kind: tuple[Kind, Chain], num_draft_tokens: int, **options: Any) -> StepModel:
    """One row in one block, so that a flat slot is a position."""
    size = options.setdefault("max_seq_len", 64)
    return StepModel(
        kind[0], num_draft_tokens, chain=kind[1], max_rows=1, block_size=size, **options
    )


def read(record: StepRecord | None) -> StepRecord:
    assert record is not None
    return record


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0], ids="p{}".format)
@pytest.mark.parametrize("num_draft_tokens", range(6), ids="K{}".format)
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_slots_follow_design(
    kind: tuple[Kind, Chain], num_draft_tokens: int, agreement: float
) -> None:
    count, prompt = num_draft_tokens, [1, 2, 3, 4, 5]
    model = one_row(kind, count, oracle=Toy(agreement=agreement, eos_rate=0.0))
    row = model.admit(prompt)
    done = read(model.prefill([(row, 5)])).prefill[0]
    assert (done.slots, done.positions) == ((0, 1, 2, 3, 4),) * 2
    assert (done.new_seq_len, done.num_emitted, len(done.drafts)) == (5, 1, count)
    while model.rows:
        done = read(model.decode([row], padded_to=3)).decode[0]
        seq_len, n = done.seq_len, done.num_emitted
        if seq_len + 2 * count >= 64:
            break
        assert done.positions == done.slots == tuple(range(seq_len, seq_len + count + 1))
        assert 1 <= n <= count + 1
        assert done.new_seq_len == seq_len + n
        assert n == {0.0: 1, 1.0: count + 1}.get(agreement, n)
        check_passes(kind, count, done)


def check_passes(kind: tuple[Kind, Chain], count: int, done: RowRecord) -> None:
    seq_len, n = done.seq_len, done.num_emitted
    written = [slot for one in done.passes for slot in one.slots]
    assert len(done.passes) == (0 if kind == NONE else count)
    if not written:
        return
    first = done.passes[0]
    if kind in (RECYCLED, UNSHIFTED):
        shift = int(kind == UNSHIFTED)
        assert first.slots == tuple(range(seq_len + shift, seq_len + shift + count + 1))
        assert first.tokens == done.targets
        assert first.gather == n - 1
        singles = [one.slots for one in done.passes[1:]]
        assert singles == [(seq_len + n + shift + k,) for k in range(count - 1)]
        assert [one.tokens for one in done.passes[1:]] == [(d,) for d in done.drafts[:-1]]
        highest = seq_len + 2 * count - (kind == RECYCLED)
        assert max(written) <= highest
        assert n != count + 1 or max(written) == highest
    else:
        assert max(written) == seq_len + n - 1
        for module, one in enumerate(done.passes, 1):
            rows = count + (module if kind == TARGET_ROWS else 1)
            wanted = range(seq_len + n - rows, seq_len + n)
            assert one.slots == tuple(max(slot, -1) for slot in wanted)
            assert one.positions == tuple(max(slot, 0) for slot in wanted)


@dataclass(frozen=True)
class Script:
    """Target and drafter that follow written texts."""

    text: str
    drafts: tuple[tuple[str, str], ...]  # tokens seen -> draft
    eos: int = -2

    def target(self, prefix: Prefix) -> int:
        return ord(self.text[len(prefix)]) if len(prefix) < len(self.text) else ord("?")

    def draft(self, prefix: Prefix) -> int:
        return ord(dict(self.drafts)["".join(map(chr, prefix))])

    def garbage(self, prefix: Prefix) -> int:
        return ord("?")


def named(hidden: Hidden | None) -> str:
    assert hidden is not None
    return ("h_" if hidden.depth else "H_") + chr(hidden.prefix[-1])


def last_rows(done: RowRecord, count: int) -> list[tuple[str, str]]:
    """The last `count` rows of each module: tokens, and hidden states as M4 writes them."""
    return [
        (
            "".join(map(chr, one.tokens[-count:])),
            ",".join(named(hidden) for hidden in one.hiddens[-count:]),
        )
        for one in done.passes
    ]


def test_golden_traces_of_windowed_mtp() -> None:
    """Requirement M4; the reference's rows are the last K of each of our windows."""
    script = Script(
        "ABCDEFGXK",
        (
            *(("ABCDE", "F"), ("ABCDEF", "G"), ("ABCDEFG", "H")),
            *(("ABCDEFGX", "N"), ("ABCDEFGXN", "O"), ("ABCDEFGXNO", "P")),
            *(("ABCDEFGXK", "U"), ("ABCDEFGXKU", "V"), ("ABCDEFGXKUV", "Q")),
        ),
    )
    model = one_row(TARGET_ROWS, 3, oracle=script)
    row = model.admit([ord(token) for token in "ABCD"])
    done = read(model.prefill([(row, 4)])).prefill[0]
    assert last_rows(done, 4)[0] == ("BCDE", "H_A,H_B,H_C,H_D")
    assert last_rows(done, 4)[1] == ("CDEF", "H_B,H_C,H_D,h_E")
    assert last_rows(done, 4)[2] == ("DEFG", "H_C,H_D,h_E,h_F")
    assert "".join(map(chr, done.drafts)) == "FGH"

    done = read(model.decode([row])).decode[0]
    assert "".join(map(chr, done.emitted)) == "FGX"
    assert last_rows(done, 3) == [
        ("FGX", "H_E,H_F,H_G"),
        ("GXN", "H_F,H_G,h_X"),
        ("XNO", "H_G,h_X,h_N"),
    ]
    assert all(one.positions[-3:] == (4, 5, 6) for one in done.passes)
    assert "".join(map(chr, done.drafts)) == "NOP"

    done = read(model.decode([row])).decode[0]
    assert "".join(map(chr, done.emitted)) == "K"
    assert last_rows(done, 3) == [
        ("GXK", "H_F,H_G,H_X"),
        ("XKU", "H_G,H_X,h_K"),
        ("KUV", "H_X,h_K,h_U"),
    ]
    assert all(one.positions[-3:] == (5, 6, 7) for one in done.passes)
    assert "".join(map(chr, done.drafts)) == "UVQ"


def test_packed_shift_takes_the_next_prompt_token() -> None:
    """Requirement E2: [a1 b1 b2 c1 c2 c3] + [a2 b3 c4] -> [a2 b2 b3 c2 c3 c4]."""
    model = StepModel("recycled", 1, max_rows=3, max_seq_len=8, block_size=2)
    prompts = ([11, 12, 13], [21, 22, 23, 24], [31, 32, 33, 34, 35])
    rows = [model.admit(prompt) for prompt in prompts]
    record = read(model.prefill([(rows[0], 1), (rows[1], 2), (rows[2], 3)], padded_to=4))
    fed = [token for done in record.prefill[:3] for token in done.passes[0].tokens]
    assert fed == [12, 22, 23, 32, 33, 34]
    assert [done.row for done in record.prefill] == [0, 1, 2, -1]
    assert not any(done.emitted or done.drafts for done in record.prefill)


def test_chunk_boundary_of_module_rows() -> None:
    """H-22: module i gets i true next tokens; the next chunk runs the K-1 rows before it again."""
    model = one_row(MODULE_ROWS, 3, oracle=Toy(eos_rate=0.0))
    row = model.admit(range(8))
    first = read(model.prefill([(row, 4)])).prefill[0]
    assert [one.tokens[2:] for one in first.passes] == [(1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)]
    second = read(model.prefill([(row, 3)])).prefill[0]  # one prompt token left: modules 2, 3 wait
    assert [one.slots for one in second.passes] == [
        (2, 3, 4, 5, 6),
        (2, 3, 4, 5, -1),
        (2, 3, 4, -1, -1),
    ]
    last = read(model.prefill([(row, 1)])).prefill[0]
    assert [one.slots for one in last.passes] == [(5, 6, 7)] * 3
    assert len(last.drafts) == 3


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_rows_past_the_end_are_redirected(kind: tuple[Kind, Chain]) -> None:
    """Requirement E5, H-16: prompt at max_seq_len - 1, K beyond the end."""
    model = one_row(kind, 4, max_seq_len=8, overlap=True, oracle=Toy(eos_rate=0.0))
    row = model.admit([1] * 6)
    model.prefill([(row, 6)])
    model.decode([row])
    model.decode([row])  # launched before the host saw the request end
    model.drain()
    model.check_outputs()
    assert [len(model.requests[0].output), model.requests[0].finish_reason] == [2, "length"]
    first, late = model.history[1].decode[0], model.history[2].decode[0]
    assert (first.slots, first.positions) == ((6, 7, -1, -1, -1), (6, 7, 0, 0, 0))
    assert late.slots[1:] == (-1,) * 4
    for one in (*first.passes, *late.passes):
        assert all(slot < 8 for slot in one.slots)
        assert all(
            position == 0
            for slot, position in zip(one.slots, one.positions, strict=True)
            if slot < 0
        )


def test_late_eos_runs_one_step_more() -> None:
    """The row and its blocks stay with the finished request until the step in flight is read."""
    script = Script("AB$CDEFGHIJKLMNOP", (), eos=ord("$"))
    model = StepModel(
        "none", 0, max_rows=1, max_seq_len=16, block_size=2, overlap=True, oracle=script
    )
    row = model.admit([ord("A")])
    assert model.prefill([(row, 1)]) is None
    assert read(model.decode([row])).prefill[0].emitted == (ord("B"),)
    assert read(model.decode([row])).decode[0].emitted == (ord("$"),)
    assert model.requests[0].finish_reason == "stop"
    assert model.running() == []
    assert row in model.rows
    assert model.block_owner
    model.drain()
    assert not model.rows
    assert not model.block_owner
    assert model.requests[0].output == [ord("B"), ord("$")]
    assert model.requests[0].emitted_per_step == [1]


def test_padded_rows_record_nothing() -> None:
    model = one_row(RECYCLED, 2)
    row = model.admit([1, 2])
    model.prefill([(row, 2)])
    before = dict(model.cache)
    record = read(model.decode([], padded_to=4))
    assert [done.row for done in record.decode] == [-1] * 4
    assert model.cache == before


def test_every_acceptance_count_occurs() -> None:
    for count in range(6):
        schedule = Schedule(kind=RECYCLED, num_draft_tokens=count, seed=1, num_requests=20)
        model = schedule.run()
        seen = {done.num_emitted for step in model.history for done in step.decode if done.row >= 0}
        assert seen == set(range(1, count + 2))


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_forced_tokens_replay_a_recorded_run(kind: tuple[Kind, Chain]) -> None:
    """The way a real engine is compared: its targets and drafts go in, slots and pairs come out."""
    source = one_row(kind, 3, oracle=Toy(seed=5, eos_rate=0.0))
    replay = one_row(kind, 3, oracle=Toy(seed=6, eos_rate=0.0))
    for model in (source, replay):
        assert model.admit([1, 2, 3], max_new_tokens=20) == 0
    want = read(source.prefill([(0, 3)])).prefill[0]
    forced = {0: Forced(targets=want.targets, drafts=want.drafts)}
    assert read(replay.prefill([(0, 3)], forced=forced)).prefill[0] == want
    while source.rows:
        want = read(source.decode([0])).decode[0]
        forced = {0: Forced(targets=want.targets, drafts=want.drafts)}
        assert read(replay.decode([0], forced=forced)).decode[0] == want


def test_plain_steps_leave_holes_that_the_ring_fills() -> None:
    """H-23: a row within the ring drafts again, a row that overran it stays at K = 0."""
    model = one_row(RECYCLED, 2, ring_size=2, oracle=Toy(eos_rate=0.0))
    row = model.admit([1, 2, 3])
    model.prefill([(row, 3)])
    for _ in range(2):
        plain = read(model.decode([row], num_draft_tokens=0)).decode[0]
        assert (len(plain.slots), plain.drafts, plain.passes) == (1, (PAD, PAD), ())
    done = read(model.decode([row])).decode[0]
    assert done.num_emitted == 1
    assert done.passes[0].slots == (3, 4, 5, 6, 7)  # two missing pairs, then the S rows
    assert done.passes[0].gather == 2
    for _ in range(3):
        model.decode([row], num_draft_tokens=0)
    assert not model.can_draft(row)
    with pytest.raises(RingOverrun):
        model.decode([row])
