"""spec="suffix": the search against plain Python, past texts, and traffic."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.methods.suffix import METHOD
from compilespec.ops.suffix_match import suffix_match, suffix_match_reference
from compilespec.serving.params import read_params
from compilespec.serving.protocol import ChatRequest
from tests.support.direct_methods import MAX_SEQ_LEN, SIZES, check_traffic
from tests.support.models import VOCAB, ask_all, tiny_target

WIDTH = 70  # more than two blocks of the kernel


def by_definition(past, own, count, longest, shortest):
    """The drafts: the longest context that was followed by a token votes."""
    texts = [*past, own]
    for size in range(min(longest, len(own)), shortest - 1, -1):
        rests = [
            text[end:]
            for text in texts
            for end in range(size, len(text))
            if text[end - size : end] == own[-size:]
        ]
        if rests:
            break
    else:
        return [-1] * count
    drafts = []
    while len(drafts) < count and rests:
        votes = Counter(rest[0] for rest in rests)
        most = max(votes.values())
        drafts.append([rest[0] for rest in rests if votes[rest[0]] == most][-1])
        rests = [rest[1:] for rest in rests if rest[0] == drafts[-1] and len(rest) > 1]
    return drafts + [-1] * (count - len(drafts))


def length_of_match(past, own, longest, shortest):
    """Of the longest context that was followed by a token."""
    for size in range(min(longest, len(own)), shortest - 1, -1):
        for text in [*past, own]:
            if any(text[end - size : end] == own[-size:] for end in range(size, len(text))):
                return size
    return 0


def rows(texts):
    return torch.tensor([[*text, *[-1] * (WIDTH - len(text))] for text in texts], dtype=torch.int32)


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=1, max_size=4)


@given(own=TEXTS, past=TEXTS, count=st.integers(1, 6), longest=st.integers(1, 5), data=st.data())
@settings(deadline=None, max_examples=60)
def test_both_searches_against_plain_python(own, past, count, longest, data):
    shortest = data.draw(st.integers(1, longest))
    lengths = torch.tensor([len(text) for text in own], dtype=torch.int32)
    wanted = [by_definition(past, text, count, longest, shortest) for text in own]
    for search in (suffix_match_reference, suffix_match):
        found, matched = search(rows(own), lengths, rows(past), count, longest, shortest, 3)
        assert found.dtype == matched.dtype == torch.int32
        assert found.tolist() == wanted
        assert matched.tolist() == [length_of_match(past, text, longest, shortest) for text in own]


def test_padding_finds_nothing_and_operator_is_well_formed():
    own, lengths = rows([[], [1, 2, 1]]), torch.tensor([1, 3], dtype=torch.int32)
    arguments = (own, lengths, rows([[], [1, 2, 2]]), 3, 4, 1, 3)
    drafts, matched = suffix_match(*arguments)
    assert drafts.tolist() == [[-1, -1, -1], [2, 1, -1]]
    assert matched.tolist() == [0, 1]
    torch.library.opcheck(torch.ops.compilespec.suffix_match.default, arguments)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", num_layers=2)


@pytest.fixture(scope="module")
def engine(target):
    with compilespec.compile(
        target, spec="suffix", num_draft_tokens=3, num_past_texts=4, backend="eager",
        max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16, buckets=[1, 2, 5],
    ) as engine:  # fmt: skip
        yield engine


def test_tokens_in_traffic(target, engine):
    check_traffic(engine, ask_all(target, SIZES))


def test_drafts_come_from_the_definition_and_a_repeated_request_is_known(target, engine):
    (ask,) = ask_all(target, [(9, 25)])
    params = SamplingParams(max_new_tokens=25, ignore_eos=True)
    past = [[*text] for text in engine._executor._past_texts._texts]
    for _ in range(2):
        (output,) = engine.generate([list(ask.prompt)], params)
        assert list(output.token_ids) == list(ask.tokens)
        assert output.emitted_per_step == expected_steps(ask, past, 3)
        past = [[*text] for text in engine._executor._past_texts._texts]
    assert output.acceptance_length > 3.4  # of 4: the answer was given before
    known = list(engine._executor._past_texts._texts)
    engine.generate([list(ask.prompt)], params)
    assert engine._executor._past_texts._texts == known  # no text takes two places


def expected_steps(ask, past, count):
    whole, length, steps = [*ask.prompt, *ask.tokens], len(ask.prompt) + 1, []
    while length < len(whole):
        drafts = by_definition(past, whole[:length], count, 16, 1)
        num = 1
        for draft, right in zip(drafts, whole[length:], strict=False):
            if draft != right:
                break
            num += 1
        steps.append(min(num, len(whole) - length))
        length += num
    return steps


def test_texts_are_remembered_that_no_request_gave(target, engine):
    (ask,) = ask_all(target, [(11, 24)])
    text = [*ask.prompt, *ask.tokens]
    engine.remember(text[4:])
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    (output,) = engine.generate([list(ask.prompt)], params)
    assert list(output.token_ids) == list(ask.tokens)
    assert output.acceptance_length > 3.4
    engine.remember(text * 9)  # in pieces
    assert max(map(len, engine._executor._past_texts._texts)) == MAX_SEQ_LEN
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.remember([VOCAB])
    with pytest.raises(InvalidRequest, match="empty"):
        engine.remember([])


def test_a_prediction_is_drafted_from_the_first_token_on(target, engine):
    asks = ask_all(target, [(13, 24), (10, 24)])
    told = [ask.tokens for ask in asks]
    told[1] = [*told[1][:12], (told[1][12] + 1) % VOCAB, *told[1][13:]]  # an edit
    params = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, prediction=list(tokens))
        for tokens in told
    ]
    outputs = engine.generate([list(ask.prompt) for ask in asks], params)
    for ask, output in zip(asks, outputs, strict=True):
        assert list(output.token_ids) == list(ask.tokens)
        assert output.emitted_per_step[0] == 4
    assert outputs[0].acceptance_length > 3.4
    assert outputs[1].acceptance_length > 2.4
    with pytest.raises(InvalidRequest, match="prediction: expected token ids of at least 0"):
        SamplingParams(prediction=3)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.submit([1, 2], SamplingParams(prediction=[VOCAB]))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in ("ab", parts):
        told = {"type": "content", "content": content}
        asked = ChatRequest(messages=[{"role": "user", "content": "x"}], prediction=told)
        assert read_params(asked, engine, 3, {}).prediction == "ab"
    other = compilespec.compile(target, spec="none", backend="eager", max_seq_len=MAX_SEQ_LEN)
    with pytest.raises(InvalidRequest, match="spec='none' looks no texts up; compile with spec="):
        other.submit([1, 2], SamplingParams(prediction=[1, 2]))


@pytest.mark.parametrize(
    "options", [{"max_match": 0}, {"min_match": 17}, {"max_match": 2.0}, {"num_past_texts": 0}]
)
def test_options(options):
    with pytest.raises(InvalidOption, match="min_match <= max_match"):
        METHOD.load(None, None, options)
