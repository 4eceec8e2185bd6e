"""Random schedules of submit, step and abort on one engine, over caches full of NaN.

For any schedule, a request's tokens are the right prefix of the model's own continuation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.outputs import FinishReason
from compilespec.runtime.request import Request
from tests.support.models import (
    Ask,
    DialDrafter,
    ask_all,
    assert_nothing_held,
    poison,
    target_info,
    tiny_target,
)

MAX_SEQ_LEN = 75
MAX_BATCH_SIZE = 4
NUM_DRAFT_TOKENS = 3
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 48, 64, 70, 74)
KV_CACHE_TOKENS = 192  # 12 blocks: two and a half requests of the maximum length


@dataclass(frozen=True, kw_only=True)
class Site:
    engine: Engine
    dial: DialDrafter
    asks: tuple[Ask, ...]  # with continuations up to the maximum length


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    model = tiny_target("llama", num_layers=4)
    asks = tuple(ask_all(model, ((length, MAX_SEQ_LEN - length) for length in PROMPT_LENGTHS)))
    model.config.eos_token_id = model.generation_config.eos_token_id = _common_token(asks)
    dial = DialDrafter(
        random_head(target_info(model, MAX_SEQ_LEN)), max_seq_len=MAX_SEQ_LEN, dtype=torch.float64
    )
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=NUM_DRAFT_TOKENS, backend="eager",
        max_batch_size=MAX_BATCH_SIZE, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16,
        kv_cache_tokens=KV_CACHE_TOKENS, buckets=[1, 2, 4],
    ) as engine:  # fmt: skip
        yield Site(engine=engine, dial=dial, asks=asks)


def _common_token(asks: tuple[Ask, ...]) -> int:
    """A token that many continuations contain: the end-of-sequence id that ends some of them."""
    tokens = [token for ask in asks for token in set(ask.tokens)]
    return max(sorted(set(tokens)), key=tokens.count)


@dataclass(frozen=True)
class Submit:
    ask: int
    max_new_tokens: int
    ignore_eos: bool
    stop_at: int | None  # stop at the token that stands here in the continuation


@dataclass(frozen=True)
class Step:
    count: int


@dataclass(frozen=True)
class Abort:
    request: int


submits = st.builds(
    Submit,
    ask=st.integers(0, len(PROMPT_LENGTHS) - 1),
    max_new_tokens=st.integers(1, MAX_SEQ_LEN),
    ignore_eos=st.booleans(),
    stop_at=st.none() | st.integers(0, MAX_SEQ_LEN),
)
schedules = st.lists(
    submits | submits | st.builds(Step, st.integers(1, 4)) | st.builds(Abort, st.integers(0, 20)),
    min_size=1, max_size=24,
)  # fmt: skip
# Where the script errs; None: the head's own drafts.
wrong_positions = st.none() | st.frozensets(st.integers(0, MAX_SEQ_LEN))


def params_of(submit: Submit, ask: Ask) -> SamplingParams:
    stop = () if submit.stop_at is None else (ask.tokens[submit.stop_at % len(ask.tokens)],)
    return SamplingParams(
        max_new_tokens=submit.max_new_tokens, ignore_eos=submit.ignore_eos, stop_token_ids=stop
    )


def right_answer(
    ask: Ask, params: SamplingParams, eos: frozenset[int]
) -> tuple[list[int], FinishReason]:
    """The model's own tokens up to the first reason to end."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
    for count, token in enumerate(ask.tokens[: params.max_new_tokens], start=1):
        if token in ends:
            return list(ask.tokens[:count]), "stop"
    return list(ask.tokens[: params.max_new_tokens]), "length"


def check(site: Site, request: Request, ask: Ask) -> None:
    expected, reason = right_answer(ask, request.params, site.engine.eos_token_ids)
    tokens = request.output_token_ids
    if request.finish_reason == "aborted":
        assert tokens == expected[: len(tokens)]
        assert len(tokens) < len(expected)
    else:
        assert (tokens, request.finish_reason) == (expected, reason)
    if request.num_preemptions:  # each brings a token that no step gives
        left = max(0, len(tokens) - 1) - sum(request.emitted_per_step)
        assert 0 <= left <= request.num_preemptions
        return
    assert sum(request.emitted_per_step) == max(0, len(tokens) - 1)
    if bool(site.dial.scripted):
        steps = site.dial.expected_steps(len(ask.prompt), len(tokens), NUM_DRAFT_TOKENS)
        assert request.emitted_per_step == steps


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules, wrong=wrong_positions)
def test_any_schedule_gives_every_request_its_tokens(
    site: Site, schedule: list[Submit | Step | Abort], wrong: frozenset[int] | None
) -> None:
    engine, dial = site.engine, site.dial
    if wrong is None:
        dial.draft_at_random()
    else:
        dial.draft_from_script(lambda position: position in wrong)
    poison(engine)
    num_recompiles = engine.stats().num_recompiles
    requests: list[tuple[Request, Ask]] = []
    try:
        for action in schedule:
            match action:
                case Submit():
                    ask = site.asks[action.ask]
                    requests.append((engine.submit(list(ask.prompt), params_of(action, ask)), ask))
                case Step():
                    for _ in range(action.count):
                        engine.step()
                case Abort():
                    if requests:
                        engine.abort(requests[action.request % len(requests)][0])
        while engine.has_work:
            engine.step()
    finally:  # a failing example must not leave work to the next one
        for request, _ in requests:
            engine.abort(request)
    for request, ask in requests:
        check(site, request, ask)
    assert_nothing_held(engine)
    assert engine.stats().num_recompiles == num_recompiles


def test_prompts_are_cut_into_chunks_and_blocks_run_short(site: Site) -> None:
    """The schedules meet 16 tokens a prefill, and too few blocks for four long prompts."""
    engine, asks = site.engine, [ask for ask in site.asks if len(ask.prompt) >= 48]
    site.dial.draft_from_script(lambda position: False)
    poison(engine)
    before = engine.stats().num_prefills
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    requests = [engine.submit(list(ask.prompt), params) for ask in asks]
    engine.step()
    assert sum(request.row >= 0 for request in requests) == 2
    while engine.has_work:
        engine.step()
    assert engine.stats().num_prefills - before >= sum(len(ask.prompt) for ask in asks) // 16
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens[:5])
    assert_nothing_held(engine)


def test_end_of_sequence_occurs(site: Site) -> None:
    """The chosen EOS id ends several continuations before their last token."""
    (eos,) = site.engine.eos_token_ids
    assert sum(eos in ask.tokens[:-1] for ask in site.asks) >= 3


def test_a_poisoned_cache_would_show(site: Site) -> None:
    """The check of the check: a cell turned to NaN under a running request changes what it says."""
    engine, ask = site.engine, site.asks[PROMPT_LENGTHS.index(17)]
    site.dial.draft_from_script(lambda position: False)
    request = engine.submit(list(ask.prompt), SamplingParams(max_new_tokens=20, ignore_eos=True))
    while not request.output_token_ids:
        engine.step()
    engine._executor.buffers["cache.target.0.key"][request.blocks[0], 3].fill_(float("nan"))
    while engine.has_work:
        engine.step()
    assert request.output_token_ids != list(ask.tokens[:20])
