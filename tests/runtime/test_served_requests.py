"""What servers need of an engine's thread: limits, health, draining, more in its outputs."""

from __future__ import annotations

import asyncio

import pytest

from compilespec import SamplingParams
from compilespec.errors import EngineClosed, InvalidRequest, QueueFull
from compilespec.runtime import engine_thread
from compilespec.runtime.engine import Engine
from compilespec.runtime.token_bytes import TokenBytes
from tests.support.fake_executor import FakeExecutor, engine_over, geometry, toy_decode
from tests.support.gates import Gate
from tests.support.toy_tokenizer import byte_level_tokenizer

SIZES = geometry()  # 4 requests run at once


def made(**options: object) -> Engine:
    return Engine(FakeExecutor(SIZES, hit_rate=0.6, **options))  # type: ignore[arg-type]


def params(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **fields)  # type: ignore[arg-type]


def test_a_full_queue_refuses_and_has_room_once_one_has_ended() -> None:
    gate = Gate()
    with made(fail=gate).serve(max_waiting=2) as server:
        tickets = [server.submit([k], params(6)) for k in range(6)]
        with pytest.raises(QueueFull, match="6 requests are open: expected at most 6"):
            server.submit([9], params(2))
        tickets[5].abort()
        gate.allow()
        assert tickets[5].result(60).finish_reason == "aborted"
        for ticket in tickets:  # at the end of each there is room for another one
            ticket.result(60)
            server.submit([9], params(1)).result(60)
        with pytest.raises(QueueFull):
            server.submit_samples([9], params(2, n=7))
        assert server.health().num_open == 0
    for wrong in (-1, True, "2"):
        with pytest.raises(InvalidRequest, match="max_waiting: expected an integer"):
            made().serve(max_waiting=wrong)  # type: ignore[arg-type]


def test_draining_ends_what_there_is_and_takes_no_more() -> None:
    gate = Gate()
    server = made(fail=gate).serve()
    tickets = [server.submit([k], params(9)) for k in range(6)]
    assert not server.drain(timeout=0.01)
    assert server.health().state == "draining"
    with pytest.raises(EngineClosed, match="takes no more"):
        server.submit([1])
    gate.allow()
    assert server.drain(timeout=60)
    for k, ticket in enumerate(tickets):
        assert ticket.finished
        assert ticket.result().token_ids == toy_decode([k], 9, SIZES.config.vocab_size)
    server.close()
    assert server.health().state == "closed"


def test_health_and_stats_wait_for_no_step() -> None:
    gate = Gate(2)
    with made(fail=gate).serve() as server:
        idle = server.health()
        assert (idle.state, idle.num_open, idle.step_ms, idle.failure) == ("ready", 0, 0.0, None)
        ticket = server.submit([1], params(20))
        assert gate.waits.wait(60)
        busy = server.health()
        assert (busy.state, busy.num_open) == ("ready", 1)
        assert busy.step_ms > 0
        assert server.stats().num_running == 1
        gate.allow()
        ticket.result(60)


def test_a_thread_that_failed_says_why() -> None:
    def fail(phase: str) -> None:
        raise SystemExit(3)

    server = made(fail=fail).serve()
    server.submit([1], params(3)).result(60)
    health = server.health()
    assert (health.state, health.num_open) == ("failed", 0)
    assert "SystemExit: 3" in str(health.failure)
    server.close()


def test_samples_have_a_ticket_each_and_go_by_priority() -> None:
    gate = Gate()
    with made(fail=gate).serve() as server:
        low = [server.submit([k], params(9)) for k in range(5)]
        high = server.submit_samples([1, 2], params(9, n=2), priority=3)
        gate.allow()
        outputs = [ticket.result(60) for ticket in high]
        assert [o.token_ids for o in outputs] == [
            toy_decode([1, 2], 9, SIZES.config.vocab_size)
        ] * 2
        started = [t.request.timings.admitted_ms for t in (*high, low[-1])]
        assert max(started[:2]) <= started[2]
        assert [ticket.request.sample for ticket in high] == [0, 1]


