"""Steps that are launched before the last one's tokens are read: nothing leaks, nothing is freed
early, and blocks are reserved as the model in `tests/support/step_model.py` says.
"""

from __future__ import annotations

import pytest

from compilespec.errors import TokenizerFailed
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import RequestState
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
from tests.support.step_model import StepModel, Toy


def make_engine(*, hit_rate: float = 0.7, eos: tuple[int, ...] = (), **sizes: int) -> Engine:
    executor = FakeExecutor(geometry(**sizes), hit_rate=hit_rate)
    return engine_over(executor, eos_token_ids=eos, overlap=True)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5], ids="K{}".format)
def test_ragged_batches_give_plain_tokens(num_draft_tokens, hit_rate):
    engine = make_engine(
        num_draft_tokens=num_draft_tokens, hit_rate=hit_rate, max_batch_size=4, num_blocks=60
    )
    prompts = [prompt_of(1 + (i * 23) % 90, seed=i) for i in range(9)]
    for prompt, output in zip(
        prompts, engine.generate(prompts, SamplingParams(max_new_tokens=20)), strict=True
    ):
        assert output.token_ids == toy_decode(prompt, min(20, 96 - len(prompt)), VOCAB)
        assert sum(output.emitted_per_step) == len(output.token_ids) - 1
    assert engine._executor.max_in_flight >= 2
    assert_nothing_held(engine)


@pytest.mark.parametrize("at", range(12))
def test_what_follows_a_stop_is_dropped(at):
    expected = toy_decode(prompt_of(6), 12, VOCAB)
    engine = make_engine(hit_rate=1.0, eos=(expected[at],))
    told = []
    for delta in engine.stream([prompt_of(6)], SamplingParams(max_new_tokens=30)):
        told += delta.token_ids
    assert told == expected[: at + 1]
    assert delta.finish_reason == "stop"
    assert sum(delta.output.emitted_per_step) == at
    assert engine.stats().num_emitted == at
    assert_nothing_held(engine)


@pytest.mark.parametrize("count", range(1, 12))
def test_no_step_is_launched_for_nothing(count):
    """Right drafts, a known length: the last step is launched only if a token may be missing."""
    engine = make_engine(hit_rate=0.0)
    (output,) = engine.generate(prompt_of(6), SamplingParams(max_new_tokens=count))
    assert len(output.token_ids) == count
    assert len(engine._executor.decode_calls) == count - 1


def test_row_and_blocks_are_held_until_the_step_in_flight_was_read():
    expected = toy_decode(prompt_of(6), 4, VOCAB)
    engine = make_engine(hit_rate=0.0, eos=(expected[3],), max_batch_size=2)
    ending = engine.submit(prompt_of(6), SamplingParams(max_new_tokens=40))
    going = engine.submit(prompt_of(9), SamplingParams(max_new_tokens=40, ignore_eos=True))
    while not ending.finished:
        engine.step()
    assert (ending.state, ending.row, bool(ending.blocks)) == (RequestState.FINISHED, 0, True)
    next_one = engine.submit(prompt_of(5), SamplingParams(max_new_tokens=3))
    engine.step()  # reads the step that still names it
    assert (ending.row, ending.blocks, next_one.row) == (-1, (), -1)
    engine.step()
    assert next_one.row == 0
    drain(engine)
    assert going.output_token_ids == toy_decode(prompt_of(9), 40, VOCAB)
    assert_nothing_held(engine)


def test_abort_with_a_step_in_flight():
    engine = make_engine(max_batch_size=2)
    gone = engine.submit(prompt_of(6), SamplingParams(max_new_tokens=40))
    kept = engine.submit(prompt_of(9), SamplingParams(max_new_tokens=40))
    for _ in range(4):
        engine.step()
    before = list(gone.output_token_ids)
    engine.abort(gone)
    assert gone.row >= 0
    engine.step()
    assert (gone.row, gone.output_token_ids, gone.finish_reason) == (-1, before, "aborted")
    engine.abort(kept)  # the last one: nothing is left in flight
    assert_nothing_held(engine)


