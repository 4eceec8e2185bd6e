"""Recurrent layers between attention layers: their states survive rejected drafts.

test_families.py has every family with drafts right, wrong and partly right.  Here are the things
that a state, which cannot be read by position, might get wrong: chunks, preemption, other steps
than the one before, drafters with their own states.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import UnsupportedState
from compilespec.methods.eagle3 import random_head
from compilespec.methods.mtp import random_modules
from compilespec.runtime import kept_states
from compilespec.runtime.engine import Engine
from tests.support.models import (
    HYBRIDS,
    Ask,
    RecycledDrafter,
    ask_all,
    assert_nothing_held,
    poison,
    run_traffic,
    target_info,
    tiny_hybrid,
    tiny_target,
)

DEFAULT = ("qwen3_5",)  # test_families.py has nemotron_h in the default run
MAX_SEQ_LEN = 70
SIZES = ((40, 23), (3, 30), (17, 22), (2, 19), (33, 8), (66, 4), (1, 12))
FAMILY = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in DEFAULT else pytest.mark.slow) for f in HYBRIDS],
)


@functools.cache
def asked(family: str) -> tuple[nn.Module, tuple[Ask, ...]]:
    """The default run's has a layer with a state and one with attention, the others four layers."""
    model = tiny_hybrid(family) if family in DEFAULT else tiny_target(family)
    return model, tuple(ask_all(model, SIZES))


def engine_of(model: nn.Module, spec: str, **options: Any) -> Engine:
    """Prompts are cut into chunks of 11, and there are too few blocks for all rows."""
    sizes = {"max_batch_size": 4, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 11}
    return compilespec.compile(
        model, spec=spec, backend="eager", **{**sizes, "kv_cache_tokens": 96, **options}
    )


def assert_own_tokens(engine: Engine, asks: Sequence[Ask]) -> None:
    poison(engine)
    requests = run_traffic(engine, asks, (1, 3, 4, 2, 4))
    assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
    assert_nothing_held(engine)
    assert engine.stats().num_recompiles == 0


@FAMILY
def test_chunks_and_preemption_with_several_k(family: str) -> None:
    model, asks = asked(family)
    head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    with engine_of(model, "eagle3", draft=head, num_draft_tokens=(0, 4)) as engine:
        assert_own_tokens(engine, asks)
        assert engine.stats().num_preemptions > 0


@FAMILY
def test_a_windowed_drafter_repeats_tokens_that_the_states_do_not_take_twice(family: str) -> None:
    model, asks = asked(family)
    modules = random_modules(target_info(model, MAX_SEQ_LEN), 3)
    with engine_of(model, "mtp", draft=modules, num_draft_tokens=3) as engine:
        assert_own_tokens(engine, asks)


