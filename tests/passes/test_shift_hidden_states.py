"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import dataclasses
import random

import torch

from compilespec.passes.splice.shift_hidden_states import shift_prompt
from tests.support.hand_graphs import HAND_CONFIG, call
from tests.support.models import VOCAB
from tests.support.steps import emitted_graph
from tests.support.untouched import check_left_alone, step


def test_prompt_shift_worked_example():
    """E2: [a1 | b1 b2 | c1 c2 c3], next tokens [a2, b3, c4]; a and c end here, b goes on (H-4)."""
    following = torch.tensor([-1, 12, 13, 22, 23, -1], dtype=torch.int32)  # b: its true token 13
    sampled = torch.tensor([[2], [99], [24]], dtype=torch.int32)  # b's sample means nothing
    owner = torch.tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32)
    gm = emitted_graph(shift_prompt, ["next", "target", "owner"])
    assert call(gm, following, sampled, owner).tolist() == [[2, 12, 13, 22, 23, 24]]


def test_prompt_shift_on_ragged_chunks():
    from compilespec.runtime.executor import PrefillChunk
    from compilespec.runtime.packing import pack_chunks

    rng = random.Random(0)
    gm = emitted_graph(shift_prompt, ["next", "target", "owner"])
    for _ in range(50):
        chunks, want, sampled = [], [], []
        for row in range(rng.randint(1, 5)):
            prompt = rng.choices(range(VOCAB), k=rng.randint(1, 12))
            start = rng.randrange(len(prompt))
            end = rng.randint(start + 1, len(prompt))
            token = rng.randrange(VOCAB)
            following = prompt[end] if end < len(prompt) else None
            chunks.append(
                PrefillChunk(
                    row=row, start=start, tokens=tuple(prompt[start:end]), next_token=following
                )
            )
            want += [*prompt, token][start + 1 : end + 1]
            sampled.append([token])
        packed = pack_chunks(chunks)
        batch = [
            torch.tensor(x, dtype=torch.int32)
            for x in (packed["next_T"], sampled, packed["owner_T"])
        ]
        assert call(gm, *batch).tolist() == [want]


def test_without_a_drafter_nothing_changes() -> None:
    config = dataclasses.replace(HAND_CONFIG, num_draft_tokens=0)
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    check_left_alone("shift_hidden_states", step("decode", *done, config=config))
