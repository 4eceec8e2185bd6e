"""Compiled in float32: the tokens are those of plain decoding and of the same graphs interpreted.

The margin rule (docs/exactness.md): products of 1, of K+1 and of T rows round
differently, so where tokens part each must be the best of a float64 forward of the model, or fall
short of it by less than LOGIT_BOUND; and how many requests part is counted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from tests.support.margin import LOGIT_BOUND, MAX_PARTED, assert_same_tokens, tokens_of
from tests.support.models import (
    FAMILIES,
    Ask,
    DialDrafter,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.sampling import transformers_scores

NUM_LAYERS = {"gemma3": 6}  # else 2: three taps, and both kinds of layers where there are two
MAX_SEQ_LEN = 75
NUM_DRAFT_TOKENS = 2  # the fewest that have a first pass and a later one
BATCHES = tuple(range(1, 9))
Backend = Literal["inductor", "eager"]
SIZES = (
    (1, 48), (3, 40), (40, 35), (31, 30), (57, 18), (16, 20), (17, 16), (60, 15),
    (70, 5), (74, 1), (2, 9), (5, 1), (12, 6), (48, 10),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A target in float32, and its engines, each made when a test first asks for it."""

    model: nn.Module
    reference: nn.Module  # the same weights in float64
    asks: tuple[Ask, ...]  # the reference's own tokens
    dial: DialDrafter
    plain_backend: Backend
    opened: ExitStack

    @functools.cached_property
    def compiled(self) -> Engine:
        return self._speculative("inductor")

    @functools.cached_property
    def interpreted(self) -> Engine:
        return self._speculative("eager")

    @functools.cached_property
    def plain(self) -> Engine:
        return self._open(backend=self.plain_backend, spec="none")

    def _speculative(self, backend: Backend) -> Engine:
        return self._open(
            backend=backend, spec="eagle3", draft=self.dial, num_draft_tokens=NUM_DRAFT_TOKENS
        )

    def _open(self, **options: Any) -> Engine:
        engine = compilespec.compile(
            self.model, max_batch_size=8, max_seq_len=MAX_SEQ_LEN, **options
        )
        return self.opened.enter_context(engine)


def _lab(family: str, plain_backend: Backend, num_layers: int) -> Iterator[Lab]:
    model = tiny_target(family, torch.float32, num_layers=num_layers, experts="grouped_mm")
    reference = tiny_target(family, torch.float64, num_layers=num_layers)  # the same weights
    asks = tuple(ask_all(reference, SIZES))
    info = target_info(model, MAX_SEQ_LEN)
    head = random_head(info, draft_vocab_size=61)
    dial = DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float32)
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    with ExitStack() as opened:
        yield Lab(
            model=model,
            reference=reference,
            asks=asks,
            dial=dial,
            plain_backend=plain_backend,
            opened=opened,
        )


def _families() -> list[Any]:
    """Of the default ones llama decodes plainly, qwen3_moe speculates; each layer takes long."""
    default = [("llama", "inductor", 2), ("qwen3_moe", "eager", 1)]
    families = [family for family in [*FAMILIES, "plain"] if family != "llama"]
    slow = [(family, "inductor", NUM_LAYERS.get(family, 2)) for family in families]
    return [
        *(pytest.param(way, id=way[0]) for way in default),
        *(pytest.param(way, id=f"{way[0]}-compiled", marks=pytest.mark.slow) for way in slow),
    ]


@pytest.fixture(scope="module", params=_families())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    yield from _lab(*request.param)


def run(engine: Engine, asks: Sequence[Ask]) -> list[Request]:
    """Traffic at every batch size from 1 to 8 that compiles nothing and frees all it held."""
    before = engine.stats()
    requests = run_traffic(engine, asks, BATCHES)
    after = engine.stats()
    assert after.num_recompiles == before.num_recompiles
    seen = after.num_decodes_by_bucket
    assert all(seen.get(size, 0) > before.num_decodes_by_bucket.get(size, 0) for size in BATCHES)
    assert all(request.finish_reason == "length" for request in requests)
    assert_nothing_held(engine)
    return requests


