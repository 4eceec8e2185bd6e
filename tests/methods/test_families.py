"""Every family of models: speculative and plain tokens are the model's own, at every K, in traffic.

float64 on the interpreted graphs, where products of 1 and of K+1 rows agree to 1e-15: the tokens
must be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from tests.support.cases import ONCE
from tests.support.models import (
    FAMILIES,
    HYBRIDS,
    Ask,
    DialDrafter,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)

MAX_SEQ_LEN = 75  # no multiple of a block
DRAFT_LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 2, 3, 5, 8)

# Tracing costs seconds, the more the more layers: else 2, as few as give three distinct taps and
# both kinds of layers where a family has two (gemma3's sixth is its first without a window).
NUM_LAYERS = {"gemma3": 6}

# (prompt, output): in an order that decodes 1, 2, 3, 5 and 8 at once for any acceptance; five end
# exactly at the maximum length, one of them with a prompt that leaves room for one token.
SIZES = (
    (1, 46), (3, 37), (40, 35), (31, 28), (57, 18), (16, 17), (17, 16), (64, 11),
    (70, 5), (74, 1), (2, 9), (5, 1), (7, 2), (12, 6), (15, 3), (48, 10),
)  # fmt: skip


def _matrix() -> Iterator[Any]:
    for family in (*FAMILIES, *HYBRIDS, "plain"):
        for draft_length in DRAFT_LENGTHS:
            yield pytest.param(
                (family, draft_length),
                id=f"{family}-K{draft_length}",
                marks=() if ONCE.get(family) == draft_length else pytest.mark.slow,
            )


@functools.cache
def asked(family: str) -> tuple[nn.Module, tuple[Ask, ...]]:
    """The family's target and what it must answer, computed once."""
    model = tiny_target(family, num_layers=NUM_LAYERS.get(family, 2))
    asks = tuple(ask_all(model, SIZES))
    varied = sum(len(set(ask.tokens)) > 3 for ask in asks)
    assert varied >= 3, "tokens so alike would hide a wrong position"
    return model, asks


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A family compiled with a drafter of which the tests choose the drafts."""

    asks: tuple[Ask, ...]
    dial: DialDrafter
    engine: Engine
    num_draft_tokens: int
    is_padded: bool

    def run(self, asks: tuple[Ask, ...], batches: tuple[int, ...] = BATCHES) -> list[Request]:
        """Traffic whose tokens are right, which frees all it held and compiles nothing."""
        before = self.engine.stats()
        requests = run_traffic(self.engine, asks, batches)
        assert_answers(requests, asks)
        assert_nothing_held(self.engine)
        assert self.engine.stats().num_recompiles == before.num_recompiles
        return requests


@pytest.fixture(scope="module", params=_matrix())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    family, num_draft_tokens = request.param
    model, asks = asked(family)
    head = random_head(target_info(model, MAX_SEQ_LEN), draft_vocab_size=61)
    dial = DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64)
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    is_padded = (len(family) + num_draft_tokens // 2) % 2 == 0
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=num_draft_tokens, backend="eager",
        max_batch_size=8, max_seq_len=MAX_SEQ_LEN, buckets=[1, 2, 4, 8] if is_padded else None,
    ) as engine:  # fmt: skip
        yield Lab(
            asks=asks,
            dial=dial,
            engine=engine,
            num_draft_tokens=num_draft_tokens,
            is_padded=is_padded,
        )


def assert_answers(requests: list[Request], asks: tuple[Ask, ...]) -> None:
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
        assert request.finish_reason == "length"


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES, "plain",
        *(pytest.param(f, marks=() if f == "lfm2" else pytest.mark.slow) for f in HYBRIDS),
    ],
)  # fmt: skip
def test_plain_decoding_gives_the_models_own_tokens(family: str) -> None:
    model = tiny_target(family, num_layers=2)
    asks = tuple(ask_all(model, SIZES[7:]))
    with compilespec.compile(
        model,
        spec="none",
        backend="eager",
        max_batch_size=8,
        max_seq_len=MAX_SEQ_LEN,
        buckets=[1, 2, 4, 8],
    ) as engine:
        requests = run_traffic(engine, asks, (1, 3, 8))
        assert_answers(requests, asks)
        assert all(set(request.emitted_per_step) <= {1} for request in requests)
        assert_nothing_held(engine)


def test_random_head_gives_the_models_own_tokens(lab: Lab) -> None:
    before = lab.engine.stats().num_decodes_by_bucket
    lab.dial.draft_at_random()
    lab.run(lab.asks)
    after = lab.engine.stats().num_decodes_by_bucket
    seen = {size for size, count in after.items() if count > before.get(size, 0)}
    assert seen >= ({1, 2, 4, 8} if lab.is_padded else set(BATCHES))


def test_matching_drafts_are_all_accepted(lab: Lab) -> None:
    lab.dial.draft_from_script(lambda position: False)
    most = lab.num_draft_tokens + 1
    for request in lab.run(lab.asks):
        *whole, last = request.emitted_per_step or [1]
        assert whole == [most] * len(whole)
        assert 1 <= last <= most  # cut by the end of the request
        assert sum(request.emitted_per_step) == len(request.output_token_ids) - 1


@pytest.mark.parametrize(
    "is_wrong",
    [
        pytest.param(lambda position: position % 3 == 0, id="every-third"),
        pytest.param(lambda position: position * 2654435761 % 97 < 25, id="scattered"),
    ],
)
def test_drafts_are_kept_up_to_the_first_wrong_one(
    lab: Lab, is_wrong: Callable[[int], bool]
) -> None:
    lab.dial.draft_from_script(is_wrong)
    for request, ask in zip(lab.run(lab.asks), lab.asks, strict=True):
        expected = lab.dial.expected_steps(len(ask.prompt), len(ask.tokens), lab.num_draft_tokens)
        assert request.emitted_per_step == expected


def test_wrong_drafts_are_never_accepted(lab: Lab) -> None:
    lab.dial.draft_from_script(lambda position: True)
    for request in lab.run(lab.asks[5:], (2, 3, 7)):
        assert request.emitted_per_step == [1] * (len(request.output_token_ids) - 1)
