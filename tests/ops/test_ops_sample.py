"""sample and draw: random bits, every parameter against transformers, kernel against reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from compilespec import SamplingParams
from compilespec.ops import draw, load_kernels, sample
from compilespec.ops.sample import (
    draw_reference,
    layout,
    note_logprobs,
    note_logprobs_reference,
    philox,
    philox_reference,
    sample_reference,
)
from compilespec.ops.sample.philox import gumbel, noise_bits
from tests.support.sampling import (
    PARAMETERS,
    all_params,
    chi_square_p,
    make_state,
    transformers_scores,
    window,
)

WAYS = {"reference": sample_reference, "operator": sample}  # the latter is the kernel, where built


@pytest.fixture(autouse=True, scope="module")
def kernels() -> bool:
    return load_kernels()


# --- random bits ---

KNOWN_ANSWERS = (  # Random123's kat_vectors, philox4x32-10: counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def words(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


@pytest.mark.parametrize("compute", [philox_reference, philox], ids=["reference", "operator"])
def test_philox_gives_the_known_answers(compute):
    for counter, key, answer in KNOWN_ANSWERS:
        assert (
            compute(words(counter).unsqueeze(0), words(key))[0].tolist() == words(answer).tolist()
        )


def test_kernel_and_reference_have_the_same_bits():
    counters = torch.randint(0, 2**32, (1001, 4))
    key = torch.randint(0, 2**32, (2,))
    assert torch.equal(philox(counters, key), philox_reference(counters, key))


def test_the_bits_of_an_id_do_not_depend_on_its_neighbours():
    about = {"seed_low": 5, "seed_high": -3, "sample": 1, "position": 77, "stream": 0}
    ids = torch.randperm(5000)[:300]
    whole = noise_bits(torch.arange(5000), **about)
    assert torch.equal(noise_bits(ids, **about), whole[ids])
    assert len(set(whole.tolist())) > 4990  # 2.9 pairs of 5000 words collide once in 1000 runs
    for change in about:  # all of them matter
        other = noise_bits(torch.arange(5000), **{**about, change: about[change] + 1})
        assert int((other == whole).sum()) < 3


def test_gumbel_is_finite_and_precise_in_both_tails():
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    bits = torch.cat([torch.tensor(edges), torch.randint(0, 2**32, (20000,))])
    uniform = (bits.double() + 0.5) / 2**32
    exact = -torch.log(-torch.log(uniform))
    assert bool(torch.isfinite(gumbel(bits)).all())
    error = (gumbel(bits).double() - exact).abs()
    assert float((error / exact.abs().clamp(min=1)).max()) < 4e-7  # 3 ulp; near 0, of 1
    assert gumbel(bits).max() > 22  # tokens of probability 1e-9 can be drawn


# --- rows of state ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids="T{}".format)
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_equals_transformers(name, temperature, dtype, way):
    """The token of every row is the best of transformers' scores plus the reference's noise."""
    vocab, batch, steps, num_prompt = 13, 5, 3, 9
    params = SamplingParams(temperature=temperature, max_new_tokens=9, **PARAMETERS[name])
    moved = cut = 0
    for start in (num_prompt, num_prompt + 1, num_prompt + 5):
        state = make_state([params] * batch, vocab, num_prompt=num_prompt)
        logits = 3 * torch.randn(batch, steps, vocab, dtype=dtype)
        ids, drawn = window(batch, steps, vocab, start)
        before = torch.randint(0, vocab, (batch, start - num_prompt), dtype=torch.int32)
        arguments = state.arguments()
        arguments[3][:batch, num_prompt:start] = before  # what earlier steps wrote
        greedy = logits.argmax(-1).int()
        chosen = WAYS[way](logits, greedy, ids, torch.arange(batch), drawn, *arguments)
        for b, s in itertools.product(range(batch), range(steps)):
            context = [*state.prompts[b], *before[b].tolist(), *ids[b, : s + 1].tolist()]
            scores = transformers_scores(logits[b, s], context, num_prompt, params)
            cut += int(scores.isinf().sum())
            if temperature:
                position = int(drawn[b, s])
                assert position == len(context)
                seed = {"seed_low": 1000 + b, "seed_high": 0, "sample": 0, "stream": 0}
                scores = scores + gumbel(noise_bits(torch.arange(vocab), position=position, **seed))
            assert int(chosen[b, s]) == int(scores.argmax())
            moved += int(chosen[b, s] != greedy[b, s])
    filters = ("nothing", "top_k", "top_k_of_all", "top_p", "min_p")
    assert moved or (temperature == 0 and name in (*filters, "min_new_tokens"))
    cutting = {"allowed_token_ids", "bad_token_ids", "min_new_tokens", "all"}
    cutting |= {"top_k", "top_p", "min_p"} if temperature else set()
    assert (cut > 0) == (name in cutting)


# --- kernel against reference ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("vocab", [17, 64, 97, 1031])
def test_kernel_equals_reference(vocab, dtype):
    """Mixed rows, strides, a padded row, positions outside the context."""
    params = [p for t in (0.0, 0.3, 1.5) for p in all_params(t)]
    state = make_state(params, vocab)
    batch, steps = len(params) + 1, 3
    logits = (2 * torch.randn(steps, batch, vocab + 3)).to(dtype).transpose(0, 1)[..., 1:-2]
    ids, drawn = window(batch, steps, vocab, 38)  # the last rows draw at and past max_seq_len
    drawn[::7] = 0
    call = (logits, logits.argmax(-1).int(), ids, torch.randperm(batch), drawn)
    mine, theirs = state.arguments(), state.arguments()
    for one in (mine, theirs):
        one[3][:, 9:] = one[3][:, 9:] * 0 + 3
    got, want = sample(*call, *mine), sample_reference(*call, *theirs)
    assert got.dtype == torch.int32
    assert int((got != want).sum()) == 0
    assert torch.equal(mine[3], theirs[3])
    assert not torch.equal(got, call[1])


def test_rows_are_independent_of_batch_window_and_threads():
    vocab, steps = 313, 5
    params = all_params(0.9)
    state, batch = make_state(params, vocab), len(params)
    logits = 2 * torch.randn(batch, steps, vocab)
    ids, drawn = window(batch, steps, vocab, 9)
    greedy, rows = logits.argmax(-1).int(), torch.arange(batch)
    whole = sample(logits, greedy, ids, rows, drawn, *state.arguments())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        again = sample(logits, greedy, ids, rows, drawn, *state.arguments())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, again)
    for b in range(batch):
        alone = state.arguments()  # one token at a time, as plain decoding does
        for s in range(steps):
            one = sample(
                logits[b : b + 1, s : s + 1], greedy[b : b + 1, s : s + 1],
                ids[b : b + 1, s : s + 1], rows[b : b + 1], drawn[b : b + 1, s : s + 1], *alone,
            )  # fmt: skip
            assert int(one) == int(whole[b, s])


def test_plain_rows_are_the_argmax_and_write_nothing():
    vocab = 50
    params = [SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(top_k=3, seed=4)]
    state = make_state(params, vocab)
    logits = torch.randint(-2, 3, (4, 3, vocab)).float()  # ties
    logits[1, 1, 30] = math.nan
    ids, drawn = window(4, 3, vocab, 9)
    greedy, arguments = logits.argmax(-1).int(), state.arguments()
    for compute in WAYS.values():
        chosen = compute(logits, greedy, ids, torch.tensor([0, 1, 2, 3]), drawn, *arguments)
        assert torch.equal(chosen, greedy)
        assert chosen.data_ptr() != greedy.data_ptr()
    assert torch.equal(arguments[3], state.buffers["context_RL"])


@pytest.mark.parametrize("way", WAYS)
def test_hopeless_logits_give_some_id(way):
    """NaN, infinities, nothing left: no crash, no id outside the vocabulary."""
    vocab, params = 70, all_params(1.0)
    state, batch = make_state(params, vocab), len(params)
    for value in (math.nan, math.inf, -math.inf):
        for whole in (True, False):
            logits = torch.randn(batch, 2, vocab)
            logits[..., :: 1 if whole else 3] = value
            ids, drawn = window(batch, 2, vocab, 9)
            call = (logits, logits.argmax(-1).int(), ids, torch.arange(batch), drawn)
            chosen = WAYS[way](*call, *state.arguments())
            assert 0 <= int(chosen.min()) <= int(chosen.max()) < vocab


def test_ties_with_the_last_kept_token_are_kept():
    vocab = 8
    logits = torch.tensor([2.0, 1, 1, 1, 0, 0, 0, 0]).expand(1, 400, vocab).contiguous()
    ids, drawn = window(1, 400, vocab, 9)
    for params in (
        SamplingParams(temperature=5.0, top_k=2),
        SamplingParams(temperature=5.0, top_p=0.2),
    ):
        state = make_state([params], vocab)
        chosen = {way: compute(logits, logits.argmax(-1).int(), ids, torch.tensor([0]), drawn,
                               *state.arguments()) for way, compute in WAYS.items()}  # fmt: skip
        assert torch.equal(chosen["reference"], chosen["operator"])
        assert set(chosen["operator"].flatten().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [1, 2, 50, 256, 257, 1500])
def test_top_k_of_a_large_vocabulary(top_k):
    """Ties at the last place, and rows that have fewer finite logits than k."""
    vocab, steps = 2051, 40
    logits = torch.randint(-60, 60, (2, steps, vocab)) / 8
    logits[1, :, 30 : vocab - 15] = -torch.inf
    ids, drawn = window(2, steps, vocab, 9)
    state = make_state([SamplingParams(temperature=9.0, top_k=top_k)] * 2, vocab)
    chosen = {way: compute(logits, logits.argmax(-1).int(), ids, torch.arange(2), drawn,
                           *state.arguments()) for way, compute in WAYS.items()}  # fmt: skip
    assert torch.equal(chosen["reference"], chosen["operator"])
    assert top_k == 1 or len(set(chosen["operator"][0].tolist())) > 1


# --- distribution ---


@pytest.mark.parametrize("axis", ["positions", "seeds", "samples"])
def test_draws_follow_the_softmax(axis):
    """Chi-square over 60,000 draws.  Seeded, so it cannot flake; drawn anew it would fail once in
    10,000 runs.  Draws at another temperature, and repeated noise, fail it.
    """
    vocab, count = 13, 60_000
    logits_V = 1.5 * torch.randn(vocab)
    real, whole = torch.zeros(count, layout.NUM_FLOATS), torch.zeros(count, layout.NUM_INTS).int()
    real[:, [layout.TOP_P, layout.REPETITION]] = 1
    real[:, layout.TEMPERATURE] = 0.8
    drawn = torch.full((count, 1), 5, dtype=torch.int32)
    varied = torch.arange(count, dtype=torch.int32)
    if axis == "positions":
        drawn[:, 0] = varied
    else:
        whole[:, layout.SEED_LOW if axis == "seeds" else layout.SAMPLE] = varied
    no_words = torch.zeros(count, 1, 1, dtype=torch.int32)
    unused = torch.zeros(count, vocab), torch.zeros(count, 1, dtype=torch.int32), no_words
    logits = logits_V.expand(count, 1, vocab).contiguous()
    greedy, rows = logits.argmax(-1).int(), torch.arange(count)
    chosen = sample(logits, greedy, None, rows, drawn, real, whole, *unused).flatten()
    counts_V = torch.bincount(chosen, minlength=vocab)
    assert chi_square_p(counts_V, (logits_V / 0.8).softmax(-1)) > 1e-4
    assert chi_square_p(counts_V, (logits_V / 0.85).softmax(-1)) < 1e-9
    lag = chosen[1:] * vocab + chosen[:-1]  # neighbours are independent
    pair = (logits_V / 0.8).softmax(-1)
    assert (
        chi_square_p(torch.bincount(lag, minlength=vocab**2), torch.outer(pair, pair).flatten())
        > 1e-4
    )


# --- drafts ---


@pytest.mark.parametrize("compute", [draw_reference, draw], ids=["reference", "operator"])
@pytest.mark.parametrize("vocab", [40, 313])
def test_a_draft_of_the_same_logits_is_the_same_token(compute, vocab):
    """Also over another vocabulary, in any order: the target's other ids cannot be drawn."""
    params = [SamplingParams(temperature=t) for t in (0.0, 0.3, 1.0, 4.0)] * 5
    state, batch = make_state(params, vocab), len(params)
    real, whole, *others = state.arguments()
    ids_V = torch.randperm(vocab)[: vocab // 2]
    logits = 2 * torch.randn(batch, vocab)
    position, rows = torch.arange(batch, dtype=torch.int32) + 30, torch.arange(batch)
    for own in (None, ids_V):
        full = logits
        if own is not None:
            full = torch.full_like(logits, -math.inf)
            full[:, own] = logits[:, own]
        wanted = sample_reference(
            full.unsqueeze(1), full.argmax(-1).int().unsqueeze(1), None, rows,
            position.unsqueeze(1), real, whole, *others,
        ).squeeze(1)  # fmt: skip
        mine = full if own is None else logits[:, own]
        greedy = full.argmax(-1).int()
        drafts = compute(mine, greedy, own, rows, position, real, whole)
        assert drafts.dtype == torch.int32
        assert torch.equal(drafts, wanted)
        assert not torch.equal(drafts, greedy)


def test_draft_ids_below_zero_are_never_drawn():
    state = make_state([SamplingParams(temperature=3.0)], 20)
    ids_V = torch.arange(20)
    ids_V[::2] = -1
    rows = torch.zeros(300, dtype=torch.int64)
    call = (torch.randn(300, 20), torch.ones(300, dtype=torch.int32), ids_V, rows,
            torch.arange(300, dtype=torch.int32), *state.arguments()[:2])  # fmt: skip
    assert set(draw(*call).tolist()) == set(range(1, 20, 2))
    assert torch.equal(draw(*call), draw_reference(*call))


# --- log-probabilities ---


@pytest.mark.parametrize("way", ["reference", "operator"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_logprobs_equal_log_softmax(way, dtype):
    """Of rows that ask; float32 values within 1e-6 of float64's, ties by id, other rows as is."""
    compute = {"reference": note_logprobs_reference, "operator": note_logprobs}[way]
    vocab, batch, steps, most = 11, 4, 3, layout.MAX_LOGPROBS
    asked = (None, 0, 4, most)  # the last one asks for more than there are
    state = make_state([SamplingParams(logprobs=count) for count in asked], vocab)
    values = torch.full((batch + 1, steps, most + 1), 7.0)
    ids = torch.full((batch + 1, steps, most), -9, dtype=torch.int32)
    logits = (3 * torch.randn(batch, steps, vocab)).to(dtype)
    logits[3, 0, 2:6] = logits[3, 0].max() + 1
    chosen = torch.randint(0, vocab, (batch, steps), dtype=torch.int32)
    rows = torch.tensor([2, 0, 3, 1])
    own = compute(logits, chosen, rows, state.buffers["sampling_RI"], values, ids)
    for b, row in enumerate(rows.tolist()):
        wanted = logits[b].double().log_softmax(-1)
        count = asked[row]
        if count is None:
            assert bool((values[row] == 7).all())
            assert not own[b].any()
            continue
        mine = wanted.gather(1, chosen[b].long().unsqueeze(1)).squeeze(1)
        assert torch.allclose(values[row, :, 0].double(), mine, atol=1e-6, rtol=1e-6)
        assert torch.equal(own[b], values[row, :, 0])
        count = min(count, vocab)
        best = wanted.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(ids[row, :, :count].long(), best.indices[:, :count])
        got = values[row, :, 1 : count + 1].double()
        assert torch.allclose(got, best.values[:, :count], atol=1e-6, rtol=1e-6)
        assert bool((ids[row, :, count:] == -9).all())
    assert bool((values[batch] == 7).all())


# --- guides ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [31, 32, 97, 1031])
def test_masks_of_guided_rows(vocab, dtype):
    """Each row of the window has its own; kernel and reference agree with a bias of -inf."""
    steps = 3
    plain = [p for t in (0.0, 0.9) for p in all_params(t)]
    batch = len(plain)
    state = make_state(plain, vocab)
    logits = (2 * torch.randn(batch, steps, vocab)).to(dtype)
    allowed = torch.rand(batch + 1, steps, vocab) < 0.4
    allowed[..., 20] = True
    ids, drawn = window(batch, steps, vocab, 12)
    rows = torch.randperm(batch)
    call = (logits, logits.argmax(-1).int(), ids, rows, drawn)
    banned = logits.masked_fill(~allowed[rows], -math.inf)
    before = (banned, banned.argmax(-1).int(), *call[2:])
    for one in state.buffers["context_RL"][:, 9:]:
        one.fill_(3)
    wanted = sample_reference(*before, *state.arguments())
    state.buffers["sampling_RI"][:, layout.FLAGS] |= layout.GUIDE
    packed = torch.zeros(batch + 1, steps, -(-vocab // 32) * 32, dtype=torch.int64)
    packed[..., :vocab] = allowed.long()
    words = (packed.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    state.buffers["mask_RSW"] = words.int()  # wraps
    for compute in WAYS.values():
        chosen = compute(*call, *state.arguments())
        assert bool(allowed[rows].gather(-1, chosen.long().unsqueeze(-1)).all())
        assert torch.equal(chosen, wanted)


# --- registration ---


def test_opcheck():
    state = make_state(all_params(1.0), 30)
    batch = len(PARAMETERS)
    logits, (ids, drawn) = torch.randn(batch, 2, 30), window(batch, 2, 30, 9)
    rows, greedy = torch.arange(batch), logits.argmax(-1).int()
    ops = torch.ops.compilespec
    torch.library.opcheck(
        ops.sample.default, (logits, greedy, ids, rows, drawn, *state.arguments())
    )
    one = (logits[:, 0], greedy[:, 0], None, rows, drawn[:, 0], *state.arguments()[:2])
    torch.library.opcheck(ops.draw.default, one)
    values, best = torch.zeros(batch + 1, 2, 21), torch.zeros(batch + 1, 2, 20).int()
    torch.library.opcheck(
        ops.note_logprobs.default,
        (logits, greedy, rows, state.arguments()[1], values, best),
    )
    torch.library.opcheck(ops.philox.default, (torch.zeros(3, 4).long(), torch.zeros(2).long()))
