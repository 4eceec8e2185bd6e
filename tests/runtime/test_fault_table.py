"""The fault table: what goes wrong, who suffers, what it is told, and that nobody else notices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import compilespec
from compilespec.errors import DraftFailed, EngineClosed, InvalidRequest, NanLogits, TokenizerFailed
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import (
    VOCAB,
    FakeExecutor,
    engine_over,
    geometry,
    prompt_of,
    toy_decode,
)
from tests.support.models import assert_nothing_held, greedy_reference, target_info, tiny_target

COUNT = 24
VICTIM = 1  # the second of four requests, and its row


class Letters:
    """One character a token; raises for the tokens that it is told to."""

    def __init__(self) -> None:
        self.poisoned: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        if self.poisoned & set(token_ids):
            raise KeyError("no such piece")
        return "".join(chr(0x100 + token) for token in token_ids)


@dataclass
class Scene:
    """An engine with four requests, and the faults that can be put into it."""

    engine: Engine
    executor: FakeExecutor
    tokenizer: Letters
    requests: list[Request]

    @property
    def victim(self) -> Request:
        return self.requests[VICTIM]


def nan_in(phase: str) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.executor.spoil = lambda current, row: (current, row) == (phase, scene.victim.row)

    return inject


def tokenizer_raises(scene: Scene) -> None:
    said = toy_decode(scene.victim.prompt_token_ids, COUNT, VOCAB)
    others = {
        token
        for request in scene.requests
        if request is not scene.victim
        for token in [
            *request.prompt_token_ids, *toy_decode(request.prompt_token_ids, COUNT, VOCAB)
        ]
    }  # fmt: skip
    scene.tokenizer.poisoned = frozenset({next(t for t in said[3:] if t not in others)})


def saving_fails(scene: Scene) -> None:
    def on_finish(request: Request, reason: str) -> None:
        if request is scene.victim:
            raise OSError("no space left on device")

    scene.engine._scheduler._on_finish = on_finish


def drafting_fails(scene: Scene) -> None:
    def propose(token_ids: list[int]) -> list[int]:
        if len(token_ids) > len(scene.victim.prompt_token_ids) + 4:
            beginning = tuple(token_ids[: len(scene.victim.prompt_token_ids)])
            if beginning == scene.victim.prompt_token_ids:
                raise ZeroDivisionError("my mistake")
        return []

    scene.engine._scheduler._propose = propose
    scene.engine._scheduler._overlap = False  # as the pipeline has it for such programs


def is_aborted(scene: Scene) -> None:
    scene.engine.abort(scene.victim)


@dataclass(frozen=True)
class Fault:
    """What is injected, after how many steps, and what the one that suffers is told."""

    inject: Callable[[Scene], None]
    after: int
    reason: str
    error: type[Exception] | None = None
    says: str = ""


FAULTS = {
    "abort before its turn": Fault(is_aborted, 0, "aborted"),
    "abort while its prompt goes in": Fault(is_aborted, 1, "aborted"),
    "abort while it decodes": Fault(is_aborted, 6, "aborted"),
    "NaN in its prompt's logits": Fault(nan_in("prefill"), 1, "error", NanLogits, "held NaN"),
    "NaN in a step's logits": Fault(nan_in("decode"), 6, "error", NanLogits, "token 6[0-9] of"),
    "tokenizer raises": Fault(tokenizer_raises, 1, "error", TokenizerFailed, "KeyError"),
    "saving raises": Fault(saving_fails, 1, "error", OSError, "no space"),
    "drafting raises": Fault(drafting_fails, 1, "error", DraftFailed, "ZeroDivisionError"),
}


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    """The victim's prompt takes several steps; the last of the four waits for a row.  Two prompts
    begin alike.
    """
    overlap, lookahead = request.param
    executor = FakeExecutor(
        geometry(max_batch_size=3, max_prefill_tokens=24), lookahead=lookahead or 0
    )
    tokenizer = Letters()
    engine = engine_over(executor, tokenizer=tokenizer, overlap=overlap, lookahead=lookahead)
    shared = prompt_of(20)
    prompts = [shared, [*shared, *prompt_of(30)], prompt_of(7), prompt_of(9)]
    params = SamplingParams(max_new_tokens=COUNT, stop=("never said",))
    requests = [engine.submit(prompt, params) for prompt in prompts]
    return Scene(engine=engine, executor=executor, tokenizer=tokenizer, requests=requests)


WAYS = pytest.mark.parametrize(
    "scene", [(False, None), (True, None), (True, 1)], ids=["plain", "overlap", "all"],
    indirect=True,
)  # fmt: skip


@WAYS
@pytest.mark.parametrize("name", FAULTS)
def test_only_the_victim_suffers(scene, name):
    fault, engine = FAULTS[name], scene.engine
    for _ in range(fault.after):
        engine.step()
    fault.inject(scene)
    while engine.has_work:
        engine.step()
    victim = scene.victim
    assert victim.finish_reason == fault.reason
    if fault.error is None:
        assert victim.error is None
    else:
        assert isinstance(victim.error, fault.error)
        assert "\n" not in str(victim.error)
        assert re.search(fault.says, str(victim.error))
    told = victim.output_token_ids
    assert told == toy_decode(victim.prompt_token_ids, len(told), VOCAB)
    for other in scene.requests:
        if other is not victim:
            assert other.finish_reason == "length", other.error
            assert other.output_token_ids == toy_decode(other.prompt_token_ids, COUNT, VOCAB)
    assert_nothing_held(engine)
    (again,) = engine.generate([prompt_of(9)], SamplingParams(max_new_tokens=COUNT))
    assert again.token_ids == toy_decode(prompt_of(9), COUNT, VOCAB)


@WAYS
@pytest.mark.parametrize("phase", ["prefill", "decode", "collect"])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
def test_a_failing_program_spares_those_who_wait(scene, phase, error):
    engine = scene.engine
    for _ in range(4):
        engine.step()
    late = [engine.submit(prompt_of(3, seed)) for seed in range(4)]  # prefills to come

    def fail(current: str) -> None:
        if current == phase:
            raise error

    scene.executor.fail = fail
    running = step_until_it_raises(engine, error)
    scene.executor.fail = lambda current: None
    scene.executor._in_flight.clear()
    ended = "error" if isinstance(error, RuntimeError) else "aborted"
    assert running
    assert {r.finish_reason for r in running} == {ended}
    while engine.has_work:
        engine.step()
    for request in [*scene.requests, *late]:
        told = request.output_token_ids
        assert told == toy_decode(request.prompt_token_ids, len(told), VOCAB)
        assert request.finish_reason == (ended if request in running else "length")
    assert_nothing_held(engine)


def step_until_it_raises(engine: Engine, error: BaseException) -> list[Request]:
    """Returns the requests that were running then."""
    while True:
        before = list(engine._scheduler.line.running)
        room = engine.geometry.config.max_batch_size - len(before)
        admitted = list(engine._scheduler.line.waiting)[:room]
        try:
            engine.step()
        except type(error):
            return [r for r in [*before, *admitted] if r.finish_reason != "length"]


@WAYS
def test_close_with_requests_in_flight(scene):
    for _ in range(5):
        scene.engine.step()
    scene.engine.close()
    assert scene.executor.closed
    for request in scene.requests:
        told = request.output_token_ids
        assert request.finish_reason == "aborted"
        assert told == toy_decode(request.prompt_token_ids, len(told), VOCAB)
    with pytest.raises(EngineClosed):
        scene.engine.step()
    scene.engine.close()


@WAYS
def test_a_client_that_stops_reading_holds_up_nobody(scene):
    """Its tokens wait, as many as it asked for; leaving frees what it holds."""
    engine = scene.engine
    left = engine.stream([prompt_of(11), prompt_of(13)], SamplingParams(max_new_tokens=COUNT))
    unread = engine.stream([prompt_of(12)], SamplingParams(max_new_tokens=COUNT))
    first = next(left)
    next(unread)
    left.close()
    outputs = engine.generate([prompt_of(5), prompt_of(6)], SamplingParams(max_new_tokens=COUNT))
    while engine.has_work:
        engine.step()
    assert first.token_ids
    for request in scene.requests:
        assert request.output_token_ids == toy_decode(request.prompt_token_ids, COUNT, VOCAB)
    for output, length in zip(outputs, (5, 6), strict=True):
        assert output.token_ids == toy_decode(prompt_of(length), COUNT, VOCAB)
    assert_nothing_held(engine)
    rest = list(unread)  # it reads on: all there is, at once
    assert len(rest) == 1
    assert rest[0].output.token_ids == toy_decode(prompt_of(12), COUNT, VOCAB)


@WAYS
def test_what_can_never_fit_is_refused_and_nothing_else(scene):
    small = Engine(FakeExecutor(geometry(num_blocks=5)))
    with pytest.raises(InvalidRequest, match="kv_cache_tokens of at least"):
        small.submit([1] * 20, SamplingParams(max_new_tokens=40))
    good, bad = small.generate(
        [prompt_of(9), prompt_of(20)],
        [SamplingParams(max_new_tokens=9), SamplingParams(max_new_tokens=40)],
    )
    assert good.token_ids == toy_decode(prompt_of(9), 9, VOCAB)
    assert isinstance(bad.error, InvalidRequest)


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_tokenizer_that_raises_when_text_is_asked_for(how):
    """Without stop strings text is made when somebody reads it."""
    tokenizer = Letters()
    engine = Engine(FakeExecutor(), tokenizer=tokenizer)
    prompts = [prompt_of(5), prompt_of(6)]
    said = [toy_decode(prompt, COUNT, VOCAB) for prompt in prompts]
    kept = {*prompts[1], *said[1]}
    tokenizer.poisoned = frozenset({next(t for t in said[0][5:] if t not in kept)})
    params = SamplingParams(max_new_tokens=COUNT)
    if how == "generate":
        outputs = engine.generate(prompts, params)
    else:
        ends = {d.index: d.output for d in engine.stream(prompts, params) if d.output is not None}
        outputs = [ends[0], ends[1]]
    assert isinstance(outputs[0].error, TokenizerFailed)
    assert (outputs[0].finish_reason, outputs[0].text) == ("error", None)
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("length", said[1])
    assert len(outputs[1].text) == COUNT
    assert_nothing_held(engine)


def test_nan_on_the_device():
    """A real step: the row whose cache went bad is told, its neighbours' tokens stay, and nobody
    finds its blocks afterwards.
    """
    model = tiny_target("llama", num_layers=2)
    info = target_info(model, 64)
    prompts = [[5, 6, 7] * 7, [9, 8, 4], [5, 6, 7] * 7 + [3]]
    with compilespec.compile(
        model, spec="eagle3", draft=random_head(info, aux_layers=(0, 1, 2)), num_draft_tokens=2,
        backend="eager", max_batch_size=3, max_seq_len=64, max_prefill_tokens=32, overlap=True,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        victim, other = (engine.submit(prompt, params) for prompt in prompts[:2])
        for _ in range(4):
            engine.step()
        engine._executor.buffers["cache.target.1.value"][victim.blocks[0], 2].fill_(torch.nan)
        while engine.has_work:
            engine.step()
        assert isinstance(victim.error, NanLogits)
        told = victim.output_token_ids
        assert 0 < len(told) < 20
        assert told == greedy_reference(model, prompts[0], len(told))
        assert other.output_token_ids == greedy_reference(model, prompts[1], 20)
        (heir,) = engine.generate([prompts[2]], params)
        assert heir.token_ids == greedy_reference(model, prompts[2], 20)
        assert engine.stats().num_cached_tokens == 0
        assert_nothing_held(engine)
        for name, weight in engine.executor.weights.items():
            if "embed" in name:
                weight[9] = torch.nan  # a prompt that has this token
        (output,) = engine.generate([prompts[1]], params)
        assert isinstance(output.error, NanLogits)
        assert output.token_ids == []
