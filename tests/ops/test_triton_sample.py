"""sample, draw and note_logprobs in Triton, interpreted: the reference's bits and tokens."""

from __future__ import annotations

import math

import pytest
import torch

from compilespec import SamplingParams
from compilespec.ops.sample import draw_reference, layout, note_logprobs_reference, sample_reference
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.ops.sample.reference import lowest_kept
from tests.support.sampling import PARAMETERS, make_state, window

pytest.importorskip("tests.support.triton_interpreter")
pytestmark = pytest.mark.interp
kernel = pytest.importorskip("compilespec.ops.sample.kernel")
noise = pytest.importorskip("compilespec.ops.sample.kernels.noise")
filters = pytest.importorskip("compilespec.ops.sample.kernels.filters")
scores = pytest.importorskip("compilespec.ops.sample.kernels.scores")
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def noise_kernel(
    ids_ptr, words_ptr, bits_ptr, gumbel_ptr, spread_ptr, position, BLOCK: tl.constexpr
):
    counter = tl.arange(0, BLOCK)
    words = noise.philox_words(counter, position, words_ptr)
    for k in tl.static_range(4):
        ids = (((counter >> 4) << 6) | (counter & 15)) + 16 * k
        tl.store(bits_ptr + ids, words[k].to(tl.int64))
        tl.store(gumbel_ptr + ids, noise.gumbel(words[k]))
    for k in tl.static_range(4):
        ids = tl.load(ids_ptr + k * BLOCK + counter)
        tl.store(spread_ptr + k * BLOCK + counter, noise.noise_of(ids, position, words_ptr))


def test_noise_has_the_reference_bits_and_values():
    words = torch.zeros(layout.NUM_INTS, dtype=torch.int32)
    words[layout.SEED_LOW], words[layout.SEED_HIGH], words[layout.SAMPLE] = -5, 1 << 30, 3
    ids = torch.randperm(256, dtype=torch.int32)
    bits = torch.zeros(256, dtype=torch.int64)
    values, spread = torch.zeros(256), torch.zeros(256)
    noise_kernel[(1,)](ids, words, bits, values, spread, 2**31 - 7, BLOCK=64)
    want = noise_bits(torch.arange(256), seed_low=-5, seed_high=1 << 30, sample=3,
                      position=2**31 - 7, stream=layout.STREAM_DRAW)  # fmt: skip
    assert torch.equal(bits & 0xFFFFFFFF, want)
    exact = -torch.log(-torch.log((want.double() + 0.5) / 2**32))
    for got in (values, gumbel(want)):
        assert float(((got.double() - exact) / exact.abs().clamp(min=1)).abs().max()) < 4e-7
    assert torch.equal(spread, values[ids.long()])