@pytest.mark.parametrize("pause_ms", [0, 60_000])
def test_a_step_wakes_an_event_loop_once_for_all_of_its_readers_or_not_at_all(
    pause_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "WAKE_UP_PAUSE_MS", pause_ms)
    calls: list[int] = []

    async def read() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            calls.append(1)
            return call(*arguments)  # type: ignore[arg-type]

        tickets = [server.submit([k], params(20)) for k in range(4)]
        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
        readers = [asyncio.create_task(batches(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        gate.allow()
        counts = [await reader for reader in readers]
        loop.call_soon_threadsafe = call  # type: ignore[method-assign]
        return counts

    async def batches(ticket: object) -> tuple[int, int]:
        count = tokens = 0
        async for deltas in ticket.batches():  # type: ignore[attr-defined]
            count += 1
            tokens += sum(len(delta.token_ids) for delta in deltas)
        return count, tokens

    gate = Gate()
    engine = made(fail=gate)
    with engine.serve() as server:
        counts = asyncio.run(read())
        assert [tokens for _, tokens in counts] == [20] * 4
        stats = server.stats()
        num_steps = sum(stats.num_decodes_by_bucket.values()) + stats.num_prefills
        assert len(calls) <= (num_steps if pause_ms == 0 else 4) + 1  # in a pause ends alone
        if pause_ms:
            assert max(count for count, _ in counts) <= 5 < num_steps


def test_steps_that_take_longer_than_the_pause_are_told_of_one_by_one() -> None:
    async def read() -> int:
        count = 0
        async for _ in server.submit([3, 1], params(20)).batches():
            count += 1
            await asyncio.sleep(engine_thread.WAKE_UP_PAUSE_MS * 2 / 1e3)
            gate.allow(1)
        return count

    def wait(phase: str) -> None:
        if phase == "decode":
            gate(phase)

    gate = Gate(1)
    with made(fail=wait).serve() as server:
        count = asyncio.run(read())
        assert count == server.stats().num_verify_steps > 5  # the first is with the prefill


def test_deltas_say_which_tokens_were_drafts_and_have_their_logprobs() -> None:
    engine = made()
    deltas = list(engine.stream([3, 1], params(25, logprobs=0)))
    output = deltas[-1].output
    tokens = [token for delta in deltas for token in delta.token_ids]
    drafted = [flag for delta in deltas for flag in delta.drafted]
    values = [one.logprob for delta in deltas for one in delta.logprobs or ()]
    assert tokens == output.token_ids
    assert values == [-float(token) for token in tokens]
    assert drafted[0] is False  # it comes from prefill
    steps = iter(drafted[1:])
    for emitted in output.emitted_per_step[:-1]:  # the last step may be cut at the limit
        assert [next(steps) for _ in range(emitted)] == [True] * (emitted - 1) + [False]
    assert output.num_accepted_drafts == sum(drafted) > 0
    judged = SIZES.config.num_draft_tokens * len(output.emitted_per_step)
    assert output.num_accepted_drafts + output.num_rejected_drafts == judged
    own = engine.generate([3, 1], params(25, num_draft_tokens=1))[0]
    assert own.num_rejected_drafts < judged


@pytest.fixture(scope="module")
def tokenizer() -> object:
    tokens = [*(bytes([byte]) for byte in range(256)), "<eos>", " ä".encode(), "€".encode()[:2]]
    return byte_level_tokenizer(tokens, eos="<eos>")


def test_what_stopped_an_output_is_named(tokenizer: object) -> None:
    def says(text: bytes) -> Engine:
        def following(context: list[int]) -> int:
            return [*text, 256][(len(context) - 2) % (len(text) + 1)]

        executor = FakeExecutor(geometry(vocab_size=259), next_token=following)
        return engine_over(executor, tokenizer=tokenizer, eos_token_ids=(256,))

    engine = says(b"one two three")

    def stop(**fields: object) -> object:
        asked = SamplingParams(max_new_tokens=30, **fields)  # type: ignore[arg-type]
        return engine.generate([1, 2], asked)[0].stopped_by

    assert stop(stop=("zzz", " t", "e t")) == "e t"  # it begins first
    assert stop(stop=("two", "o", " t")) == "o"
    assert stop(stop_token_ids=(ord("w"),)) == ord("w")
    assert stop() == 256
    assert engine.generate([1, 2], params(3))[0].stopped_by is None


def test_bytes_of_tokens(tokenizer: object) -> None:
    spelled = TokenBytes(tokenizer)
    assert [spelled(i) for i in (65, 200, 256)] == [b"A", b"\xc8", b"<eos>"]
    assert (spelled(257), spelled(258)) == (" ä".encode(), b"\xe2\x82")
    assert (spelled.text(257), spelled.text(258)) == (" ä", "bytes:\\xe2\\x82")
    assert spelled(300) == b""


def test_bytes_of_sentencepiece_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"\u2581the": 0, "<0xE2>": 1, "s": 2, "<s>": 3}, []))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    spelled = TokenBytes(tokenizer)
    assert [spelled(i) for i in range(4)] == [b" the", b"\xe2", b"s", b"<s>"]
