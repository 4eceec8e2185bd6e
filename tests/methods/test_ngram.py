"""spec="ngram": the matcher against plain Python, and in traffic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compilespec
from compilespec.errors import InvalidOption
from compilespec.methods.ngram import METHOD, NgramDrafter
from tests.support.direct_methods import MAX_SEQ_LEN, SIZES, check_traffic
from tests.support.models import ask_all, tiny_target


def lookup(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """The drafts, by the definition: windows from long to short, places from new to old."""
    for size in range(longest, shortest - 1, -1):
        newest = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(newest) == size and tokens[end - size : end] == newest:
                found = tokens[end : end + count]
                return found + [-1] * (count - len(found))
    return [-1] * count


@given(
    histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1),
    count=st.integers(1, 5),
    longest=st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None, max_examples=300)
def test_matcher_against_plain_python(histories, count, longest, data):
    shortest = data.draw(st.integers(1, longest))
    drafter = NgramDrafter(max_ngram=longest, min_ngram=shortest)
    drafter.num_draft_tokens = count
    rows = [tokens + [-1] * (20 - len(tokens)) for tokens in histories]
    lengths = [len(tokens) for tokens in histories]
    drafts, _ = drafter.draft(
        torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    )
    assert drafts.tolist() == [lookup(tokens, count, longest, shortest) for tokens in histories]


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 1), ("llama", 5), ("qwen3_moe", 3), ("mistral", 3)]
)
def test_tokens_and_drafts_in_traffic(family, count):
    model = tiny_target(family, num_layers=2)
    asks = ask_all(model, SIZES)
    with compilespec.compile(
        model, spec="NGRAM", num_draft_tokens=count, max_ngram=2, backend="eager",
        max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16, buckets=[1, 2, 5],
    ) as engine:  # fmt: skip
        for request, ask in zip(check_traffic(engine, asks), asks, strict=True):
            assert request.emitted_per_step == expected_steps(ask, count)


def expected_steps(ask, count):
    """Tokens each step gives when it drafts by `lookup`."""
    whole, length, steps = [*ask.prompt, *ask.tokens], len(ask.prompt) + 1, []
    while length < len(whole):
        num = 1
        for draft, right in zip(lookup(whole[:length], count, 2, 1), whole[length:], strict=False):
            if draft != right:
                break
            num += 1
        steps.append(min(num, len(whole) - length))
        length += num
    return steps


@pytest.mark.parametrize("options", [{"max_ngram": 0}, {"min_ngram": 4}, {"max_ngram": 2.0}])
def test_options(options):
    with pytest.raises(InvalidOption):
        METHOD.load(None, None, options)
