"""The Triton kernels on a GPU: the references' results, in a CUDA graph too.

Elsewhere they are interpreted (`test_triton_*.py`) and compiled ahead (`test_triton_aot.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compilespec import SamplingParams
from compilespec.ops.argmax_linear import argmax_linear_reference, score_linear_reference
from compilespec.ops.causal_conv import cached_conv_reference
from compilespec.ops.ngram_match import ngram_match_reference
from compilespec.ops.paged_attention import paged_attention_reference
from compilespec.ops.paged_attention.form import Form
from compilespec.ops.quantized_linear.reference import pack_nibbles, quantized_linear_reference
from compilespec.ops.recurrence import cached_recurrence_reference
from compilespec.ops.roll_window import roll_window_reference
from compilespec.ops.sample import draw_reference, note_logprobs_reference, sample_reference
from compilespec.ops.suffix_match import suffix_match_reference
from compilespec.program import PAD
from tests.support import recurrence
from tests.support.attention import Case, Pool
from tests.support.sampling import PARAMETERS, State, make_state, window

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
OPS = torch.ops.compilespec
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}

ATTENTION = [
    Case(batch=1, num_tokens=1, context=0),
    Case(num_tokens=6, context=300, num_kv_heads=2, group=4, head_dim=128, value_dim=128),
    Case(num_tokens=9, context=61, group=5, num_kv_heads=1, head_dim=80, value_dim=48),
    Case(context=290, window=100, sinks=True, group=8, head_dim=64, value_dim=64),
    Case(context=150, softcap=5.0, head_dim=256, value_dim=256, block_size=7),
    Case(batch=70, num_tokens=4, context=90, num_kv_heads=4, group=2, head_dim=96),
]


def moved(arguments: Any) -> list[Any]:
    return [a.to(DEVICE, copy=True) if isinstance(a, Tensor) else a for a in arguments]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case, dtype):
    pool = Pool(Case(**{**vars(case), "dtype": dtype}))
    tokens_BS = pool.decode()
    tokens_BS.append([None] * case.num_tokens)
    theirs = pool.arguments(tokens_BS)
    mine = moved(theirs)
    got, want = OPS.paged_attention(*mine), paged_attention_reference(*theirs)
    torch.testing.assert_close(got.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for got_cache, want_cache in zip(mine[3:5], theirs[3:5], strict=True):
        torch.testing.assert_close(got_cache.cpu(), want_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [0, 5])
def test_flash_attention_3(window, dtype):
    pytest.importorskip("flash_attn_interface")
    from compilespec.ops.paged_attention import flash

    form = Form(dtype=dtype, head_dim=128, value_dim=128, block_size=16, window=window)
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        assert flash.why_wrong(form, torch.device(DEVICE)) == ""
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_prompts(dtype):
    pool = Pool(Case(batch=5, context=150, group=4, head_dim=64, value_dim=64, dtype=dtype))
    packed: list[Any] = []
    for row in range(5):
        packed += [None, *((row, position) for position in range(11 * row, 154))]
    theirs = pool.arguments([packed])
    got = OPS.paged_attention(*moved(theirs))
    want = paged_attention_reference(*theirs)
    torch.testing.assert_close(got.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def sampling_call(vocab: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], State]:
    params = [
        SamplingParams(temperature=t, max_new_tokens=9, **fields)
        for t in (0.0, 0.3, 1.5)
        for fields in PARAMETERS.values()
    ]
    state, batch = make_state(params, vocab), len(params) + 1
    logits = (2 * torch.randn(3, batch, vocab + 3)).to(dtype).transpose(0, 1)[..., 1:-2]
    ids, drawn = window(batch, 3, vocab, 38)
    drawn[::7] = 0
    state.buffers["context_RL"][:, 9:] = 3
    return (logits, logits.argmax(-1).int(), ids, torch.randperm(batch), drawn), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [97, 20011])
def test_sample(vocab, dtype):
    """The same tokens, but for near ties: the last digits of exp and of a division differ."""
    call, state = sampling_call(vocab, dtype)
    mine, theirs = moved(state.arguments()), state.arguments()
    got = OPS.sample(*moved(call), *mine).cpu()
    want = sample_reference(*call, *theirs)
    assert int((got != want).sum()) <= 1
    assert torch.equal(mine[3].cpu(), theirs[3])


def test_draw_and_logprobs():
    vocab, batch = 20011, 12
    params = [SamplingParams(temperature=t, logprobs=n) for t in (0.0, 0.5, 2.0)
              for n in (None, 0, 5, 20)]  # fmt: skip
    state = make_state(params, vocab)
    real, whole = state.arguments()[:2]
    logits, rows = 2 * torch.randn(batch, vocab), torch.arange(batch)
    own = torch.randperm(vocab)[:9001]
    own[::7] = -1
    for ids_V, part in ((None, logits), (own, logits[:, :9001])):
        call = (part, part.argmax(-1).int(), ids_V, rows, torch.arange(batch).int(), real, whole)
        assert torch.equal(OPS.draw(*moved(call)).cpu(), draw_reference(*call))
    values, best = torch.full((13, 1, 21), 7.0), torch.full((13, 1, 20), -9, dtype=torch.int32)
    call = (logits.unsqueeze(1), logits.argmin(-1).int().unsqueeze(1), rows, whole, values, best)
    mine = moved(call)
    got, want = OPS.note_logprobs(*mine), note_logprobs_reference(*call)
    for a, b in ((got, want), (mine[4], values), (mine[5], best)):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 48, 300])
def test_head(rows, dtype):
    """Whole numbers: products are exact, and full of ties."""
    x = torch.randint(-1, 2, (rows, 200)).to(dtype)
    weight = torch.randint(-1, 2, (5003, 200)).to(dtype)
    weight[2500:5000] = weight[:2500].clone()
    ids = torch.randint(0, 5003, (rows,))
    got, want = (
        OPS.argmax_linear(*moved((x, weight, None))),
        argmax_linear_reference(x, weight, None),
    )
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    got = OPS.score_linear(*moved((x, weight, None, ids)))
    for a, b in zip(got, score_linear_reference(x, weight, None, ids), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 48, 300])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_quantized_weights(rows, bits, dtype):
    """One product with groups and zero points, for four bits packed by rows, and one in float8."""
    x = torch.randn(rows, 512, device=DEVICE).to(dtype)
    ints = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (300, 512), device=DEVICE).char()
    scale = torch.rand(300, 8, device=DEVICE) * 0.01 + 0.001
    zero = torch.randn(300, 8, device=DEVICE).to(dtype)
    want = quantized_linear_reference(x, ints, scale, None, bits, zero)
    if bits == 4:
        got = OPS.int4_linear(x, pack_nibbles(ints), scale, None, zero)
    else:
        got = OPS.quantized_linear(x, ints, scale, None, bits, zero)
        eight = torch.randn(300, 512, device=DEVICE).to(torch.float8_e4m3fn)
        call = (x, eight, scale[:, :1], None, 8)
        close(OPS.quantized_linear(*call), quantized_linear_reference(*call), dtype)
    close(got, want, dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    scale = float(want.abs().max())
    torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=TOLERANCE[dtype])


def test_ngram_and_ring():
    length = torch.randint(1, 1500, (40,), dtype=torch.int32)
    history = torch.randint(0, 6, (40, 1500), dtype=torch.int32)
    history = torch.where(torch.arange(1500) < length.unsqueeze(1), history, PAD)
    call = (history, length, 5, 4, 1)
    for got, want in zip(OPS.ngram_match(*moved(call)), ngram_match_reference(*call), strict=True):
        assert torch.equal(got.cpu(), want)
    texts = torch.where(torch.arange(900) < torch.randint(0, 900, (16, 1)),
                        torch.randint(0, 6, (16, 900), dtype=torch.int32), PAD)  # fmt: skip
    call = (history, length, texts, 5, 4, 1, 6)
    for got, want in zip(
        OPS.suffix_match(*moved(call)), suffix_match_reference(*call), strict=True
    ):
        assert torch.equal(got.cpu(), want)
    index = torch.randperm(65)[:30]
    call = (torch.randn(65, 3, 1000).bfloat16(), torch.randint(0, 99, (65, 3)).int(), index,
            torch.randn(30, 4, 1000).bfloat16(), torch.randint(0, 99, (30, 4)).int(),
            torch.randint(1, 5, (30,)).int())  # fmt: skip
    mine = moved(call)
    got, want = OPS.roll_window(*mine), roll_window_reference(*call)
    for a, b in ((got[0], want[0]), (got[1], want[1]), (mine[0], call[0]), (mine[1], call[1])):
        assert torch.equal(a.cpu(), b)


STATES = [
    recurrence.Case(heads=32, key_heads=16, key_dim=128, value_dim=128),
    recurrence.Case(heads=4, key_heads=2, key_dim=17, value_dim=80, per_key=True),
    recurrence.Case(heads=600, key_heads=1, key_dim=16, value_dim=1, per_key=True, beta=False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", STATES, ids=str)
def test_recurrent_states(case, dtype):
    """A prompt, verify steps whose drafts are rejected and replayed, and the prompt at once."""
    pool = recurrence.Pool(recurrence.Case(**{**vars(case), "dtype": dtype}))

    def on_gpu(*call: Any) -> Tensor:
        mine = moved(call)
        result = OPS.cached_recurrence(*mine).cpu()
        call[5].copy_(mine[5])
        call[6].copy_(mine[6])
        return result

    outputs, states = [], []
    for compute in (on_gpu, cached_recurrence_reference):
        steps = pool.fresh()
        first = compute(*steps.arguments([recurrence.Chunk(1, 0, 4), None]))[0, :4]
        rest, _, end = recurrence.verify(steps, 1, 4, [3, 0, 1, 2], 3, compute)
        outputs.append(torch.cat([first, rest]))
        states.append(steps.state)
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    wide = TOLERANCE[pool.state.dtype]
    torch.testing.assert_close(*states, rtol=wide, atol=wide, equal_nan=True)
    whole = on_gpu(*pool.fresh().arguments([None, recurrence.Chunk(1, 0, end)]))[0, 1:]
    assert torch.equal(whole, outputs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_convolutions(dtype):
    x, weight, bias = torch.randn(1, 40, 1000), torch.randn(1000, 4), torch.randn(1000)
    ring, position = torch.zeros(3, 6, 1000), torch.arange(40, dtype=torch.int32)
    row = torch.where(position < 30, 1, torch.where(position < 33, -1, 2)).int()
    position = torch.where(row == 2, position - 33, position)
    theirs = (*(part.to(dtype) for part in (x, weight, bias, ring)), row[None], position[None])
    mine = moved(theirs)
    got, want = OPS.cached_conv(*mine), cached_conv_reference(*theirs)
    torch.testing.assert_close(got.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mine[3].cpu(), theirs[3])


def test_a_cuda_graph_replays_what_eager_computes():
    """Captured once; replayed with other rows, positions, slots and tokens in the same buffers."""
    case = Case(batch=3, num_tokens=4, context=200, group=4, head_dim=64, value_dim=64,
                dtype=torch.float16)  # fmt: skip
    pool, vocab = Pool(case), 5003
    params = [SamplingParams(), SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
              SamplingParams(temperature=1.1, repetition_penalty=1.2)]  # fmt: skip
    state = make_state(params, vocab, max_seq_len=400)
    head = (torch.randn(vocab, case.num_kv_heads * case.group * 64) / 8).half().to(DEVICE)
    attention = moved(pool.arguments(pool.decode()))
    sampling = moved(state.arguments())
    ids, drawn = moved(window(3, 4, vocab, 200))
    rows = torch.arange(3, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        hidden = OPS.paged_attention(*attention).flatten(2)
        best, _ = OPS.argmax_linear(hidden, head, None)
        logits = hidden @ head.t()
        return hidden, best, OPS.sample(logits, best.int(), ids, rows, drawn, *sampling)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    other = pool.decode()
    other[1] = [None] * 4
    other[2] = [(2, 50), (2, 51), None, (2, 52)]
    for tokens_BS in (pool.decode(), other):
        fresh = moved(pool.arguments(tokens_BS))
        for at in (0, 1, 2, 5, 6, 7):
            attention[at].copy_(fresh[at])
        drawn += 1
        graph.replay()
        replayed = [out.clone() for out in outputs]
        for got, want in zip(replayed, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["paged_attention", "sample", "argmax_linear", "roll_window"])
def test_opcheck(name):
    if name == "paged_attention":
        arguments = moved(
            Pool(Case(batch=2, context=5)).arguments([[(0, 5), None, (0, 6), (0, 7)]])
        )
        arguments[3].nan_to_num_()
        arguments[4].nan_to_num_()
    elif name == "sample":
        call, state = sampling_call(30, torch.float32)
        arguments = moved((*call, *state.arguments()))
    elif name == "argmax_linear":
        arguments = moved((torch.randn(2, 3, 8), torch.randn(11, 8), None))
    else:
        arguments = moved((torch.randn(4, 2, 6), torch.zeros(4, 2).int(), torch.tensor([2, 0]),
                           torch.randn(2, 3, 6), torch.ones(2, 3).int(),
                           torch.tensor([1, 3]).int()))  # fmt: skip
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments))