def test_plain_tokens_are_the_models_own(lab: Lab) -> None:
    plain = tokens_of(run(lab.plain, lab.asks))
    assert_same_tokens(lab.reference, lab.asks, plain, [ask.tokens for ask in lab.asks])


def test_random_head_gives_the_tokens_of_plain_decoding(lab: Lab) -> None:
    lab.dial.draft_at_random()
    compiled = run(lab.compiled, lab.asks)
    interpreted = run(lab.interpreted, lab.asks)
    plain = run(lab.plain, lab.asks)
    assert_same_tokens(lab.reference, lab.asks, tokens_of(compiled), tokens_of(plain))
    assert_same_tokens(lab.reference, lab.asks, tokens_of(compiled), tokens_of(interpreted))


def test_matching_drafts_are_all_accepted(lab: Lab) -> None:
    lab.dial.draft_from_script(lambda position: False)
    compiled = run(lab.compiled, lab.asks)
    interpreted = run(lab.interpreted, lab.asks)
    plain = run(lab.plain, lab.asks)
    assert_same_tokens(lab.reference, lab.asks, tokens_of(compiled), tokens_of(plain))
    assert_same_tokens(lab.reference, lab.asks, tokens_of(compiled), tokens_of(interpreted))
    for request, ask in zip(compiled, lab.asks, strict=True):
        if tuple(request.output_token_ids) == ask.tokens:  # the script knows the reference's tokens
            *whole, last = request.emitted_per_step or [1]
            assert whole == [NUM_DRAFT_TOKENS + 1] * len(whole)
            assert 1 <= last <= NUM_DRAFT_TOKENS + 1


def test_drafts_are_kept_up_to_the_first_wrong_one(lab: Lab) -> None:
    lab.dial.draft_from_script(lambda position: position % 3 == 0)
    compiled = run(lab.compiled, lab.asks)
    assert_same_tokens(
        lab.reference, lab.asks, tokens_of(compiled), [ask.tokens for ask in lab.asks]
    )
    for request, ask in zip(compiled, lab.asks, strict=True):
        if tuple(request.output_token_ids) == ask.tokens:
            expected = lab.dial.expected_steps(len(ask.prompt), len(ask.tokens), NUM_DRAFT_TOKENS)
            assert request.emitted_per_step == expected


def test_sampled_tokens_are_those_of_plain_decoding(lab: Lab) -> None:
    """T22, and the margin rule on what sampling compares: processed logits plus noise."""
    asks = [ask for ask in lab.asks if len(ask.tokens) >= 15]
    params = [
        SamplingParams(
            max_new_tokens=15, ignore_eos=True, seed=index, temperature=(0.5, 1.0, 1.5)[index % 3],
            repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 1.0},
        )
        for index in range(len(asks))
    ]  # fmt: skip
    lab.dial.draft_at_random()
    ways = [
        [output.token_ids for output in engine.generate([list(a.prompt) for a in asks], params)]
        for engine in (lab.compiled, lab.interpreted, lab.plain)
    ]
    for tokens, ask, one in zip(ways[0], asks, params, strict=True):
        assert sampled_shortfall(lab.reference, ask.prompt, tokens, one) < LOGIT_BOUND / 0.5
    for left, right in itertools.combinations(ways, 2):
        assert sum(a != b for a, b in zip(left, right, strict=True)) <= MAX_PARTED
    assert len({tuple(tokens) for tokens in ways[0]} & {ask.tokens[:15] for ask in asks}) == 0


def sampled_shortfall(
    reference: nn.Module, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> float:
    """How far, at most, the score that drew a token lies below the best one of its context."""
    whole = [*prompt, *tokens]
    with torch.no_grad():
        output = reference(torch.tensor([whole]))
    logits_TV = getattr(output, "logits", output)[0]
    largest = 0.0
    for position in range(len(prompt), len(whole)):
        scores_V = transformers_scores(
            logits_TV[position - 1], whole[:position], len(prompt), params, ()
        )
        bits_V = noise_bits(
            torch.arange(len(scores_V)), seed_low=params.seed, seed_high=0, sample=0,
            position=position, stream=0,
        )  # fmt: skip
        scores_V = scores_V + gumbel(bits_V)
        largest = max(largest, float(scores_V.max() - scores_V[whole[position]]))
    return largest