@FAMILY
@pytest.mark.parametrize("num_draft_tokens", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_draft_model_with_the_targets_weights_is_always_right(
    family: str, num_draft_tokens: int
) -> None:
    """Its states must follow the accepted drafts, and forget the others."""
    model, asks = asked(family)
    options = {"draft": copy.deepcopy(model), "num_draft_tokens": num_draft_tokens}
    with engine_of(model, "draft_model", **options) as engine:
        assert_own_tokens(engine, asks)
        for request in run_traffic(engine, asks[:4], (3,)):
            *whole, _ = request.emitted_per_step
            assert whole == [num_draft_tokens + 1] * len(whole)


def test_a_hybrid_draft_model_serves_a_target_of_attention() -> None:
    model = tiny_target("llama", num_layers=2)
    asks = ask_all(model, SIZES[:5])
    with engine_of(model, "draft_model", draft=tiny_target("lfm2"), num_draft_tokens=3) as engine:
        assert_own_tokens(engine, asks)
        assert engine.plan()["prefix_caching"] == "on"


@FAMILY
@pytest.mark.parametrize(
    "spec", ["ngram", "mtp", pytest.param("draft_model", marks=pytest.mark.slow)]
)
def test_requests_that_begin_alike_start_from_kept_states(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts go on from others and their answers, under preemption, twice over: cold and warm."""
    monkeypatch.setattr(kept_states, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(kept_states, "RUNG", 2)
    model, asks = asked(family)
    options: dict[str, Any] = {"max_prefill_tokens": 19, "num_draft_tokens": 3}
    if spec == "mtp":
        options["draft"] = random_modules(target_info(model, MAX_SEQ_LEN), 3)
    if spec == "draft_model":
        options["draft"] = tiny_target(family, seed=1)
    longer = [
        Ask(prompt=(*ask.prompt, *ask.tokens[:count]), tokens=ask.tokens[count:])
        for ask in asks[:5]
        for count in (1, 4, len(ask.tokens) - 2)
    ]
    with engine_of(model, spec, max_cached_states=5, **options) as engine:
        assert_own_tokens(engine, asks)
        asked_again = [*longer, *asks[:3], *longer]
        requests = run_traffic(engine, asked_again, (2, 4))
        assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asked_again]
        assert engine.stats().num_cached_tokens > 100
        assert engine.stats().num_preemptions > 0
        assert_nothing_held(engine)
        kept = engine.plan()["cached_states_mib"] * 2**20
        assert kept == sum(copies.nbytes for _, copies in engine._executor._copies.pairs)
        assert kept > 0


def test_a_second_request_with_8000_shared_tokens_takes_a_tenth_of_the_time() -> None:
    """Time to the first token, with copies of states as they are kept by default."""
    config = HYBRIDS["qwen3_5"]()
    config.max_position_embeddings, config.num_hidden_layers = 8192, 2
    config.hidden_size, config.intermediate_size = 512, 1536
    config.layer_types = config.layer_types[:2]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(0)
    shared, *ends = (
        torch.randint(3, config.vocab_size, (count,), generator=draw).tolist()
        for count in (8000, 23, 41)
    )
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    said, seconds = [], []
    sizes = {"max_seq_len": 8192, "max_batch_size": 2, "num_draft_tokens": 2}
    for options in ({}, {"enable_prefix_caching": False}):
        with engine_of(model, "ngram", max_prefill_tokens=2048, kv_cache_tokens=None,
                       **{**sizes, **options}) as engine:  # fmt: skip
            outputs = [engine.generate([*shared, *end], params)[0] for end in ends]
        said.append([output.token_ids for output in outputs])
        seconds.append([output.timings.time_to_first_token_ms for output in outputs])
    assert said[0] == said[1]
    (first, second), _ = seconds
    print(f"time to the first token: {first:.0f} ms, then {second:.0f} ms; {seconds[1]} without")
    assert outputs[1].num_cached_tokens == 0
    assert second <= 0.1 * first


def test_without_copies_of_states_no_prefix_is_shared() -> None:
    model, asks = asked("qwen3_5")
    with engine_of(model, "none", max_cached_states=0) as engine:
        assert engine.plan()["prefix_caching"].startswith("off: max_cached_states=0")
        assert_own_tokens(engine, [*asks[:2], *asks[:2]])
        assert engine.stats().num_cached_tokens == engine.plan()["cached_states_mib"] == 0


@FAMILY
def test_sampled_tokens_are_those_of_plain_decoding(family: str) -> None:
    model, asks = asked(family)
    prompts = [list(ask.prompt) for ask in asks[:4]]
    params = [
        SamplingParams(max_new_tokens=20, temperature=1.2, top_p=0.9, seed=n, ignore_eos=True)
        for n in range(4)
    ]
    said = []
    for spec, options in (
        ("none", {}),
        ("ngram", {"num_draft_tokens": 3}),
        ("draft_model", {"num_draft_tokens": 2, "draft": tiny_target(family, seed=1)}),
    ):
        with engine_of(model, spec, **options) as engine:
            said.append([output.token_ids for output in engine.generate(prompts, params)])
    assert said[0] == said[1] == said[2]


def test_samples_of_one_prompt_and_an_abort() -> None:
    model, asks = asked("qwen3_5")
    with engine_of(model, "ngram", num_draft_tokens=3) as engine:
        doomed = engine.submit(list(asks[0].prompt), SamplingParams(max_new_tokens=20))
        for _ in range(5):
            engine.step()
        engine.abort(doomed)
        sampled = SamplingParams(max_new_tokens=10, n=2, temperature=0.7, seed=3, ignore_eos=True)
        assert len(engine.generate([list(asks[2].prompt)], sampled)) == 2
        assert_own_tokens(engine, asks[:3])


def test_a_drafter_whose_states_cannot_be_rewound_is_refused() -> None:
    class Recurrent(RecycledDrafter):
        num_draft_tokens, aux_layers = 3, (0, 1, 2)

        def combine(self, aux: torch.Tensor) -> torch.Tensor:
            return aux[..., :2]

        def forward(
            self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            kept = torch.ops.compilespec.causal_conv(hidden, hidden.new_ones(2, 3), None)
            return kept, kept

        def propose(self, head_input: torch.Tensor) -> torch.Tensor:
            return head_input[:, 0].to(torch.int32)

    with pytest.raises(UnsupportedState, match="could not rewind; use one whose layers"):
        engine_of(tiny_target("llama", num_layers=3), "eagle3", draft=Recurrent())


def test_bytes_of_state_of_a_request() -> None:
    """Qwen3-Next's own shape: 36 of its 48 layers are recurrent; here are 3 of 4."""
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=4, num_experts=2, num_experts_per_tok=1, vocab_size=256
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = 32 * 128 * 128 * 4  # float32
    for count in (0, 3):
        program = compilespec.trace(
            model.eval(), spec="ngram" if count else "none", max_seq_len=64,
            **({"num_draft_tokens": count} if count else {}),
        )  # fmt: skip
        kept = (16 * 128 + 32 * 128 + 2 * 32) * 4 * max(1, count)
        ring = (3 + max(1, count)) * (2 * 16 * 128 + 32 * 128) * 2
        assert program.state_bytes_per_request == 3 * (state + kept + ring)
