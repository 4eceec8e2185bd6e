"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compilespec.errors import PassError
from compilespec.passes.graph.nodes import find_role
from compilespec.passes.order import SPLICE_PASSES, run_passes
from compilespec.passes.splice.acceptance.strict import accept_matching, first_token
from tests.support.hand_graphs import call
from tests.support.steps import PAD, emitted_graph, started
from tests.support.untouched import check_left_alone, step


def accept_oracle(ids: list[int], logits: list[list[float]]) -> tuple[list[int], list[int], int]:
    target = [
        max(range(len(row)), key=lambda v: (row[v], -v)) for row in logits
    ]  # first index wins
    count = 1
    while count < len(ids) and ids[count] == target[count - 1]:
        count += 1
    return target, [*target[:count], *[PAD] * (len(ids) - count)], count


def accept_greedy(ids: Any, logits: Any, *, num_draft_tokens: int) -> tuple[Any, ...]:
    target = logits.argmax(-1).to(torch.int32)
    return target, *accept_matching(ids, target, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("num_draft_tokens", range(9), ids="K{}".format)
def test_acceptance_equals_a_scalar_oracle(num_draft_tokens):
    """T03.  Few distinct logits and a small vocabulary: ties and accidental matches are common."""
    gm = emitted_graph(accept_greedy, ["ids", "logits"], num_draft_tokens=num_draft_tokens)
    generator = torch.Generator().manual_seed(num_draft_tokens)
    counts, tied = set(), 0
    for vocab_size in (1, 2, 3, 11):
        for batch in (1, 2, 3, 9, 64):
            size = (batch, num_draft_tokens + 1)
            logits = torch.randint(-2, 3, (*size, vocab_size), generator=generator).float()
            ids = torch.randint(-1, vocab_size, size, generator=generator, dtype=torch.int32)
            best = logits.argmax(-1)
            copied = torch.rand(size, generator=generator) < 0.7
            copied[:, 0] = False
            ids[copied] = best.roll(1, 1)[copied].to(torch.int32)
            target, emitted, count = call(gm, ids, logits)
            assert {target.dtype, emitted.dtype, count.dtype} == {torch.int32}
            tied += int((logits == logits.amax(-1, keepdim=True)).sum(-1).gt(1).sum())
            for b in range(batch):
                want = accept_oracle(ids[b].tolist(), logits[b].tolist())
                assert (target[b].tolist(), emitted[b].tolist(), count[b].item()) == want
                counts.add(count[b].item())
    assert counts == set(range(1, num_draft_tokens + 2))
    assert tied > 10


def test_acceptance_worked_example():
    logits = nn.functional.one_hot(torch.tensor([[5, 9, 7, 8]]), 10).float()
    ids = torch.tensor([[1, 5, 6, 7]], dtype=torch.int32)
    _, emitted, count = call(
        emitted_graph(accept_greedy, ["ids", "logits"], num_draft_tokens=3), ids, logits
    )
    assert emitted.tolist() == [[5, 9, PAD, PAD]]
    assert count.tolist() == [2]


def test_first_token_pads_unfinished_prompts():
    target = torch.tensor([[1], [0], [2]], dtype=torch.int32)
    emitted, count = call(
        emitted_graph(first_token, ["target", "live"]), target, torch.tensor([True, False, True])
    )
    assert emitted.tolist() == [[1], [PAD], [2]]
    assert count.tolist() == [1, 0, 1]


def test_splice_acceptance_needs_logits(parts):
    gm, ctx = started(parts, "decode", "splice_acceptance")
    del find_role(gm, "logits").meta["role"]
    entry = next(entry for entry in SPLICE_PASSES if entry.name == "splice_acceptance")
    with pytest.raises(PassError, match="no node plays the role 'logits'"):
        run_passes(gm, ctx, (entry,), level="torch")


def test_logits_that_nobody_named_are_refused() -> None:
    gm, ctx = step("decode", "read_state")
    del find_role(gm, "logits").meta["role"]
    check_left_alone("splice_acceptance", (gm, ctx), is_refused=True)
