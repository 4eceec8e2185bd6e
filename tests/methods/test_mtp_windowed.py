"""Windowed drafting: every draft equals that of a recomputation from scratch.

The reference calls the modules over the whole sequence, without a cache, at every step; the engine
keeps a ring of K pairs and a cache a module, poisoned with NaN before the first request.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption
from compilespec.methods import mtp
from compilespec.methods.capabilities import Chain
from tests.support.models import (
    Ask,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.windowed import (
    MAX_SEQ_LEN,
    Step,
    Windowed,
    WindowedDrafter,
    fresh_drafts,
    script_of,
)

SIZES = ((1, 26), (40, 35), (16, 17), (64, 11), (70, 5), (74, 1), (2, 9), (3, 20))


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask]]:
    model = tiny_target("llama", num_layers=2)
    return model, ask_all(model, SIZES)


@dataclass(frozen=True, kw_only=True)
class Case:
    chain: Chain
    k: int
    num_modules: int
    windows: tuple[int, ...] = ()
    kv_block_sizes: tuple[int, ...] = ()
    in_one: bool = False  # the ring is the operator's, as on a GPU


CASES = {
    "module_rows-K3": Case(chain="module_rows", k=3, num_modules=3),
    "target_rows-K3": Case(chain="target_rows", k=3, num_modules=3),
    "roll_window-K3": Case(chain="target_rows", k=3, num_modules=3, in_one=True),
    "module_rows-K1": Case(chain="module_rows", k=1, num_modules=1),
    "target_rows-K5": Case(chain="target_rows", k=5, num_modules=5),
    "two modules in turn-K5": Case(chain="module_rows", k=5, num_modules=2),
    # T19: KV groups with blocks of their own size, two of them rings that wrap around
    "KV groups-K3": Case(
        chain="module_rows", k=3, num_modules=3, windows=(0, 6, 11), kv_block_sizes=(8, 4, 16)
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=pytest.mark.slow if case.k == 5 or case.in_one else ())
        for name, case in CASES.items()
    ],
)
def lab(request: pytest.FixtureRequest, target: tuple[nn.Module, list[Ask]]) -> Iterator[Any]:
    (model, asks), case = target, request.param
    script, windows = script_of(asks), case.windows or (0,) * case.num_modules
    steps = [Step(i, model, script, window) for i, window in enumerate(windows)]
    drafter = WindowedDrafter(steps, case.chain, case.kv_block_sizes)
    with pytest.MonkeyPatch.context() as patch:
        loop = importlib.import_module("compilespec.passes.splice.draft_loops.windowed")
        patch.setattr(loop, "rolls_in_one_kernel", lambda ctx: case.in_one)
        compiled = compilespec.compile(
            model, spec=Windowed(drafter), num_draft_tokens=case.k, backend="eager",
            max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=23, buckets=[1, 3, 5],
        )  # fmt: skip
    with compiled as engine:
        nodes = compiled.graphs["decode"].graph_module.graph.nodes
        assert case.in_one == any("roll_window" in str(node.target) for node in nodes)
        for name, buffer in engine._executor.buffers.items():
            if name.startswith("cache."):
                buffer.fill_(float("nan"))
        yield model, asks, drafter, engine, case.k


def test_t07_every_draft_is_that_of_a_recomputation(lab: Any) -> None:
    """Prompts shorter than K and in chunks, rows used again, up to the maximum length."""
    model, asks, drafter, engine, k = lab
    requests = [
        engine.submit(list(a.prompt), SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True))
        for a in asks
    ]
    num_compared, counts = 0, set()
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.row < 0 or not request.output_token_ids:
                continue
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            state = engine._executor.buffers["tokens_RS"][request.row].tolist()
            assert state[0] == tokens[-1]
            room = MAX_SEQ_LEN - len(tokens)  # drafts past the maximum are nobody's
            wanted = fresh_drafts(model, drafter, tokens, k)
            assert state[1 : 1 + room] == wanted[:room], f"after {len(tokens)} tokens"
            num_compared += 1
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens)
        counts.update(request.emitted_per_step[:-1])
    assert num_compared > 30
    assert counts >= ({1, 2} if k == 1 else {1, 2, 3})


def test_chunks_that_hold_repeated_tokens_alone_are_refused(target: Any) -> None:
    """Each chunk begins with the K - 1 tokens before it: no prompt would ever be in."""
    model, _ = target
    modules = mtp.random_modules(target_info(model, 64), 3)
    with pytest.raises(InvalidOption, match=r"max_prefill_tokens must be above 2: .* got 2"):
        compilespec.trace(
            model, "mtp", draft=modules, num_draft_tokens=3, max_prefill_tokens=2, max_seq_len=64
        )


def test_joins_and_leaves_give_the_models_own_tokens(lab: Any) -> None:
    _, asks, _, engine, _ = lab
    requests = run_traffic(engine, asks, (1, 2, 3, 5))
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens)
    assert_nothing_held(engine)
    assert engine.stats().num_recompiles == 0


def test_t19_a_window_keeps_a_ring_of_blocks(target: tuple[nn.Module, list[Ask]]) -> None:
    """Caches of a KV group have its block size, and only the blocks that its window needs."""
    model, _ = target
    steps = [Step(i, model, script_of([]), window) for i, window in enumerate((0, 6))]
    drafter = WindowedDrafter(steps, "module_rows", (8, 4))
    traced = compilespec.trace(
        model, spec=Windowed(drafter), num_draft_tokens=2, max_batch_size=5,
        max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=23,
    )  # fmt: skip
    shapes = {spec.name: spec.shape[:2] for spec in traced.buffers}
    assert shapes["cache.target.0.key"] == (25, 16)
    assert shapes["cache.draft.0.0.key"] == (5 * 10, 8)  # all 75 positions
    assert shapes["cache.draft.1.0.key"] == (5 * 9, 4)  # 6 + 23 of them, and a block to turn in
