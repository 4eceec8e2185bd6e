"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import PassError
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.insert_paged_attention import insert_paged_attention
from compilespec.program import marker_kind
from tests.support.steps import CONFIG, NUM_LAYERS, logits_of, random_inputs, started
from tests.support.untouched import check_left_alone, step


def test_paged_attention_from_an_empty_cache_equals_the_markers(parts):
    """A whole prompt from position 0: the cache adds nothing, so the numbers are the markers'."""
    gm, ctx = started(parts, "prefill", "insert_paged_attention")
    inputs = random_inputs(ctx, 0)
    inputs["position_T"] = torch.arange(7, dtype=torch.int32)
    inputs["row_T"] = torch.ones(7, dtype=torch.int32)
    want = logits_of(gm, ctx, inputs)
    assert insert_paged_attention(Splice(gm, ctx)) == NUM_LAYERS
    assert not any(marker_kind(node) for node in gm.graph.nodes)
    caches = [name for name, spec in ctx.buffers.items() if spec.kind == "cache"]
    assert caches == [
        f"cache.target.{i}.{half}" for i in range(NUM_LAYERS) for half in ("key", "value")
    ]
    assert ctx.buffers[caches[0]].shape == (CONFIG.num_blocks, CONFIG.block_size, 2, 12)
    inputs |= {name: torch.full(ctx.buffers[name].shape, float("nan")) for name in caches}
    torch.testing.assert_close(logits_of(gm, ctx, inputs), want, rtol=1e-4, atol=1e-4)
    assert insert_paged_attention(Splice(gm, ctx)) == 0  # leaves paged attention alone


def test_paged_attention_needs_known_shapes(parts):
    gm, ctx = started(parts, "decode", "insert_paged_attention")
    marker = next(node for node in gm.graph.nodes if marker_kind(node) == "attention")
    del marker.args[1].meta["example"]
    with pytest.raises(
        PassError, match=r"cache\.target\.0\.key: its attention marker has no known"
    ):
        insert_paged_attention(Splice(gm, ctx))


def test_attention_that_is_paged_already_is_left_alone() -> None:
    check_left_alone(
        "insert_paged_attention", step("decode", "read_state", "insert_paged_attention")
    )
