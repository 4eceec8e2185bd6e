"""`SamplingParams.num_draft_tokens`: a request's own K, down to 0 (T28)."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from tests.support.models import DialDrafter, ask_all, target_info, tiny_target

SIZES = ((9, 20), (3, 23), (30, 18), (2, 25), (17, 21))
CAPS = (0, 1, 2, None, 7)
K = 3


@pytest.fixture(scope="module")
def lab():
    model = tiny_target("llama", num_layers=2)
    asks = ask_all(model, SIZES)
    head = random_head(target_info(model, 75), aux_layers=(0, 1, 2), draft_vocab_size=61)
    dial = DialDrafter(head, max_seq_len=75, dtype=torch.float64)
    dial.know([*ask.prompt, *ask.tokens] for ask in asks)
    dial.draft_from_script(lambda position: False)  # every draft is right
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=K, backend="eager", max_batch_size=3,
        max_seq_len=75,
    ) as engine:  # fmt: skip
        yield engine, asks


def test_t28_each_request_has_its_own_k(lab):
    """Two leave and two join, so rows are used again by requests of another K."""
    engine, asks = lab
    params = [
        SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True, num_draft_tokens=cap)
        for ask, cap in zip(asks, CAPS, strict=True)
    ]
    outputs = engine.generate([list(ask.prompt) for ask in asks], params)
    for output, ask, cap in zip(outputs, asks, CAPS, strict=True):
        assert output.token_ids == list(ask.tokens)
        *whole, last = output.emitted_per_step
        own = K if cap is None else min(cap, K)
        assert whole == [own + 1] * len(whole), f"K={cap}"
        assert last <= own + 1
    assert engine.stats().num_recompiles == 0


def test_a_negative_k_is_refused():
    with pytest.raises(compilespec.errors.InvalidRequest):
        SamplingParams(num_draft_tokens=-1)
