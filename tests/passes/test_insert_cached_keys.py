"""What the pass changes, what it leaves alone, what it refuses."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec.errors import PassError
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.insert_cached_keys import insert_cached_keys, num_cached_keys
from compilespec.program import SpecProgram, marker_kind
from tests.families.check import build
from tests.support.steps import started
from tests.support.untouched import check_left_alone, step


@pytest.fixture(scope="module")
def sparse() -> SpecProgram:
    """Two layers with an indexer each, without drafts."""
    model = build(
        "deepseek_v32", num_hidden_layers=2, layer_types=None, mlp_layer_types=["dense", "sparse"]
    )
    return compilespec.trace(model, max_seq_len=40, max_batch_size=2, keep_graphs=True)


def test_a_step_without_such_masks_is_left_alone(parts) -> None:
    gm, ctx = started(parts, "decode", "insert_paged_attention")
    assert num_cached_keys(ctx) is None
    assert insert_cached_keys(Splice(gm, ctx)) == 0


def test_each_indexer_has_a_cache_in_the_targets_blocks(sparse: SpecProgram) -> None:
    caches = {b.name: b for b in sparse.buffers if b.name.startswith("cache.target.mask")}
    assert list(caches) == ["cache.target.mask.0", "cache.target.mask.1"]
    keys = next(b for b in sparse.buffers if b.name == "cache.target.0.key")
    for cache in caches.values():
        assert cache.kind == "cache"
        assert cache.shape == (*keys.shape[:2], 1, 16)


def test_nothing_stateless_is_left(sparse: SpecProgram) -> None:
    for graph in sparse.graphs.values():
        spliced = graph.spliced.graph
        assert not any(marker_kind(node) for node in spliced.nodes)
        named = [str(node.target) for node in spliced.nodes]
        assert sum("masked_attention" in name for name in named) == 2
        assert sum("cached_keys" in name for name in named) == 2


def test_a_marker_without_a_known_shape_is_refused(sparse: SpecProgram) -> None:
    from compilespec.passes.graph.retrace import start_step
    from compilespec.passes.splice.read_state import read_state

    ctx = sparse.graphs["decode"].context
    gm = start_step(ctx)
    read_state(Splice(gm, ctx))
    marker = next(node for node in gm.graph.nodes if marker_kind(node) == "cached")
    del marker.args[0].meta["example"]
    with pytest.raises(PassError, match=r"cache\.target\.mask\.0: what it caches has no known"):
        insert_cached_keys(Splice(gm, ctx))


def test_the_tokens_of_a_prefill_are_of_one_request(sparse: SpecProgram) -> None:
    assert sparse.config.prefills_one
    assert torch.float64 == sparse.config.dtype


def test_a_step_without_a_computed_mask_is_left_alone() -> None:
    check_left_alone("insert_cached_keys", step("decode", "read_state"))
