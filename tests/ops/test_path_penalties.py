"""Penalties along trees: every row has what `sample` would give it at the end of a chain."""

from __future__ import annotations

import pytest
import torch

from compilespec import SamplingParams
from compilespec.ops.sample import layout
from compilespec.ops.sample.path_penalties import penalise_paths
from compilespec.ops.sample.reference import process
from tests.support.sampling import make_state
from tests.support.trees import paths_of

VOCAB, NUM_PROMPT, START = 13, 9, 11
PENALTIES = (
    {"repetition_penalty": 1.3},
    {},
    {"frequency_penalty": 0.4, "presence_penalty": -0.7},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.5},
)
PARENTS = [0, 0, 0, 1, 1, 2, 4, 6]


def given(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits, ids, paths, rows, starts and the state; few ids, so that they come again."""
    batch, count = len(PENALTIES), len(PARENTS)
    params = [SamplingParams(**one) for one in PENALTIES]
    real, whole, _, context, _ = make_state(params, VOCAB, num_prompt=NUM_PROMPT).arguments()
    context[:, NUM_PROMPT:] = torch.randint(0, VOCAB, context[:, NUM_PROMPT:].shape)
    ways = paths_of([-1, *PARENTS[1:]])
    path = torch.tensor([[[*way, *[-1] * (5 - len(way))] for way in ways]] * batch).int()
    logits = (3 * torch.randn(batch, count, VOCAB)).to(dtype)
    ids = torch.randint(0, VOCAB, (batch, count)).int()
    start = torch.tensor([START, START, START + 2, NUM_PROMPT], dtype=torch.int32)
    return logits, ids, path, torch.arange(batch).flip(0), start, real, whole, context


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_row_is_penalised_by_its_path(dtype):
    logits, ids, path, rows, start, real, whole, context = call = given(dtype)
    got = penalise_paths(*call)
    for b, row in enumerate(rows.tolist()):
        for s in range(len(PARENTS)):
            way = [node for node in path[b, s].tolist() if node >= 0]
            seen = torch.cat([context[row, : start[b]], ids[b, way]])
            wanted = process(
                logits[b, s], real[row], whole[row].tolist(), torch.zeros(VOCAB), seen, len(seen)
            )
            assert torch.equal(got[b, s], wanted)
    changed = (got != logits).flatten(1).any(1)
    assert changed.tolist() == [bool(PENALTIES[row]) for row in rows.tolist()]


def test_without_penalties_the_logits_are_copied():
    logits, *rest = given(torch.float32)
    rest[-2][:, layout.FLAGS] = 0
    got = penalise_paths(logits, *rest)
    assert torch.equal(got, logits)
    assert got.data_ptr() != logits.data_ptr()


def test_opcheck():
    torch.library.opcheck(torch.ops.compilespec.penalise_paths.default, given(torch.float32))
