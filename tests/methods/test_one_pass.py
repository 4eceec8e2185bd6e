"""Drafters that propose all drafts in one pass: one draft a step, up to the maximum length, in a
cache that is too small for all requests.
"""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "acceptance"), [("peagle", "auto"), ("peagle", "rejection"), ("dflash", "auto")]
)
def test_one_draft_a_step(target, method: str, acceptance: str) -> None:
    """No masked row at all of P-EAGLE."""
    model, info, asks = target
    with compilespec.compile(
        model, method, num_draft_tokens=1, acceptance=acceptance, **METHODS[method](model, info, 1),
        **PRESSED,
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asks, (1, 3, 2, 3))
        assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
        assert_nothing_held(engine)
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_recompiles == 0
