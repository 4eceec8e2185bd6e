"""Every schedule gives the tokens of plain decoding, and gives back every row and block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compilespec.errors import NanLogits
from compilespec.runtime.blocks import BlockPool
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request, RequestState
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import (
    VOCAB,
    FakeExecutor,
    engine_over,
    geometry,
    prompt_of,
    toy_decode,
    toy_next,
)


def make_engine(*, hit_rate: float = 0.7, eos: tuple[int, ...] = (), **sizes: int) -> Engine:
    return engine_over(FakeExecutor(geometry(**sizes), hit_rate=hit_rate), eos_token_ids=eos)


def assert_all_returned(engine: Engine) -> None:
    scheduler = engine._scheduler
    assert scheduler.holdings.pool.num_free == engine.geometry.config.num_blocks
    assert sorted(scheduler.holdings.free_rows) == list(
        range(engine.geometry.config.max_batch_size)
    )
    assert not scheduler.line.running
    assert not scheduler.line.waiting


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 9], ids="B{}".format)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5], ids="K{}".format)
def test_ragged_batches_give_plain_tokens(batch, num_draft_tokens):
    engine = make_engine(
        num_draft_tokens=num_draft_tokens, max_batch_size=8, max_seq_len=128, num_blocks=128
    )
    prompts = [prompt_of(1 + (i * 23) % 70, seed=i) for i in range(batch)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == toy_decode(prompt, 20, VOCAB)
        assert output.finish_reason == "length"
        assert sum(output.emitted_per_step) == 19
        assert all(1 <= n <= num_draft_tokens + 1 for n in output.emitted_per_step)
    assert_all_returned(engine)


@pytest.mark.parametrize(("hit_rate", "num_steps"), [(0.0, 16), (1.0, 4)])
def test_acceptance_is_what_the_drafts_deserve(hit_rate, num_steps):
    engine = make_engine(hit_rate=hit_rate)
    (output,) = engine.generate(prompt_of(5), SamplingParams(max_new_tokens=17))
    assert len(output.emitted_per_step) == num_steps
    assert output.acceptance_length == 16 / num_steps
    stats = engine.stats()
    assert (stats.num_verify_steps, stats.num_emitted) == (num_steps, 16)
    assert stats.acceptance_rate_by_position == (hit_rate,) * 3
    assert stats.num_decodes_by_bucket == {1: num_steps}
    assert stats.num_prefills == 1


def test_limit_cuts_an_accepted_run():
    engine = make_engine(hit_rate=1.0)
    (output,) = engine.generate(prompt_of(5), SamplingParams(max_new_tokens=7))
    assert output.token_ids == toy_decode(prompt_of(5), 7, VOCAB)
    assert output.emitted_per_step == [4, 2]
    stats = engine.stats()
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.acceptance_rate_by_position))


@pytest.mark.parametrize("at", range(9))
def test_eos_inside_a_run_ends_it(at):
    expected = toy_decode(prompt_of(6), 9, VOCAB)
    engine = make_engine(hit_rate=1.0, eos=(expected[at],))
    (output,) = engine.generate(prompt_of(6), SamplingParams(max_new_tokens=9))
    assert output.token_ids == expected[: at + 1]
    assert output.finish_reason == "stop"
    assert 1 + sum(output.emitted_per_step) == at + 1
    (ignored,) = engine.generate(prompt_of(6), SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == (expected, "length")
    assert_all_returned(engine)


def test_stop_ids_end_even_when_eos_is_ignored():
    expected = toy_decode(prompt_of(6), 9, VOCAB)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=[expected[3]])
    (output,) = make_engine(eos=(expected[1],)).generate(prompt_of(6), params)
    assert (output.token_ids, output.finish_reason) == (expected[:4], "stop")


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5], ids="K{}".format)
@pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
def test_maximum_length_ends_with_length(num_draft_tokens, room):
    engine = make_engine(hit_rate=1.0, num_draft_tokens=num_draft_tokens, max_seq_len=40)
    prompts = [prompt_of(40 - room), prompt_of(7)]
    params = [SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30)]
    at_end, other = engine.generate(prompts, params)
    assert at_end.token_ids == toy_decode(prompts[0], room, VOCAB)
    assert at_end.finish_reason == "length"
    assert other.token_ids == toy_decode(prompts[1], 30, VOCAB)
    assert_all_returned(engine)


def test_long_prompts_are_prefilled_in_chunks():
    engine = make_engine(max_prefill_tokens=16)
    executor = engine._executor
    prompts = [prompt_of(70), prompt_of(3), prompt_of(30)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=5))
    assert [o.token_ids for o in outputs] == [toy_decode(p, 5, VOCAB) for p in prompts]
    assert all(sum(len(c.tokens) for c in call) == 16 for call in executor.prefill_calls[:6])
    assert len(executor.prefill_calls) == 7  # 103 tokens
    assert executor.decode_calls, "short requests decode while long prompts are still going in"


def test_requests_join_and_leave_between_steps():
    engine = make_engine(max_batch_size=3)
    first = engine.submit(prompt_of(9), SamplingParams(max_new_tokens=12))
    engine.step()
    second = engine.submit(prompt_of(33), SamplingParams(max_new_tokens=3))
    engine.step()
    assert first.state is RequestState.DECODE
    third = engine.submit(prompt_of(1), SamplingParams(max_new_tokens=8))
    while engine.has_work:
        assert engine.step()
    for request, count in ((first, 12), (second, 3), (third, 8)):
        assert request.output_token_ids == toy_decode(request.prompt_token_ids, count, VOCAB)
        assert request.timings.time_to_first_token_ms > 0
    assert_all_returned(engine)


def test_scarce_blocks_make_requests_wait_in_order():
    # 12 blocks of 8 tokens; each request begins with 8 + 7 tokens = 2 blocks and grows to 5, and
    # one that runs keeps a block free that it may need next: 4 at a time.
    engine = make_engine(num_blocks=12, max_batch_size=5)
    requests = [
        engine.submit(prompt_of(8, seed=i), SamplingParams(max_new_tokens=25)) for i in range(5)
    ]
    engine.step()
    assert [r.row >= 0 for r in requests] == [True, True, True, True, False]
    while engine.has_work:
        engine.step()
    admitted = [r.timings.admitted_ms for r in requests]
    assert admitted == sorted(admitted)
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert request.output_token_ids == toy_decode(request.prompt_token_ids, 25, VOCAB)
    assert engine.stats().num_preemptions > 0
    assert_all_returned(engine)


def test_abort_in_every_state():
    engine = make_engine(max_batch_size=2, max_prefill_tokens=16)
    decoding = engine.submit(prompt_of(4), SamplingParams(max_new_tokens=20))
    filling = engine.submit(prompt_of(60), SamplingParams(max_new_tokens=20))
    waiting = engine.submit(prompt_of(4, seed=1), SamplingParams(max_new_tokens=20))
    survivor = engine.submit(prompt_of(4, seed=2), SamplingParams(max_new_tokens=20))
    engine.step()
    states = [r.state for r in (decoding, filling, waiting)]
    assert states == [RequestState.DECODE, RequestState.PREFILL, RequestState.WAITING]
    for request in (decoding, filling, waiting):
        engine.abort(request)
        engine.abort(request)  # no effect
        assert request.finish_reason == "aborted"
    assert decoding.output_token_ids == toy_decode(
        decoding.prompt_token_ids, len(decoding.output_token_ids), VOCAB
    )
    while engine.has_work:
        engine.step()
    assert survivor.output_token_ids == toy_decode(survivor.prompt_token_ids, 20, VOCAB)
    engine.abort(survivor)
    assert survivor.finish_reason == "length"
    assert_all_returned(engine)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_failing_program_ends_the_running_and_spares_the_waiting(phase):
    failures = [RuntimeError("device lost")]

    def fail(current: str) -> None:
        if current == phase and failures:
            raise failures.pop()

    engine = Engine(FakeExecutor(geometry(max_batch_size=2), fail=fail))
    requests = [
        engine.submit(prompt_of(5, seed=i), SamplingParams(max_new_tokens=6)) for i in range(3)
    ]
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert [r.finish_reason for r in requests] == ["error", "error", None]
    assert isinstance(requests[0].error, RuntimeError)
    while engine.has_work:
        engine.step()
    assert requests[2].output_token_ids == toy_decode(requests[2].prompt_token_ids, 6, VOCAB)
    assert_all_returned(engine)


def test_interrupted_generate_leaves_nothing_behind():
    def fail(phase: str) -> None:
        if phase == "decode":
            raise KeyboardInterrupt

    executor = FakeExecutor(geometry(max_batch_size=2), fail=fail)
    engine = Engine(executor)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt_of(4), prompt_of(5), prompt_of(6)])
    assert_all_returned(engine)
    executor.fail = lambda phase: None
    (output,) = engine.generate(prompt_of(4))
    assert output.token_ids == toy_decode(prompt_of(4), 16, VOCAB)


class Traffic:
    """A random server: submits, steps, aborts and NaN, then checks every request."""

    def __init__(self, engine: Engine, eos: int) -> None:
        self.engine, self.eos = engine, eos
        self.requests: list[Request] = []
        self.spoilt: list[Request] = []

    def submit(
        self, length: int, count: int, ignore_eos: bool, parting: int, priority: int
    ) -> None:
        """A prompt that is another's up to token `parting`."""
        length = min(length, self.engine.geometry.config.max_seq_len - 1)
        params = SamplingParams(max_new_tokens=count, ignore_eos=ignore_eos)
        prompt = prompt_of(90)[: min(parting, length)]
        prompt += prompt_of(length - len(prompt), seed=1 + len(self.requests))
        self.requests.append(self.engine.submit(prompt, params, priority=priority))

    def spoil(self, which: int) -> None:
        """From now on a request's logits hold NaN."""
        if self.requests:
            spoilt = self.requests[which % len(self.requests)]
            self.spoilt.append(spoilt)
            self.engine._executor.spoil = lambda phase, row: row in [r.row for r in self.spoilt]

    def abort(self, which: int) -> None:
        if self.requests:
            self.engine.abort(self.requests[which % len(self.requests)])

    def drain_and_check(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.engine.step()
            steps += 1
            assert steps < 5000, "no progress"
        for request in self.requests:
            self.check(request)
        assert_all_returned(self.engine)

    def check(self, request: Request) -> None:
        got = request.output_token_ids
        assert got == toy_decode(request.prompt_token_ids, len(got), VOCAB)
        room = self.engine.geometry.config.max_seq_len - len(request.prompt_token_ids)
        limit = min(room, request.params.max_new_tokens)
        assert len(got) <= limit
        ends = not request.params.ignore_eos and self.eos in got
        if ends:
            assert got.index(self.eos) == len(got) - 1
        if request.finish_reason == "error":
            assert isinstance(request.error, NanLogits)
            assert request in self.spoilt
        elif request.finish_reason != "aborted":
            assert request.finish_reason == ("stop" if ends else "length")
            assert ends or len(got) == limit
        if got:  # one token of each prefill
            by_steps = sum(request.emitted_per_step)
            assert len(got) - 1 - request.num_preemptions <= by_steps <= len(got) - 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 70),
            st.integers(1, 30),
            st.booleans(),
            st.integers(0, 60),
            st.integers(-1, 1),
        ),
        st.tuples(st.just("spoil"), st.integers(0, 30)),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=30,
)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(
    actions=ACTIONS,
    num_draft_tokens=st.sampled_from([0, 1, 3, 5]),
    max_batch_size=st.integers(1, 8),
    block_size=st.sampled_from([1, 3, 8, 16]),
    max_seq_len=st.integers(2, 90),
    max_prefill_tokens=st.sampled_from([7, 48, 200]),
    max_step_tokens=st.sampled_from([None, 1, 30]),
    spare=st.integers(0, 3),
    hit_rate=st.sampled_from([0.0, 0.6, 1.0]),
    overlap=st.booleans(),
    lookahead=st.sampled_from([None, 0, 1, "K"]),
)
def test_any_traffic_gives_plain_tokens(
    actions,
    num_draft_tokens,
    max_batch_size,
    block_size,
    max_seq_len,
    max_prefill_tokens,
    max_step_tokens,
    spare,
    hit_rate,
    overlap,
    lookahead,
):
    if lookahead == "K":
        lookahead = num_draft_tokens
    sizes = geometry(
        num_draft_tokens=num_draft_tokens,
        max_batch_size=max_batch_size,
        block_size=block_size,
        max_seq_len=max_seq_len,
        max_prefill_tokens=max_prefill_tokens,
        num_blocks=-(-(4 + spare) * max_seq_len // (4 * block_size)),
        num_repeated_tokens=max(0, (lookahead or 0) - 1),
    )
    eos = toy_next(prompt_of(1), VOCAB)  # ends some requests at their first token
    executor = FakeExecutor(sizes, hit_rate=hit_rate, lookahead=lookahead or 0)
    engine = engine_over(
        executor, eos_token_ids=[eos], overlap=overlap, lookahead=lookahead,
        max_step_tokens=max_step_tokens,
    )  # fmt: skip
    traffic = Traffic(engine, eos)
    for name, *arguments in actions:
        if name == "step":
            traffic.engine.step()
        else:
            getattr(traffic, name)(*arguments)
    traffic.drain_and_check()


def test_block_pool_takes_all_or_nothing():
    pool = BlockPool(5)
    taken = pool.allocate(3)
    assert taken is not None
    assert len(set(taken)) == 3
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken[:1])
    assert pool.allocate(0) == ()
