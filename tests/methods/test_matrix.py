"""The matrix method x family x K x batch: greedy tokens are the model's own, nothing recompiles.

float64 on the interpreted graphs, tokens equal.  One case of each method is chosen; the default run
takes those that slow_tests.txt leaves it, the slow run has all combinations.  On Inductor, in
float32, with the margin rule: a method of each kind of draft loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from tests.support.cases import ONCE
from tests.support.drafters import METHODS, traced_info
from tests.support.margin import assert_same_tokens, tokens_of
from tests.support.models import (
    FAMILIES,
    HYBRIDS,
    VOCAB,
    Ask,
    ask_all,
    assert_nothing_held,
    run_traffic,
    tiny_target,
)

MAX_SEQ_LEN = 75
DRAFT_LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 2, 3, 5, 8)
NUM_LAYERS = {
    "gemma3": 6,  # its sixth is its first without a window
    "llama": 4,  # enough that Inductor compiles it in pieces
}
SIZES = (
    (1, 30), (40, 35), (31, 12), (57, 18), (16, 9), (70, 5), (74, 1), (2, 9), (12, 6), (3, 20),
)  # fmt: skip


# One case of each method: what the default run takes, but for those in slow_tests.txt.
CHOSEN = {
    "eagle3": ("gpt2", 3),
    "eagle": ("qwen2", 5),
    "mtp": ("mixtral", 1),
    "mtp_eagle": ("mistral", 3),
    "mtp_multi": ("plain", 3),
    "shared_kv": ("gemma2", 1),
    "draft_model": ("phi3", 1),
    "self": ("gpt_oss", 3),
    "peagle": ("qwen3", 3),
    "dflash": ("llama", 5),
    "dspark": ("mistral", 3),
    "medusa": ("mistral", 3),
    "suffix": ("qwen3", 3),
    "ngram": ("olmo2", 8),
    "user": ("gpt_neox", 5),
}


def combinations() -> Iterator[Any]:
    for method in METHODS:
        for family in (*FAMILIES, *HYBRIDS, "plain"):
            for k in DRAFT_LENGTHS:
                is_chosen = CHOSEN[method] == (family, k)
                name = f"{method}-{family}-K{k}"
                yield pytest.param(
                    method, family, k, id=name, marks=() if is_chosen else pytest.mark.slow
                )


@functools.cache
def asked(family: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, list[Ask]]:
    """A target, what drafters may know of it, and its own tokens."""
    num_layers = NUM_LAYERS.get(family, 2)
    experts = "batched_mm" if dtype == torch.float64 else "grouped_mm"
    model = tiny_target(family, dtype, num_layers=num_layers, experts=experts)
    return model, traced_info(model), ask_all(tiny_target(family, num_layers=num_layers), SIZES)


def compiled(method: str, family: str, k: int, **options: Any) -> Any:
    dtype = torch.float32 if options.get("backend") == "inductor" else torch.float64
    model, info, _ = asked(family, dtype)
    return compilespec.compile(
        model, method, num_draft_tokens=k, max_batch_size=8, max_seq_len=MAX_SEQ_LEN,
        **METHODS[method](model, info, k), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("method", "family", "k"), list(combinations()))
def test_every_method_gives_the_models_own_tokens(method: str, family: str, k: int) -> None:
    """Requests join and leave; prompts are cut into chunks; up to the maximum length."""
    buckets = [1, 2, 4, 8] if k in (3, 8) else None
    asks = asked(family)[2]
    with compiled(
        method, family, k, backend="eager", buckets=buckets, max_prefill_tokens=33
    ) as engine:
        requests = run_traffic(engine, asks, BATCHES)
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
        assert_nothing_held(engine)
        stats = engine.stats()
        assert stats.num_recompiles == 0
        if method == "draft_model":
            assert stats.acceptance_length > 1.05  # a noisy copy; least in hybrids


@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, marks=pytest.mark.slow)
        for method in METHODS
        for family in ("llama", "qwen3_moe", "qwen3_5")
    ],
)
def test_methods_on_inductor(method: str, family: str, inductor_cache_dir: Any) -> None:
    reference = tiny_target(family, num_layers=NUM_LAYERS.get(family, 2))
    asks = asked(family)[2]
    with compiled(method, family, 3, backend="inductor") as engine:
        requests = run_traffic(engine, asks, BATCHES)
        wanted = [list(ask.tokens) for ask in asks]
        assert_same_tokens(reference, asks, tokens_of(requests), wanted)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0


def test_the_chosen_cases_cover_every_method_family_and_k() -> None:
    chosen = [one.values for one in combinations() if not one.marks]
    methods, families, lengths = (set(part) for part in zip(*chosen, strict=True))
    assert methods == set(METHODS)
    assert {*families, *ONCE} >= {*FAMILIES, "plain"}
    assert lengths == set(DRAFT_LENGTHS)
    assert VOCAB == 97
