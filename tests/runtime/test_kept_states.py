"""Copies of recurrent states at the ends of blocks: where, for whom, until when."""

from __future__ import annotations

import pytest

from compilespec.runtime import kept_states
from compilespec.runtime.engine import Engine
from compilespec.runtime.kept_states import KeptCopies, places_to_keep
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import (
    VOCAB,
    FakeExecutor,
    engine_over,
    geometry,
    prompt_of,
    toy_decode,
)
from tests.support.models import assert_nothing_held


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few blocks keep states."""
    monkeypatch.setattr(kept_states, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(kept_states, "RUNG", 2)


def make_engine(lookahead: int = 1, *, num_state_places: int = 4, **changes: int) -> Engine:
    """The toy checks that a request starts from the states of its own prefix."""
    changes.setdefault("num_repeated_tokens", max(0, lookahead - 1))
    spoil = changes.pop("spoil", lambda phase, row: False)
    overlap = bool(changes.pop("overlap", False))
    sizes = geometry(num_state_places=num_state_places, **changes)
    executor = FakeExecutor(sizes, lookahead=lookahead, spoil=spoil)
    return engine_over(executor, lookahead=lookahead, overlap=overlap)


def ask(engine: Engine, prompt: list[int], count: int = 6) -> int:
    """Check the tokens; returns how many of the prompt's were found."""
    before = engine.stats().num_cached_tokens
    (output,) = engine.generate(prompt, SamplingParams(max_new_tokens=count))
    assert output.token_ids == toy_decode(prompt, count, VOCAB)
    return engine.stats().num_cached_tokens - before


def parting(prompt: list[int], same: int) -> list[int]:
    return [*prompt[:same], *[(token + 1) % VOCAB for token in prompt[same:]]]


@pytest.mark.parametrize(
    ("last", "found", "known", "numbers"),
    [
        (0, 0, 0, ()),
        (9, 0, 0, (5, 7, 9)),  # 4 and 2 blocks before the last one
        (9, 0, 6, (5, 6, 7, 9)),
        (9, 6, 8, (8, 9)),
        (9, 9, 9, ()),
        (5, 0, 7, (3, 5)),  # known further than states can be used
    ],
)
def test_places(last, found, known, numbers):
    assert places_to_keep(last, found, known) == numbers


def test_a_short_prompt_is_not_cut(monkeypatch):
    monkeypatch.setattr(kept_states, "FEWEST_BLOCKS", 8)
    monkeypatch.setattr(kept_states, "RUNG", 8)
    assert places_to_keep(7, 0, 3) == ()
    assert places_to_keep(500, 0, 0) == (436, 492, 500)
    assert places_to_keep(500, 490, 495) == (500,)


def test_the_place_used_longest_ago_makes_room():
    states = KeptCopies(2)
    first, second = states.keep(b"a"), states.keep(b"b")
    assert states.keep(b"a") is None  # is there
    assert states.keep(b"c") == second
    assert states.find([b"a", b"b", b"x"]) == (1, first)
    states.forget([b"a", b"?"])
    assert states.find([b"a"]) == (0, None)
    assert states.keep(b"d") == first
    states.clear()
    assert len(states) == 0
    assert {states.keep(b"e"), states.keep(b"f")} == {first, second}


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
@pytest.mark.parametrize("lookahead", [0, 1, 3, 8])
def test_a_prompt_that_came_before_starts_from_its_states(lookahead, overlap):
    engine = make_engine(lookahead, overlap=overlap)
    assert ask(engine, prompt_of(38)) == 0
    assert ask(engine, prompt_of(38)) == (38 - max(1, lookahead)) // 8 * 8
    assert_nothing_held(engine)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("same", [3, 9, 17, 30, 41, 59])
def test_prompts_that_part_share_what_is_before(same, lookahead):
    """The second may find a state before the place where they part, the third finds the deepest:
    the second one has kept it.
    """
    engine = make_engine(lookahead, num_state_places=12)
    first, deepest = prompt_of(61), (same - lookahead) // 8 * 8
    ask(engine, first)
    assert ask(engine, parting(first, same)) <= deepest
    third = [*first[:same], *prompt_of(7, seed=9)]
    assert ask(engine, third) == min(deepest, (len(third) - max(1, lookahead)) // 8 * 8)


def test_a_conversation_goes_on_from_its_last_prompt():
    engine = make_engine(num_state_places=3)
    tokens, num_before = prompt_of(21), 1
    for turn in range(3):
        assert ask(engine, tokens, 9) == (num_before - 1) // 8 * 8
        num_before = len(tokens)
        tokens = [*tokens, *toy_decode(tokens, 9, VOCAB), *prompt_of(5, seed=turn)]


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
def test_samples_of_one_prompt_wait_for_its_states(overlap):
    engine = make_engine(overlap=overlap, num_blocks=30)
    prompt = prompt_of(60)
    outputs = engine.generate(prompt, SamplingParams(n=4, max_new_tokens=10))
    assert [o.token_ids for o in outputs] == [toy_decode(prompt, 10, VOCAB)] * 4
    assert engine.stats().num_cached_tokens == 3 * 56
    assert_nothing_held(engine)


def test_no_places_no_states():
    engine = make_engine(num_state_places=0)
    engine._scheduler.holdings.states = None  # as the plan says: prefixes are not shared
    engine._scheduler.holdings.prefixes = None
    assert [ask(engine, prompt_of(38)) for _ in range(2)] == [0, 0]


def test_one_place_serves_the_newest_prompt():
    engine = make_engine(num_state_places=1)
    one, other = prompt_of(38), prompt_of(38, seed=1)
    assert [ask(engine, p) for p in (one, one, other, one, one)] == [0, 32, 0, 0, 32]


def test_reset_forgets_also_what_still_runs():
    engine = make_engine(max_prefill_tokens=16)
    running = engine.submit(prompt_of(38), SamplingParams(max_new_tokens=30))
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert running.output_token_ids == toy_decode(prompt_of(38), 30, VOCAB)
    assert len(engine._scheduler.holdings.states) == 0
    assert [ask(engine, prompt_of(38)) for _ in range(2)] == [0, 32]


def test_states_of_a_request_with_nan_are_not_found():
    bad = [True]
    engine = make_engine(spoil=lambda phase, row: phase == "decode" and bad[0])
    (output,) = engine.generate([prompt_of(38)], SamplingParams(max_new_tokens=5))
    assert "NaN" in str(output.error)
    bad[0] = False
    assert [ask(engine, prompt_of(38)) for _ in range(2)] == [0, 32]


def test_a_cut_call_never_ends_before_the_states_it_started_from():
    """Drafters that run three tokens again, and calls whose room ends a token after a start."""
    engine = make_engine(4, max_prefill_tokens=16, num_state_places=20, num_blocks=60)
    prompts = [prompt_of(34, seed) for seed in range(3)]
    for prompt in prompts:
        ask(engine, prompt)
    for size in range(1, 20):
        longer = [[*p, *prompt_of(size, seed=7)] for p in prompts]
        said = engine.generate([prompt_of(13), *longer], SamplingParams(max_new_tokens=3))
        assert [o.token_ids for o in said[1:]] == [toy_decode(p, 3, VOCAB) for p in longer]
    assert engine.stats().num_cached_tokens > 0
