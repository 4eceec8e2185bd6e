"""Blocks that are found again: which, by whom, until when, and that no token changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compilespec.methods.base import Drafter
from compilespec.program import BufferSpec
from compilespec.runtime.blocks import BlockPool
from compilespec.runtime.engine import Engine
from compilespec.runtime.prefix_cache import PrefixCache, why_not
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import (
    VOCAB,
    FakeExecutor,
    engine_over,
    geometry,
    prompt_of,
    toy_decode,
)
from tests.support.hand_graphs import reading
from tests.support.models import assert_nothing_held


def make_engine(lookahead: int = 1, *, overlap: bool = False, **sizes: int) -> Engine:
    sizes.setdefault("num_repeated_tokens", max(0, lookahead - 1))
    executor = FakeExecutor(geometry(**sizes), lookahead=lookahead)
    return engine_over(executor, lookahead=lookahead, overlap=overlap)


def num_prefilled(engine: Engine) -> int:
    return sum(len(chunk.tokens) for call in engine._executor.prefill_calls for chunk in call)


# --- engine ---


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
@pytest.mark.parametrize(
    ("lookahead", "num_found"), [(0, 32), (1, 32), (3, 32), (5, 32), (6, 32), (8, 24)]
)
def test_a_prompt_that_came_before_is_found(lookahead, num_found, overlap):
    """38 tokens in blocks of 8: what a block's drafter entries depend on must be in the prompt."""
    engine = make_engine(lookahead, overlap=overlap)
    prompt = prompt_of(38)
    first, second = (engine.generate(prompt)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == toy_decode(prompt, 16, VOCAB)
    assert engine.stats().num_cached_tokens == num_found
    assert num_prefilled(engine) == 2 * 38 - num_found
    assert_nothing_held(engine)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("same", range(20, 36))
def test_prompts_that_part_share_what_is_before(same, lookahead):
    """A block is found only if its successors are the same, too; the toy checks its contents."""
    engine = make_engine(lookahead)
    first = prompt_of(40)
    second = [*first[:same], *[(token + 1) % VOCAB for token in first[same:]]]
    assert engine.generate(first)[0].token_ids == toy_decode(first, 16, VOCAB)
    assert engine.generate(second)[0].token_ids == toy_decode(second, 16, VOCAB)
    assert engine.stats().num_cached_tokens == (same - lookahead) // 8 * 8


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_what_was_generated_is_found(lookahead):
    """A conversation goes on: the next prompt begins with the last one and its answer."""
    engine = make_engine(lookahead)
    tokens = prompt_of(5)
    for turn in range(3):
        before = engine.stats().num_cached_tokens
        (output,) = engine.generate(tokens, SamplingParams(max_new_tokens=20))
        assert output.token_ids == toy_decode(tokens, 20, VOCAB)
        # The last token was not fed, and blocks end at multiples of 8.
        known = max(0, len(tokens) - 4 - 1 - max(0, lookahead - 1)) // 8 * 8 if turn else 0
        assert engine.stats().num_cached_tokens - before == known
        tokens = [*tokens, *output.token_ids, *prompt_of(4, seed=turn)]


@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlap"])
def test_samples_of_one_prompt_share_its_blocks(overlap):
    engine = make_engine(overlap=overlap, num_blocks=24)
    prompt = prompt_of(60)  # 8 blocks: three samples would not fit beside each other
    outputs = engine.generate(prompt, SamplingParams(n=4, max_new_tokens=10))
    assert [o.token_ids for o in outputs] == [toy_decode(prompt, 10, VOCAB)] * 4
    assert num_prefilled(engine) == 60 + 3 * (60 - 56)
    assert engine.stats().num_preemptions == 0
    assert max(map(len, engine._executor.decode_calls)) == 4
    assert_nothing_held(engine)


def test_who_waits_for_a_prefix_goes_on_when_its_maker_is_gone():
    engine = make_engine(max_prefill_tokens=8)
    maker = engine.submit(prompt_of(60))
    heir = engine.submit(prompt_of(60))
    engine.step()
    engine.step()
    assert (maker.row, heir.row) == (0, -1)
    engine.abort(maker)
    while engine.has_work:
        engine.step()
    assert heir.output_token_ids == toy_decode(prompt_of(60), 16, VOCAB)
    assert 0 < engine.stats().num_cached_tokens < 56


def test_the_oldest_blocks_go_first():
    """12 blocks: a third prompt takes one of the first, whose beginning stays longest."""
    engine = make_engine(num_blocks=12, num_draft_tokens=0)
    prompts = [prompt_of(33, seed) for seed in range(3)]
    for prompt in prompts:
        engine.generate(prompt, SamplingParams(max_new_tokens=1))
    found = []
    for prompt in (prompts[2], prompts[1], prompts[0]):
        before = engine.stats().num_cached_tokens
        engine.generate(prompt, SamplingParams(max_new_tokens=1))
        found.append(engine.stats().num_cached_tokens - before)
    assert found == [32, 32, 24]  # one block was needed, the last of the oldest
    assert_nothing_held(engine)


def test_reset_forgets_also_what_still_runs():
    engine = make_engine()
    running = engine.submit(prompt_of(38), SamplingParams(max_new_tokens=50))
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert running.output_token_ids == toy_decode(prompt_of(38), 50, VOCAB)
    engine.generate(prompt_of(38))
    assert engine.stats().num_cached_tokens == 0
    engine.generate(prompt_of(38))
    assert engine.stats().num_cached_tokens == 32


def test_without_it_nothing_is_found():
    engine = Engine(FakeExecutor())
    engine.generate([prompt_of(38)] * 2)
    engine.generate(prompt_of(38))
    assert engine.stats().num_cached_tokens == 0


# --- which programs ---


def program(buffers: tuple[str, ...] = (), **changes: Any) -> Any:
    specs = [BufferSpec(name=n, kind="state", shape=(2,), dtype=torch.int32) for n in buffers]
    facts = {"drafter": Drafter(), "state_bytes_per_request": 0}
    return SimpleNamespace(**{**facts, "buffers": specs, **changes})


def test_methods_that_could_not_be_right_do_not_share():
    assert why_not(program(buffers=("seq_len_R", "ring_ids_RK", "history_RL"))) is None
    assert "recorded" in why_not(program(drafter=SimpleNamespace(recorder=object())))
    assert "other blocks" in why_not(program(drafter=reading(kv_block_sizes=(8, 4))))
    assert why_not(program(buffers=("absorbed_R", "recurrence.target.0.state"))) is None
    assert "relaxed_delta_R" in why_not(program(buffers=("seq_len_R", "relaxed_delta_R")))


# --- the parts ---


def test_keys_name_whole_beginnings():
    cache = PrefixCache(BlockPool(9), block_size=4, lookahead=2)
    keys: list[bytes] = []
    cache.extend_keys(keys, range(9))
    assert len(keys) == 1  # the second block's successors are not there
    cache.extend_keys(keys, range(10))
    assert len(keys) == 2
    for place in range(10):
        other = list(range(10))
        other[place] += 100
        found: list[bytes] = []
        cache.extend_keys(found, other)
        assert (found[0] == keys[0], found[1] == keys[1]) == (place > 5, False)


def test_a_block_has_one_name_and_a_name_one_block():
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=4, lookahead=0)
    first, second = pool.allocate(2)
    cache.publish(b"a", first)
    cache.publish(b"a", second)  # computed twice at once: the first stays
    assert cache.find([b"a"], 9) == (first,)
    assert cache.find([b"a"], 4) == ()  # one token is always computed
    pool.free((first, second))
    assert (pool.num_free, len(cache)) == (4, 1)
    assert pool.allocate(3) is not None
    assert cache.find([b"a"], 9) == (first,)  # it goes last
    assert pool.allocate(1) == (first,)
    assert cache.find([b"a"], 9) == ()


def test_shared_blocks_are_free_when_nobody_holds_them():
    pool = BlockPool(3)
    cache = PrefixCache(pool, block_size=4, lookahead=0)
    (block,) = pool.allocate(1)
    cache.publish(b"a", block)
    pool.share((block,))
    pool.free((block,))
    assert pool.num_free == 2
    assert pool.allocate(3) is None
    cache.withdraw([block])
    assert cache.find([b"a"], 9) == ()
    pool.free((block,))
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free((block,))
    with pytest.raises(AssertionError, match="nothing that can be shared"):
        pool.share((block,))