def test_requests_that_need_the_host_in_between_are_read_at_once():
    """The toy refuses to give logprobs of a row that a later launch names."""
    engine = make_engine(max_batch_size=2)
    plain = engine.submit(prompt_of(6), SamplingParams(max_new_tokens=30))
    for _ in range(3):
        engine.step()
    wants = engine.submit(prompt_of(9), SamplingParams(max_new_tokens=5, logprobs=0))
    while not wants.finished:
        engine.step()
        assert not engine._scheduler.launches.in_flight or wants.row < 0
    drain(engine)
    assert [entry.token_id for entry in wants.output_logprobs][:5] == wants.output_token_ids
    assert plain.output_token_ids == toy_decode(prompt_of(6), 30, VOCAB)


@pytest.mark.parametrize("phase", ["prefill", "decode", "collect"])
def test_a_failing_program_ends_the_running(phase):
    failures = [RuntimeError("device lost")]
    calls = iter(range(1000))

    def fail(current: str) -> None:
        if current == phase and (phase == "prefill" or next(calls) == 3) and failures:
            raise failures.pop()

    engine = engine_over(FakeExecutor(geometry(max_batch_size=2), fail=fail), overlap=True)
    requests = [engine.submit(prompt_of(5, i), SamplingParams(max_new_tokens=9)) for i in range(3)]
    with pytest.raises(RuntimeError, match="device lost"):
        drain(engine)
    assert [r.finish_reason for r in requests] == ["error", "error", None]
    assert not engine._scheduler.launches.in_flight
    engine._executor._in_flight.clear()  # what was launched is lost
    drain(engine)
    assert requests[2].output_token_ids == toy_decode(requests[2].prompt_token_ids, 9, VOCAB)
    assert_nothing_held(engine)


def test_a_failing_read_in_an_abort_spares_the_waiting():
    failures: list[Exception] = []

    def fail(phase: str) -> None:
        if phase == "collect" and failures:
            raise failures.pop()

    engine = engine_over(FakeExecutor(geometry(max_batch_size=1), fail=fail), overlap=True)
    gone, kept = (engine.submit(prompt_of(5, i), SamplingParams(max_new_tokens=9)) for i in (0, 1))
    for _ in range(3):
        engine.step()
    assert engine._scheduler.launches.in_flight
    failures.append(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.abort(gone)
    assert (gone.finish_reason, kept.finish_reason) == ("aborted", None)
    engine._executor._in_flight.clear()  # what was launched is lost
    drain(engine)
    assert kept.output_token_ids == toy_decode(kept.prompt_token_ids, 9, VOCAB)
    assert_nothing_held(engine)


def test_a_request_that_its_tokenizer_ends_holds_nothing():
    class Tokenizer:
        num_calls = 0

        def encode(self, text: str) -> list[int]:
            raise NotImplementedError

        def decode(self, token_ids: list[int], **options: object) -> str:
            self.num_calls += 1
            if self.num_calls > 6:
                raise ValueError("a bad id")
            return "x" * len(token_ids)

    engine = engine_over(FakeExecutor(geometry()), tokenizer=Tokenizer(), overlap=True)
    *_, last = engine.stream(prompt_of(3), SamplingParams(max_new_tokens=50))
    assert isinstance(last.output.error, TokenizerFailed)
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5], ids="K{}".format)
def test_the_model_of_the_step_agrees(num_draft_tokens):
    """In lockstep: what is delivered, one step late, and how many blocks a row holds by then."""
    toy = Toy(vocab_size=VOCAB, agreement=1.0, eos_rate=0.0)
    executor = FakeExecutor(
        geometry(num_draft_tokens=num_draft_tokens, max_seq_len=96, num_blocks=60),
        hit_rate=1.0, next_token=lambda tokens: toy.target(tuple(tokens)),
    )  # fmt: skip
    engine = engine_over(executor, overlap=True)
    model = StepModel(
        "none", num_draft_tokens, max_rows=4, max_seq_len=96, block_size=8, num_blocks=60,
        overlap=True, oracle=toy,
    )  # fmt: skip
    prompts = [prompt_of(length) for length in (1, 7, 9, 20)]
    params = SamplingParams(max_new_tokens=90, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    rows = [model.admit(prompt) for prompt in prompts]
    model.prefill([(row, len(prompt)) for row, prompt in zip(rows, prompts, strict=True)])
    engine.step()
    model.decode(rows)
    while all(not request.finished for request in requests):
        engine.step()
        model.decode(rows)
        for request, twin in zip(requests, model.requests, strict=True):
            assert request.output_token_ids == twin.output
            if not request.finished:
                assert len(request.blocks) == len(model.rows[twin.row].table)
    assert any(request.output_token_ids for request in requests)
