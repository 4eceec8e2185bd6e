"""Drafters that propose all drafts in one pass: the smallest K, full caches, rejection."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import compilespec
from tests.support.drafters import METHODS, traced_info
from tests.support.models import Ask, ask_all, assert_nothing_held, run_traffic, tiny_target

MAX_SEQ_LEN = 48
SIZES = ((5, 43), (23, 25), (2, 30), (33, 15), (47, 1), (46, 2), (17, 22))
PRESSED: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
    "kv_cache_tokens": 96,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, Any, list[Ask]]:
    model = tiny_target("llama", num_layers=2)
    return model, traced_info(model), ask_all(model, SIZES)


def served(target: tuple[nn.Module, Any, list[Ask]], method: str, k: Any, **options: Any) -> None:
    """Greedy tokens up to the maximum length, in a cache that is too small for all requests."""
    model, info, asks = target
    largest = k if isinstance(k, int) else max(k)
    with compilespec.compile(
        model, method, num_draft_tokens=k, **METHODS[method](model, info, largest), **PRESSED,
        **options,
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asks, (1, 3, 2, 3))
        assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
        assert_nothing_held(engine)
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_recompiles == 0


@pytest.mark.parametrize("acceptance", ["auto", "rejection"])
@pytest.mark.parametrize("method", ["peagle", "dflash", "dspark"])
def test_one_draft_a_step(target, method: str, acceptance: str) -> None:
    """No masked row at all of P-EAGLE; a block of one row of DSpark."""
    served(target, method, 1, acceptance=acceptance)


def test_drafts_in_turn_with_several_k_and_zero(target) -> None:
    served(target, "dspark", (0, 1, 3))
