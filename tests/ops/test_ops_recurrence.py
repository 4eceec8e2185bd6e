"""recurrence and cached_recurrence: the definition, state that survives rejection, equal bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from compilespec.ops import cached_recurrence, recurrence
from compilespec.ops.recurrence import cached_recurrence_reference
from tests.support.recurrence import Case, Chunk, Pool, verify

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}

CASES = [
    Case(),
    Case(heads=1, key_heads=1, key_dim=1, value_dim=2),
    Case(heads=6, key_heads=3, key_dim=17, value_dim=16, per_key=True),
    Case(heads=2, key_heads=2, key_dim=32, value_dim=33, per_key=True),
    Case(heads=4, key_heads=1, key_dim=24, value_dim=64, beta=False),
    Case(heads=2, key_heads=1, key_dim=20, value_dim=150),
    Case(heads=37, key_heads=1, key_dim=16, value_dim=1, per_key=True, beta=False),
    Case(heads=68, key_heads=34, key_dim=5, value_dim=1),
]

MIXED = [  # a fresh prompt, a chunk of another, a verify step, padding; replays of several lengths
    [Chunk(0, 0, 5), Chunk(1, 0, 7), None, Chunk(2, 0, 4), Chunk(3, 0, 1)],
    [None, Chunk(1, 7, 9), Chunk(0, 5, 9, commits=1), None, Chunk(2, 4, 8, commits=2)],
    [Chunk(2, 8, 12, absorbed=6, commits=1), Chunk(0, 6, 10, commits=1), None, None],
    [Chunk(0, 9, 10, absorbed=7, commits=1), Chunk(1, 9, 13, commits=1), Chunk(2, 12, 13, 9)],
    [Chunk(3, 1, 4, commits=0), Chunk(1, 13, 14, absorbed=10, commits=1), None],
    [Chunk(3, 2, 3, absorbed=1, commits=0), Chunk(0, 10, 14, absorbed=-7, commits=1)],
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cached_recurrence_equals_reference(case, dtype):
    """Poison in rows of others, in the ring and in padded tokens shows in neither."""
    mine = Pool(dataclasses.replace(case, dtype=dtype))
    theirs = mine.fresh()
    for chunks in MIXED:
        got, call = cached_recurrence(*mine.arguments(chunks)), theirs.arguments(chunks)
        want = cached_recurrence_reference(*call)
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert not want.isnan().any()
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert not got[call[7] < 0].any()
        compare_buffers(mine, theirs, TOLERANCE[wide(dtype)])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare_buffers(mine: Pool, theirs: Pool, tolerance: float) -> None:
    torch.testing.assert_close(mine.state, theirs.state, rtol=tolerance, atol=tolerance,
                               equal_nan=True)  # fmt: skip
    torch.testing.assert_close(mine.recent, theirs.recent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_whole_prompt_is_what_the_marker_says(case):
    pool = Pool(dataclasses.replace(case, dtype=torch.float64))
    call = pool.arguments([Chunk(row, 0, 20) for row in range(4)], batch=4)
    torch.testing.assert_close(cached_recurrence(*call), recurrence(*call[:5], "any"))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_how_tokens_come(case, dtype, kernels, threads):
    """A prompt at once, cut, one by one, beside others, by verify steps with rejected drafts."""
    pool = Pool(dataclasses.replace(case, dtype=dtype))
    threads(1)
    want = cached_recurrence(*pool.arguments([Chunk(1, 0, 17)]))[0]
    for num_threads, cuts in ((1, (5, 6, 17)), (2, range(1, 18)), (5, (16, 17))):
        threads(num_threads)
        one, begin = pool.fresh(), 0
        for end in cuts:
            beside = [Chunk(0, 0, 3), Chunk(1, begin, end), None, Chunk(3, 0, 1)]
            assert torch.equal(cached_recurrence(*one.arguments(beside))[0, 3:-2],
                               want[begin:end])  # fmt: skip
            begin = end
        assert torch.equal(one.state[1], pool.state[1])
    steps = pool.fresh()
    prompt = cached_recurrence(*steps.arguments([Chunk(1, 0, 3)]))[0]
    got, absorbed, end = verify(steps, 1, 3, [3, 0, 1, 0, 2], 3, cached_recurrence)
    assert torch.equal(torch.cat([prompt, got]), want[:end])
    last = cached_recurrence(*steps.arguments([Chunk(1, end, 17, absorbed)]))[0]
    assert torch.equal(last, want[end:])
    assert torch.equal(steps.state[1], pool.state[1])


@pytest.mark.parametrize("compute", [cached_recurrence, cached_recurrence_reference])
def test_absorbed_is_clamped(compute):
    """At most P tokens are replayed, none before the first, none that come after the call."""
    pool = Pool(Case(dtype=torch.float64))
    compute(*pool.arguments([Chunk(0, 0, 6), Chunk(1, 0, 6)]))
    compute(*pool.arguments([Chunk(0, 6, 9, commits=0)]))
    results = []
    for absorbed in (6, 5, -(2**31)):
        copy = pool.copy()
        results.append(compute(*copy.arguments([Chunk(0, 9, 10, absorbed)])))
    assert all(torch.equal(result, results[0]) for result in results)
    for absorbed in (6, 7, 2**31 - 1):  # the ring of request 1 holds NaN
        assert not compute(*pool.copy().arguments([Chunk(1, 6, 7, absorbed)])).isnan().any()
    fresh = compute(*pool.fresh().arguments([Chunk(2, 0, 1, absorbed=-5)]))
    assert not fresh.isnan().any()


@pytest.mark.parametrize("compute", [cached_recurrence, cached_recurrence_reference])
def test_tokens_that_do_not_commit_leave_the_state(compute):
    pool = Pool(Case(length=12, rows=3))
    compute(*pool.arguments([Chunk(0, 0, 2)]))
    before = pool.state.clone()
    compute(*pool.arguments([Chunk(0, 2, 11, commits=0)]))  # more than the ring holds
    torch.testing.assert_close(pool.state, before, rtol=0, atol=0, equal_nan=True)
    kept = pool.inputs["beta"][0, 8:11]  # positions 8, 9, 10 in columns 2, 0, 1
    assert torch.equal(pool.recent[0][[2, 0, 1], -4:], kept)
    assert pool.recent[1:].isnan().all()


def test_equals_transformers():
    """Its chunked forms compute in float32."""
    case = Case(heads=6, key_heads=2, key_dim=16, value_dim=12, rows=2, length=70)
    one = Pool(case).inputs
    call = (one["query"], one["key"], one["value"], one["decay"], one["beta"])
    scaled = (one["query"] * 16**-0.5, *call[1:])
    close(recurrence(*scaled, "gated_delta"), torch_chunk_gated_delta_rule(*call)[0])
    per_key = Pool(dataclasses.replace(case, key_heads=6, per_key=True)).inputs
    call = (per_key["query"], per_key["key"], per_key["value"], per_key["decay"], per_key["beta"])
    scaled = (call[0] * 16**-0.5, *call[1:])
    close(recurrence(*scaled, "kimi_delta"), chunk_kimi_delta_attention(*call)[0])
    time, rate = torch.rand(2, 70, 6), -torch.rand(6)
    got = recurrence(one["query"], one["key"], one["value"] * time[..., None], time * rate, None,
                     "mamba2")  # fmt: skip
    want = mamba2_chunk_scan(one["value"], time, rate, one["key"], one["query"], chunk_size=32)
    close(got, want[0] if isinstance(want, tuple) else want)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_errors_name_what_does_not_fit(kernels):
    pool = Pool(Case())
    call = list(pool.arguments([Chunk(0, 0, 2)]))
    for place, wrong, message in (
        (5, pool.state[:, :3], "expected a contiguous state"),
        (5, pool.state.double(), "the state and the kept tokens"),
        (6, pool.recent[:, :, 1:], "expected contiguous kept tokens"),
        (3, call[3][:, :, :1], "decay"),
        (7, call[7].long(), "row must be int32"),
        (7, call[7] + 9, "row 9 in a state of 4 rows"),
        (10, call[10].int(), "commits must be bool"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cached_recurrence(*call[:place], wrong, *call[place + 1 :])


@pytest.mark.parametrize("case", [Case(), Case(per_key=True, beta=False, value_dim=1)], ids=str)
def test_opcheck(case):
    pool = Pool(case)
    call = pool.arguments([Chunk(0, 0, 2), Chunk(1, 0, 4, commits=1)], batch=2)
    pool.state.zero_(), pool.recent.zero_()  # NaN is equal to nothing
    torch.library.opcheck(torch.ops.compilespec.cached_recurrence.default, call)
    torch.library.opcheck(torch.ops.compilespec.recurrence.default, (*call[:5], "any"))


def test_no_tokens():
    call = Pool(Case()).arguments([Chunk(0, 0, 2)])
    none = [part[:0] if isinstance(part, Tensor) else part for part in call]
    assert cached_recurrence(*none[:5], *call[5:7], *none[7:]).shape == (0, 2, 4, 5)
