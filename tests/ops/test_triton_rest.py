"""Heads, look-ups and rings: references and Triton kernels."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from compilespec.methods.ngram import NgramDrafter
from compilespec.ops.argmax_linear import (
    argmax_linear,
    argmax_linear_reference,
    score_linear,
    score_linear_reference,
)
from compilespec.ops.ngram_match import ngram_match, ngram_match_reference
from compilespec.ops.roll_window import roll_window, roll_window_reference
from compilespec.ops.suffix_match import suffix_match_reference
from compilespec.passes.splice.draft_loops.windowed import take_window, write_ring
from compilespec.program import PAD

pytest.importorskip("tests.support.triton_interpreter")
pytestmark = pytest.mark.interp
head = pytest.importorskip("compilespec.ops.argmax_linear.kernel")
ngram = pytest.importorskip("compilespec.ops.ngram_match.kernel")
ring = pytest.importorskip("compilespec.ops.roll_window.kernel")
suffix = pytest.importorskip("compilespec.ops.suffix_match.kernel")


# --- the head ---


def whole_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Products of these are exact in every dtype: kernel and library agree on every tie."""
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 63, 64, 200])
def test_the_first_of_a_rows_best_is_found_in_spans(columns, dtype, monkeypatch):
    """Ties in a span and between spans, infinities, strided rows; of NaN, an index inside."""
    monkeypatch.setattr(head, "SPAN", 64)
    x = whole_numbers(3, 5, columns + 2, dtype=dtype)[..., 1:-1]
    x[0, 0], x[0, 1] = -math.inf, math.inf
    x[0, 2, :-1] = -math.inf
    assert torch.equal(head.row_argmax(x), x.argmax(-1))
    x[1, :, ::3] = math.nan
    found = head.row_argmax(x)
    assert torch.equal(found[::2], x[::2].argmax(-1))
    assert 0 <= int(found.min()) <= int(found.max()) < columns
    assert head.row_argmax(x[:0]).shape == (0, 5)
    torch.library.opcheck(torch.ops.compilespec.row_argmax.default, (x[0],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "depth", "vocab"),
    [((1,), 5, 1), ((3, 5), 48, 131), ((1, 17), 70, 64), ((0, 4), 8, 9)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_best_of_the_head_is_the_first_best_logit(rows, depth, vocab, dtype, bias):
    """Many ties: the first index wins, across blocks of the vocabulary too."""
    x, weight = whole_numbers(*rows, depth, dtype=dtype), whole_numbers(vocab, depth, dtype=dtype)
    weight[vocab // 2 :] = weight[: vocab - vocab // 2].clone()  # every logit at least twice
    bias_V = whole_numbers(vocab, dtype=dtype) if bias else None
    want, largest = argmax_linear_reference(x, weight, bias_V)
    got = head.argmax_linear(x, weight, bias_V)
    assert got[0].dtype == torch.int64
    assert got[1].dtype == dtype
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], largest)
    ids = torch.randint(-3, vocab + 2, rows)
    got_scores = head.score_linear(x, weight, bias_V, ids)
    want_scores = score_linear_reference(x, weight, bias_V, ids)
    assert torch.equal(got_scores[0], want)
    for mine, theirs in zip(got_scores[1:], want_scores[1:], strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_equal_logits_are_equal_after_rounding():
    """1 + 2**-12 and 1 are one float16: the first of them wins, as it does with logits."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12], [0.5, 0.0]], dtype=torch.float16)
    x = torch.ones(1, 2, dtype=torch.float16)
    assert head.argmax_linear(x, weight, None)[0].tolist() == [0]


def test_real_numbers_and_strides():
    x = torch.randn(9, 2, 33).transpose(0, 1)
    weight = torch.randn(33, 200).t()
    assert torch.equal(head.argmax_linear(x, weight, None)[0], (x @ weight.t()).argmax(-1))
    probability = (x @ weight.t()).log_softmax(-1)
    ids = torch.randint(0, 200, (2, 9))
    _, total, picked = head.score_linear(x, weight, None, ids)
    want = probability.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(picked - total, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # numpy's
def test_a_nan_is_the_largest_and_shows():
    x, weight = torch.ones(3, 4), torch.ones(200, 4)
    x[0] = math.nan
    x[2] = 0.0
    weight[7:] = -math.inf  # times 0 is NaN, from id 7 on
    weight[3] = 2.0
    for compute in (head.argmax_linear, argmax_linear_reference):
        best, largest = compute(x, weight, None)
        assert best.tolist() == [0, 3, 7]
        assert largest.isnan().tolist() == [True, False, True]
        best, largest = compute(torch.ones(1, 4), torch.full((70, 4), -math.inf), None)
        assert (int(best), float(largest)) == (0, -math.inf)


def test_opcheck_of_the_head():
    ops = torch.ops.compilespec
    for rows in ((2, 3), (0,)):
        x, weight, bias = torch.randn(*rows, 8), torch.randn(11, 8), torch.randn(11)
        torch.library.opcheck(ops.argmax_linear.default, (x, weight, None))
        ids = torch.zeros(rows, dtype=torch.int32)
        torch.library.opcheck(ops.score_linear.default, (x, weight, bias, ids))
        assert torch.equal(argmax_linear(x, weight, bias)[0], (x @ weight.t() + bias).argmax(-1))
        assert torch.equal(
            score_linear(x, weight, bias, ids)[0], (x @ weight.t() + bias).argmax(-1)
        )


# --- n-gram lookup ---


def histories(batch: int, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    length = torch.randint(1, width + 1, (batch,), dtype=torch.int32)
    length[0], length[-1] = width, 1
    tokens = torch.randint(0, vocab, (batch, width), dtype=torch.int32)
    return torch.where(torch.arange(width) < length.unsqueeze(1), tokens, PAD), length


@pytest.mark.parametrize(
    ("width", "count", "longest", "shortest"),
    [(7, 1, 1, 1), (33, 5, 3, 1), (1100, 4, 4, 2), (5, 9, 6, 6)],
)
def test_ngram_matches_equal_the_reference(width, count, longest, shortest):
    for vocab in (300, 5, 2):
        history, length = histories(6, width, vocab)
        history[3, width // 3] = PAD  # what stands for an embedding
        want = ngram_match_reference(history, length, count, longest, shortest)
        assert_equal(ngram_match(history, length, count, longest, shortest), want)
        assert_equal(ngram_match(history, length.long(), count, longest, shortest), want)
        assert_equal(ngram.ngram_match(history, length, count, longest, shortest), want)
        drafter = NgramDrafter(max_ngram=longest, min_ngram=shortest)
        drafter.num_draft_tokens = count
        assert_equal(drafter.draft(history, length), want)
        assert bool(((want[1] >= shortest) | (want[1] == 0)).all())
    assert bool((want[0] >= 0).any()) or shortest > 3


@pytest.mark.parametrize(
    ("width", "past", "count", "longest", "shortest"),
    [
        (33, (2, 20), 4, 5, 1),
        (50, (0, 7), 3, 16, 2),
        (1100, (3, 300), 3, 3, 1),
        (9, (1, 1), 1, 1, 1),
    ],
)
def test_suffix_matches_equal_the_reference(width, past, count, longest, shortest):
    """More votes than a block holds, ties, texts that end, a table that is empty again."""
    for vocab in (2, 3, 40):
        history, length = histories(3, width, vocab)
        texts = torch.randint(0, vocab, past, dtype=torch.int32)
        ends = torch.randint(0, past[1] + 1, (past[0], 1))
        texts = torch.where(torch.arange(past[1]) < ends, texts, PAD)
        call = (history, length, texts, count, longest, shortest, vocab)
        assert_equal(suffix.suffix_match(*call), suffix_match_reference(*call))


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype == torch.int32
        assert torch.equal(one, other)


def test_rows_without_history_have_no_match():
    history = torch.full((2, 8), PAD, dtype=torch.int32)
    length = torch.tensor([0, 8], dtype=torch.int32)
    for match in (ngram_match, ngram.ngram_match):
        drafts, matched = match(history, length, 3, 3, 1)
        assert drafts.tolist() == [[PAD] * 3] * 2
        assert matched.tolist() == [0, 0]


def test_opcheck_of_ngram_match():
    call = (*histories(3, 12, 3), 4, 3, 1)
    torch.library.opcheck(torch.ops.compilespec.ngram_match.default, call)


# --- the ring of input pairs ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 8], ids="K{}".format)
def test_windows_and_rings_equal_the_graph_code(count, dtype):
    """The kernel, the reference and the tensor code of the windowed loop; other rows untouched."""
    batch, width, rows = 4, 300, 7
    rings = torch.randn(rows, count, width).to(dtype), torch.randint(0, 99, (rows, count)).int()
    index = torch.tensor([5, 0, 3, 6])  # the last one is spare
    hidden = torch.randn(count + 1, batch, width).to(dtype).transpose(0, 1)
    ids = torch.randint(0, 99, (batch, count + 1), dtype=torch.int32)
    emitted = torch.tensor([1, count + 1, (count + 2) // 2, 1], dtype=torch.int32)
    results = []
    for compute in (ring.roll_window, roll_window_reference, roll_window, spliced):
        mine = tuple(part.clone() for part in rings)
        results.append((*compute(*mine, index, hidden, ids, emitted), *mine))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for before, after in zip(rings, results[0][2:], strict=True):
        assert torch.equal(after[[1, 2, 4]], before[[1, 2, 4]])
        assert not torch.equal(after[5], before[5])


def spliced(
    ring_hidden: Tensor, ring_ids: Tensor, index: Tensor, hidden: Tensor, ids: Tensor, num: Tensor
) -> tuple[Tensor, Tensor]:
    """What `passes/splice/draft_loops/windowed.py` emits."""
    module = importlib.import_module("compilespec.passes.splice.draft_loops.windowed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "arange_like", lambda like, end: torch.arange(end))
        window = take_window(ring_hidden, ring_ids, index, hidden, ids, num, window=ids.shape[1])
    write_ring(ring_hidden, ring_ids, index, *window)
    return window


def test_opcheck_of_roll_window():
    call = (torch.randn(4, 2, 6), torch.zeros(4, 2).int(), torch.tensor([2, 0]),
            torch.randn(2, 3, 6), torch.ones(2, 3).int(), torch.tensor([1, 3]).int())  # fmt: skip
    torch.library.opcheck(torch.ops.compilespec.roll_window.default, call)
