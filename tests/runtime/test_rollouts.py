"""Rollouts and their log-probabilities; memory that goes back between phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import Quantize, SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.rollouts import derived_seed, why_not_exact
from compilespec.training import log_probs
from tests.support.drafters import traced_info
from tests.support.models import even_target, tiny_target

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 40)), [11] * 9]
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True)


def compiled(model: nn.Module, **options: Any) -> Engine:
    sizes = {"max_batch_size": 4, "max_seq_len": 96, "max_prefill_tokens": 32}
    return compilespec.compile(
        model, **{"backend": "eager", "prompt_logprobs": True, **sizes, **options}
    )


def eagle3(model: nn.Module) -> dict[str, Any]:
    draft = random_head(traced_info(model), aux_layers=(0, 1, 2))
    return {"spec": "eagle3", "draft": draft, "num_draft_tokens": 3}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return even_target(num_layers=2)


@pytest.fixture(scope="module")
def engine(model: nn.Module) -> Iterator[Engine]:
    with compiled(model, spec="ngram", num_draft_tokens=3) as engine:
        yield engine


CASES: dict[str, tuple[torch.dtype, Callable[[nn.Module], dict[str, Any]], dict[str, Any]]] = {
    "plain": (torch.float32, lambda model: {}, {}),
    "bf16": (torch.bfloat16, lambda model: {"spec": "ngram", "num_draft_tokens": 3}, {}),
    "eagle3": (torch.float32, eagle3, {}),
    "int8": (
        torch.float32,
        lambda model: {"quantize": Quantize("int8_weight_only", skip="lm_head")},
        {},
    ),
    "compiled": (torch.float32, lambda model: {"spec": "ngram"}, {"backend": "inductor"}),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_the_trainers_bit_for_bit(case: str) -> None:
    dtype, spec, options = CASES[case]
    model = even_target(num_layers=2).to(dtype)
    with compiled(model, **spec(model), **options) as engine:
        rollouts = [one for few in engine.rollout(PROMPTS, 2, 5, SAMPLING) for one in few]
        assert {one.why_not_exact for one in rollouts} == {None}
        scored = log_probs(engine, [[*r.prompt_token_ids, *r.token_ids] for r in rollouts])
        for rollout, found in zip(rollouts, scored, strict=True):
            own = found[len(rollout.prompt_token_ids) - 1 :]
            assert own.tolist() == list(rollout.log_probs)
            assert len(own) == 20


def test_rollouts_are_replayed_by_seed_and_step(engine: Engine) -> None:
    first = engine.rollout(PROMPTS, 3, 7, SAMPLING, step=2)
    engine.reset_prefix_cache()
    again = engine.rollout(PROMPTS, 3, 7, SAMPLING, step=2)
    other = engine.rollout(PROMPTS, 3, 7, SAMPLING, step=3)
    facts = [[(r.token_ids, r.log_probs) for r in few] for few in first]
    assert facts == [[(r.token_ids, r.log_probs) for r in few] for few in again]
    assert facts != [[(r.token_ids, r.log_probs) for r in few] for few in other]
    assert [len({tuple(r.token_ids) for r in few}) for few in first] == [3, 3, 3]
    assert [[r.sample for r in few] for few in first] == [[0, 1, 2]] * 3
    assert first[1][0].seed == derived_seed(7, 2, 1)
    (alone,) = engine.rollout(PROMPTS[1], 3, [first[1][0].seed], SAMPLING)
    assert [(r.token_ids, r.log_probs) for r in alone] == facts[1]
    assert alone[0].acceptance_length >= 1
    assert alone[0].weights_version == engine.weights_version


def test_gradients_are_the_modules_and_values_the_engines(engine: Engine, model: nn.Module) -> None:
    ids = [[5, 6, 7, 8, 9, 10], [20, 21, 22]]
    values = log_probs(engine, ids)
    trained = log_probs(engine, ids, model=model)
    assert all(torch.equal(a, b.detach()) for a, b in zip(values, trained, strict=True))
    model.zero_grad()
    torch.cat(trained).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for one in ids:
        logits = model(torch.tensor([one])).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(one)[1:, None])
        own.sum().backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    model.zero_grad()


def test_what_it_cannot_do_is_refused(engine: Engine, model: nn.Module) -> None:
    with pytest.raises(InvalidRequest, match="n= and seeds= are keywords"):
        engine.rollout(PROMPTS, sampling=SamplingParams(seed=3))
    with pytest.raises(InvalidRequest, match="one for each of the 3 prompts"):
        engine.rollout(PROMPTS, 2, [1, 2], SAMPLING)
    with pytest.raises(InvalidRequest, match="step must be an integer"):
        engine.rollout(PROMPTS, 2, 1, SAMPLING, step=-1)
    with pytest.raises(InvalidOption, match="expected the engine that samples"):
        log_probs(model, [[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"update_weights\(model\)"):
        log_probs(engine, [[5, 6, 7, 8]], model=even_target(num_layers=2, seed=1))


@pytest.mark.parametrize(
    ("family", "why"), [("qwen3_moe", "experts"), ("qwen3_next", "recurrent layers")]
)
def test_models_whose_rows_depend_on_each_other_say_so(family: str, why: str) -> None:
    program = compilespec.trace(
        tiny_target(family, torch.float32, num_layers=2), max_seq_len=32, keep_graphs=False
    )
    assert why in str(why_not_exact(program))


# --- sleep and wake ---


def num_resident(engine: Engine) -> int:
    """Bytes of the caches' own memory that are there."""
    wanted = {
        buffer.untyped_storage().data_ptr()
        for name, buffer in engine.executor.buffers.items()  # type: ignore[attr-defined]
        if name.startswith("cache.")
    }
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(part, 16) for part in head.split("-"))
            is_wanted = any(first <= place < end for place in wanted)
        elif is_wanted and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_sleep_gives_the_caches_back_and_tokens_are_right_after_it() -> None:
    model = even_target(num_layers=2)
    with compiled(model, max_batch_size=64, max_seq_len=128, prompt_logprobs=False) as engine:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        wanted = [one.token_ids for one in engine.generate(PROMPTS, params)]
        before = num_resident(engine)
        request = engine.submit(PROMPTS[0], params)
        engine.step()
        with pytest.raises(InvalidRequest, match="requests run or wait"):
            engine.sleep()
        engine.abort(request)
        assert engine.sleep() > 2**20
        assert num_resident(engine) < before / 2
        with pytest.raises(InvalidRequest, match=r"the engine sleeps: call wake\(\)"):
            engine.generate(PROMPTS)
        engine.update_weights(model)  # also while it sleeps
        engine.wake()
        outputs = engine.generate(PROMPTS, params)
        assert [one.token_ids for one in outputs] == wanted
        assert [one.num_cached_tokens for one in outputs] == [0, 0, 0]
        with engine.serve() as server:
            assert server.sleep() > 2**20
            with pytest.raises(InvalidRequest, match="sleeps"):
                server.submit(PROMPTS[0], params)
            server.wake()
            assert [one.token_ids for one in server.generate(PROMPTS, params)] == wanted
