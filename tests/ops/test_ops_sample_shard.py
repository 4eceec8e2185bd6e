"""Tokens that ranks choose together, each by the logits of its own ids: those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec import SamplingParams
from compilespec.ops.collectives.group import ThreadGroup, acting
from compilespec.ops.sample import draw, layout, note_logprobs, sample
from compilespec.ops.sample.parts import RankPart, draw_part, draw_part_reference, lowest_of_parts
from tests.support.rank_threads import by_ranks
from tests.support.sampling import PARAMETERS, make_state, window

OPS = torch.ops.compilespec
STEPS = 3


def own(logits: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part; the last one's end is padding, which must never be chosen."""
    width = -(-logits.shape[-1] // size)
    padded = torch.nn.functional.pad(logits, (0, width * size - logits.shape[-1]), value=99.0)
    return padded[..., rank * width : (rank + 1) * width].contiguous()


def requests(temperatures: tuple[float, ...] = (0.0, 0.8)) -> list[SamplingParams]:
    """Every kind of parameters, greedy and drawn, in one batch."""
    kinds = [kind for name, kind in PARAMETERS.items() if name != "allowed_token_ids"]
    return [
        SamplingParams(temperature=warmth, seed=seed, **kind)
        for warmth in temperatures
        for seed, kind in enumerate([*kinds, {"top_k": 9, "top_p": 0.8, "min_p": 0.02}])
    ]


@pytest.mark.parametrize("size", [2, 3, 8], ids="{} ranks".format)
@pytest.mark.parametrize(("vocab", "dtype"), [(13, torch.float64), (1003, torch.float32)], ids=str)
def test_the_ranks_choose_what_one_process_chooses(vocab, dtype, size):
    """8 ranks of 13 ids: one has padding alone.  The context is written alike, too."""
    torch.manual_seed(vocab)
    params = requests()
    state = make_state(params, vocab)
    state.buffers["mask_RSW"].random_(-(2**31), 2**31)
    state.buffers["sampling_RI"][1::5, layout.FLAGS] |= layout.GUIDE
    logits = (4 * torch.randn(len(params), STEPS, vocab)).to(dtype)
    greedy, row = logits.argmax(-1).int(), torch.arange(len(params))
    ids, drawn = window(len(params), STEPS, vocab, 11)
    arguments = state.arguments()
    want = sample(logits, greedy, ids, row, drawn, *arguments)

    def chosen(rank: int) -> tuple[Tensor, Tensor]:
        mine = state.arguments()
        rest = (greedy, ids, row, drawn, *mine, vocab, size)
        return OPS.sample_shard(own(logits, rank, size), *rest), mine[3]

    for got, context in by_ranks(size, chosen):
        assert got.tolist() == want.tolist()
        assert torch.equal(context, arguments[3])


@pytest.mark.parametrize("size", [2, 5], ids="{} ranks".format)
def test_drafts_are_drawn_with_the_same_noise(size):
    torch.manual_seed(0)
    params = requests()
    real, whole, *_ = make_state(params, 201).arguments()
    logits, row = 3 * torch.randn(len(params), 201), torch.arange(len(params))
    greedy, drawn = logits.argmax(-1).int(), torch.randint(1, 40, (len(params),)).int()
    want = draw(logits, greedy, None, row, drawn, real, whole)
    for got in by_ranks(
        size,
        lambda rank: OPS.draw_shard(
            own(logits, rank, size), greedy, row, drawn, real, whole, 201, size
        ),
    ):
        assert got.tolist() == want.tolist()


def test_log_probabilities_are_those_of_all_logits():
    torch.manual_seed(0)
    params = [SamplingParams(), SamplingParams(logprobs=3), SamplingParams(logprobs=0)]
    _, whole, *_ = make_state(params, 101).arguments()
    logits, row = torch.randn(3, 2, 101), torch.arange(3)
    chosen = logits.argmax(-1).int()

    def buffers() -> tuple[Tensor, Tensor]:
        return torch.zeros(4, 2, 21), torch.zeros(4, 2, 20, dtype=torch.int32)

    want = buffers()
    given = note_logprobs(logits, chosen, row, whole, *want)

    def noted(rank: int) -> tuple[Tensor, ...]:
        mine = buffers()
        rest = (chosen, row, whole, *mine, 101, 2)
        return OPS.note_logprobs_shard(own(logits, rank, 2), *rest), *mine

    for got in by_ranks(2, noted):
        assert all(torch.equal(*pair) for pair in zip(got, (given, *want), strict=True))


def test_what_is_sent_is_small_and_nothing_for_greedy_requests():
    """Of 1003 ids: two numbers a row, and for filters a bound's share; logits never."""
    sent: list[int] = []

    class Counting(ThreadGroup):
        def gather(self, x: Tensor) -> list[Tensor]:
            sent.append(x.numel() if self.rank == 0 else 0)
            return super().gather(x)

    def sum_of(params: SamplingParams) -> int:
        state = make_state([params], 1003)
        logits, row = torch.randn(1, 1, 1003), torch.zeros(1, dtype=torch.long)
        greedy, (ids, drawn) = logits.argmax(-1).int(), window(1, 1, 1003, 11)
        sent.clear()
        group = Counting.make(1)[0]
        with acting(group):
            OPS.sample_shard(logits, greedy, ids, row, drawn, *state.arguments(), 1003, 1)
        return sum(sent)

    assert sum_of(SamplingParams()) == 0
    assert sum_of(SamplingParams(temperature=0.7, seed=1)) == 2
    assert sum_of(SamplingParams(temperature=0.7, seed=1, top_k=50)) == 2 + 1 + 50
    assert sum_of(SamplingParams(temperature=0.7, seed=1, min_p=0.1)) == 2 + 1


@pytest.mark.parametrize("first", [0, 37, 64, 1000])
def test_a_part_has_the_noise_of_its_ids(first):
    torch.manual_seed(0)
    _, whole, *_ = make_state(requests((0.9,)), 50).arguments()
    row, drawn = torch.arange(len(whole) - 1), torch.arange(len(whole) - 1).int()
    scores = torch.randn(len(row), 90, dtype=torch.float64)
    for lowest in (-torch.inf, 0.5, 9.0):
        arguments = (scores, torch.full((len(row),), lowest).double(), row, drawn, whole, first)
        (best, ids), (want, want_ids) = draw_part(*arguments), draw_part_reference(*arguments)
        assert ids.tolist() == want_ids.tolist()
        torch.testing.assert_close(best, want)


def test_masses_of_ranks_add_up_to_a_bound():
    """Equal scores are kept together; the last bucket holds all that is far from the best."""
    scores = torch.tensor([[0.0, 0.0, -1.0, -1.0, -90.0, -torch.inf]])
    state = make_state([SamplingParams(temperature=1.0, top_p=p) for p in (0.3, 0.9, 0.9999)], 6)
    real, whole, *_ = state.arguments()
    part = RankPart(0, 6, lambda x: [x])
    found = lowest_of_parts(scores.expand(3, 6), real[:3], whole[:3], part)
    assert found.tolist() == [0.0, -1.0, -1.0]


def test_operators_keep_their_promises_to_the_compiler():
    state, logits = make_state([SamplingParams(temperature=0.7)], 9), torch.randn(1, 2, 9)
    greedy, row = logits.argmax(-1).int(), torch.zeros(1, dtype=torch.long)
    ids, drawn = window(1, 2, 9, 11)
    real, whole, *rest = state.arguments()
    noted = (torch.zeros(2, 2, 21), torch.zeros(2, 2, 20, dtype=torch.int32))
    with acting(ThreadGroup.make(1)[0]):
        for op, args in (
            (OPS.sample_shard, (logits, greedy, ids, row, drawn, real, whole, *rest, 9, 1)),
            (OPS.draw_shard, (logits[:, 0], greedy[:, 0], row, drawn[:, 0], real, whole, 9, 1)),
            (OPS.note_logprobs_shard, (logits, greedy, row, whole, *noted, 9, 1)),
            (draw_part, (logits[0], torch.zeros(2), torch.zeros(2).long(), drawn[0], whole, 3)),
        ):
            torch.library.opcheck(getattr(op, "default", op), args)
