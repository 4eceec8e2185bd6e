"""cached_recurrence and cached_conv: Triton kernels in the interpreter, against the references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compilespec.ops.causal_conv import cached_conv_reference
from compilespec.ops.recurrence import cached_recurrence_reference
from tests.support.recurrence import NAN, Case, Chunk, Pool, verify

pytest.importorskip("tests.support.triton_interpreter")
pytestmark = pytest.mark.interp
state = pytest.importorskip("compilespec.ops.recurrence.kernel")
ring = pytest.importorskip("compilespec.ops.causal_conv.kernel")

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CASES = [
    Case(heads=2, key_heads=1),
    Case(heads=2, key_heads=2, key_dim=17, value_dim=16, per_key=True, dtype=torch.bfloat16),
    Case(heads=1, key_heads=1, key_dim=24, value_dim=150, beta=False, dtype=torch.float64),
    Case(heads=290, key_heads=1, key_dim=16, value_dim=1, per_key=True, beta=False),
    Case(heads=6, key_heads=3, key_dim=5, value_dim=1, dtype=torch.float16),
]
MIXED = [  # prompts, padding, steps with several replays, more tokens than the ring holds
    [Chunk(0, 0, 3), None, Chunk(3, 0, 1)],
    [Chunk(0, 3, 5, commits=1), Chunk(3, 1, 6, commits=0)],
    [Chunk(3, 2, 3, absorbed=-7, commits=0), None, Chunk(0, 5, 6, absorbed=4, commits=1)],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cached_recurrence_equals_reference(case):
    mine = Pool(case)
    theirs, tolerance = mine.fresh(), TOLERANCE[case.dtype]
    for chunks in MIXED:
        call = theirs.arguments(chunks)
        got = state.cached_recurrence(*mine.arguments(chunks))
        want = cached_recurrence_reference(*call)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert not got[call[7] < 0].any()
        wide = TOLERANCE[mine.state.dtype]
        torch.testing.assert_close(mine.state, theirs.state, rtol=wide, atol=wide, equal_nan=True)
        torch.testing.assert_close(mine.recent, theirs.recent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "case",
    [Case(heads=1, key_heads=1), Case(heads=3, key_heads=1, value_dim=1, per_key=True)],
    ids=str,
)
def test_bits_do_not_depend_on_how_tokens_come(case):
    """By verify steps with rejected drafts, as at once."""
    pool = Pool(dataclasses.replace(case, dtype=torch.bfloat16))
    want = state.cached_recurrence(*pool.arguments([Chunk(1, 0, 7)]))[0]
    steps = pool.fresh()
    state.cached_recurrence(*steps.arguments([Chunk(1, 0, 1)]))
    got, absorbed, end = verify(steps, 1, 1, [2, 0], 2, state.cached_recurrence)
    assert torch.equal(got, want[1:end])
    last = state.cached_recurrence(*steps.arguments([Chunk(1, end, 7, absorbed)]))[0]
    assert torch.equal(last, want[end:])
    assert torch.equal(steps.state[1], pool.state[1])


@pytest.mark.parametrize(
    ("width", "channels", "bias", "dtype"),
    [(4, 37, True, torch.float32), (1, 5, False, torch.float64), (3, 600, True, torch.bfloat16)],
    ids=str,
)
def test_cached_conv_equals_reference(width, channels, bias, dtype):
    """Prompts, a step, drafts rejected, padding; the ring holds NaN."""
    x = torch.randn(channels + 1, 3, 30).movedim(0, 2)[..., 1:].to(dtype)
    weight = torch.randn(width, channels).to(dtype).t()
    bias_C = torch.randn(channels).to(dtype) if bias else None
    mine = torch.full((3, 6, channels), NAN, dtype=dtype)
    theirs = mine.clone()
    for spans in (
        [(0, 0, 9), (-1, 0, 1), (1, 0, 2)],
        [(1, 2, 6), (0, 9, 13), (-1, 0, 2), (2, 0, 1)],
        [(2, 1, 5), (1, 3, 7), (0, 11, 15)],
    ):
        row = torch.tensor([row for row, begin, end in spans for _ in range(begin, end)])
        position = torch.tensor([place for _, begin, end in spans for place in range(begin, end)])
        fed = x[row, position].masked_fill((row < 0)[:, None], NAN)[None]
        places = row.int()[None], position.int()[None]
        got = ring.cached_conv(fed, weight, bias_C, mine, *places)
        want = cached_conv_reference(fed, weight, bias_C, theirs, *places)
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