@triton.jit
def gumbel_kernel(bits_ptr, value_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(value_ptr + at, noise.gumbel(tl.load(bits_ptr + at).to(tl.uint32)))


def test_gumbel_is_precise_in_both_tails():
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    bits = torch.cat([torch.tensor(edges), torch.randint(0, 2**32, (4096 - len(edges),))])
    got = torch.zeros(4096)
    gumbel_kernel[(1,)](bits, got, BLOCK=4096)
    exact = -torch.log(-torch.log((bits.double() + 0.5) / 2**32))
    assert bool(got.isfinite().all())
    assert float(((got.double() - exact) / exact.abs().clamp(min=1)).abs().max()) < 4e-7


def both(call: tuple, state: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of kernel and reference; the context that they leave behind is the same."""
    mine, theirs = state.arguments(), state.arguments()
    got, want = kernel.sample(*call, *mine), sample_reference(*call, *theirs)
    assert torch.equal(mine[3], theirs[3])
    assert got.dtype == torch.int32
    return got, want


SOME = ("all", "repetition_penalty", "top_p")


@pytest.mark.parametrize(
    ("vocab", "dtype", "names"),
    [
        (97, torch.float32, SOME),
        pytest.param(17, torch.float32, tuple(PARAMETERS), marks=pytest.mark.slow),
        pytest.param(64, torch.bfloat16, tuple(PARAMETERS), marks=pytest.mark.slow),
        pytest.param(97, torch.float64, tuple(PARAMETERS), marks=pytest.mark.slow),
        pytest.param(1031, torch.float32, tuple(PARAMETERS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_parameter_equals_the_reference(vocab, dtype, names):
    """Mixed rows, strides, a padded row, positions outside the context."""
    params = [
        SamplingParams(temperature=t, max_new_tokens=9, **PARAMETERS[name])
        for t in (0.0, 0.8)
        for name in names
    ]
    state = make_state(params, vocab)
    batch, steps = len(params) + 1, 2
    logits = (2 * torch.randn(steps, batch, vocab + 3)).to(dtype).transpose(0, 1)[..., 1:-2]
    ids, drawn = window(batch, steps, vocab, 39)  # the last rows draw past max_seq_len
    drawn[::7] = 0
    state.buffers["context_RL"][:, 9:] = 3
    call = (logits, logits.argmax(-1).int(), ids, torch.arange(batch).flip(0), drawn)
    got, want = both(call, state)
    assert int((got != want).sum()) == 0
    assert not torch.equal(got, call[1])


@triton.jit
def lowest_kernel(
    requests, window, search, lowest_ptr,
    STEPS: tl.constexpr, SPANS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = scores.row_of(requests, window, index)
    lowest = filters.lowest_kept(search, index, row, STEPS, SPANS, WIDE, KEY, BITS)
    tl.store(lowest_ptr + index, lowest)


def thresholds(logits: torch.Tensor, state: object) -> torch.Tensor:
    """Of one row a request: the lowest score that its filters keep."""
    batch, _, vocab = logits.shape
    real, whole, bias, context, mask = state.arguments()
    drawn, wide = torch.full((batch, 1), 5, dtype=torch.int32), kernel.wide_dtype(logits.dtype)
    counts = torch.full((batch, vocab), 99, dtype=torch.int32)
    requests = kernel.Requests(torch.arange(batch), drawn, real, whole)
    window = kernel.Window(logits, bias, context, counts, mask, 1, vocab, context.shape[1],
                           *mask.shape[1:], *logits.stride()[:2])  # fmt: skip
    search, sizes = kernel.search_lowest(requests, window, drawn, batch, has_ids=False)
    lowest = torch.full((batch,), math.nan, dtype=wide)
    sizes.pop("enable_fp_fusion")
    lowest_kernel[(batch,)](requests, window, search, lowest, **sizes)
    return lowest


FILTERS = [
    {"top_k": 1}, {"top_k": 40}, {"top_k": 96}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.01},
    {"top_p": 0.999}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}, {"top_k": 3, "top_p": 0.999},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.02}, {},
]  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "dtype", "turns"),
    [
        (300, torch.float32, 2),  # of the logits' kinds against the filters
        (97, torch.float64, 1),
        pytest.param(97, torch.float32, 11, marks=pytest.mark.slow),
        pytest.param(700, torch.bfloat16, 11, marks=pytest.mark.slow),
        pytest.param(301, torch.float64, 11, marks=pytest.mark.slow),
        pytest.param(5003, torch.float32, 11, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_thresholds_have_the_reference_bits(vocab, dtype, turns, monkeypatch):
    """Every filter over logits of all sizes and signs, ties, forbidden ids, and what is no number;
    rows in several spans of several blocks; also for rows whose tables others have used.
    """
    monkeypatch.setattr(kernel, "_SEARCH_SPAN", 256)
    monkeypatch.setattr(kernel, "_BLOCK", 128)
    params = [SamplingParams(temperature=0.7, **chosen) for chosen in FILTERS]
    state = make_state(params, vocab)
    real, whole = state.arguments()[:2]
    torch.manual_seed(0)
    logits = torch.randn(len(FILTERS), 1, vocab, dtype=torch.float64)
    some = torch.rand(logits.shape) < 0.4
    kinds = (
        3 * logits, 1e-3 * logits, 100 * logits, logits - 40, 30 + logits, logits.round(),
        torch.zeros_like(logits), logits.masked_fill(some, -math.inf), logits * 1e-30,
        torch.full_like(logits, -math.inf), logits.masked_fill(some, math.inf),
    )  # fmt: skip
    for turn in range(turns):
        chosen_kinds = [kinds[(b + turn) % len(kinds)][b] for b in range(len(FILTERS))]
        rows = torch.stack(chosen_kinds).to(dtype)
        got = thresholds(rows, state)
        for b, (row, chosen) in enumerate(zip(rows[:, 0], FILTERS, strict=True)):
            scores_V = row.to(got.dtype) / real[b, layout.TEMPERATURE].to(got.dtype)
            want = lowest_kept(scores_V, real[b], whole[b].tolist())
            assert got[b].tolist() == want.tolist(), chosen


def test_large_vocabularies_are_cut_into_blocks_and_spans(monkeypatch):
    monkeypatch.setattr(kernel, "_BLOCK", 1024)
    monkeypatch.setattr(kernel, "_SPAN", 1024)
    monkeypatch.setattr(kernel, "_SEARCH_SPAN", 1024)
    params = [SamplingParams(temperature=1.0, top_k=900, top_p=0.99),
              SamplingParams(temperature=0.9, repetition_penalty=1.4)]  # fmt: skip
    vocab = 2100
    state = make_state(params, vocab)
    logits = torch.randn(len(params), 1, vocab)
    ids, drawn = window(len(params), 1, vocab, 20)
    state.buffers["context_RL"][:, 9:] = 1500
    call = (logits, logits.argmax(-1).int(), ids, torch.arange(len(params)), drawn)
    got, want = both(call, state)
    assert torch.equal(got, want)


def test_prompts_without_fed_tokens():
    params = [SamplingParams(temperature=t, presence_penalty=1.5) for t in (0.0, 0.8)]
    state, batch = make_state(params, 50), len(params)
    logits = torch.randn(batch, 1, 50)
    drawn = torch.full((batch, 1), 9, dtype=torch.int32)
    call = (logits, logits.argmax(-1).int(), None, torch.arange(batch), drawn)
    got, want = both(call, state)
    assert torch.equal(got, want)


def test_guided_rows():
    params = [SamplingParams(temperature=t) for t in (0.0, 0.7, 0.0)]
    vocab = 97
    state = make_state(params, vocab)
    state.buffers["sampling_RI"][:2, layout.FLAGS] |= layout.GUIDE
    mask = torch.randint(-(2**31), 2**31, state.buffers["mask_RSW"].shape)
    state.buffers["mask_RSW"].copy_(mask.int())
    logits = torch.randn(3, 4, vocab)
    ids, drawn = window(3, 4, vocab, 9)
    call = (logits, logits.argmax(-1).int(), ids, torch.arange(3), drawn)
    got, want = both(call, state)
    assert torch.equal(got, want)
    assert int((got[:2] != call[1][:2]).sum()) > 2


def test_plain_rows_are_greedy_and_nothing_is_written():
    vocab = 50
    params = [SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(top_k=3, seed=4)]
    state = make_state(params, vocab)
    logits = torch.randint(-2, 3, (4, 3, vocab)).float()
    logits[1, 1, 30] = math.nan
    ids, drawn = window(4, 3, vocab, 9)
    greedy, arguments = logits.argmax(-1).int(), state.arguments()
    chosen = kernel.sample(logits, greedy, ids, torch.tensor([0, 1, 2, 3]), drawn, *arguments)
    assert torch.equal(chosen, greedy)
    assert chosen.data_ptr() != greedy.data_ptr()
    assert torch.equal(arguments[3], state.buffers["context_RL"])


def test_hopeless_logits_give_some_id():
    vocab, params = 70, [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=2.0)]
    state, batch = make_state(params, vocab), len(params)
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.randn(batch, 1, vocab)
        logits[..., :: 3 if value == math.inf else 1] = value
        ids, drawn = window(batch, 1, vocab, 9)
        call = (logits, logits.argmax(-1).int(), ids, torch.arange(batch), drawn)
        chosen = kernel.sample(*call, *state.arguments())
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < vocab


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([2.0, 1, 1, 1, 0, 0, 0, 0]).expand(1, 4, 8).contiguous()
    ids, drawn = window(1, 4, 8, 9)
    for filters in ({"top_k": 2}, {"top_p": 0.2}):
        state = make_state([SamplingParams(temperature=5.0, **filters)], 8)
        call = (logits, logits.argmax(-1).int(), ids, torch.tensor([0]), drawn)
        got, want = both(call, state)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(313, torch.bfloat16), (40, torch.float64), (290, torch.float32)],
    ids=str,
)
def test_drafts_equal_the_reference(vocab, dtype, monkeypatch):
    """With and without a map of ids, with ids that are none, over more than one span."""
    monkeypatch.setattr(kernel, "_SPAN", 256)
    monkeypatch.setattr(kernel, "_LANES", 64)
    params = [SamplingParams(temperature=t) for t in (0.0, 0.3, 4.0)]
    state, batch = make_state(params, vocab), len(params)
    own = torch.randperm(vocab)[: vocab // 2 + 1]
    own[::5] = -1
    for ids_V in (None, own):
        width = vocab if ids_V is None else len(own)
        logits = (2 * torch.randn(batch, width + 2)).to(dtype)[:, :width]
        greedy = torch.full((batch,), 7, dtype=torch.int32)
        call = (logits, greedy, ids_V, torch.arange(batch),
                torch.arange(batch, dtype=torch.int32) + 30, *state.arguments()[:2])  # fmt: skip
        got = kernel.draw(*call)
        assert got.dtype == torch.int32
        assert torch.equal(got, draw_reference(*call))
        assert int(got[0]) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_equal_the_reference(dtype, monkeypatch):
    """Rows that ask; float32 values within 1e-6 of float64's, ties by id, other rows as is."""
    monkeypatch.setattr(kernel, "_BLOCK", 16)
    vocab, batch, steps, most = 37, 4, 2, layout.MAX_LOGPROBS
    state = make_state([SamplingParams(logprobs=count) for count in (None, 0, 4, most)], vocab)
    logits = (3 * torch.randn(batch, steps, vocab)).to(dtype)
    logits[3, 0, 2:36:3] = logits[3, 0].max() + 1
    chosen = torch.randint(0, vocab, (batch, steps), dtype=torch.int32)
    rows, results = torch.tensor([2, 0, 3, 1]), []
    for compute in (kernel.note_logprobs, note_logprobs_reference):
        values = torch.full((batch + 1, steps + 1, most + 1), 7.0)
        ids = torch.full((batch + 1, steps + 1, most), -9, dtype=torch.int32)
        own = compute(logits, chosen, rows, state.buffers["sampling_RI"], values, ids)
        results.append((own, values, ids))
    got, want = results
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[2], want[2])


def test_empty_batches():
    state = make_state([SamplingParams()], 20)
    none = torch.zeros(0, dtype=torch.int64)
    logits, greedy = torch.zeros(0, 2, 20), torch.zeros(0, 2, dtype=torch.int32)
    real, whole, *rest = state.arguments()
    assert kernel.sample(logits, greedy, greedy, none, greedy, real, whole, *rest).shape == (0, 2)
    draft = kernel.draw(logits[:, 0], greedy[:, 0], None, none, greedy[:, 0], real, whole)
    assert draft.shape == (0,)
