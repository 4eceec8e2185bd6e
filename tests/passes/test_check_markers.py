"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compilespec.errors import PassError
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import SPLICE_PASSES, run_passes
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.check_markers import check_markers
from compilespec.program import marker_kind
from tests.support.hand_graphs import code, reading
from tests.support.steps import NUM_LAYERS, context
from tests.support.untouched import check_left_alone, step


def test_check_markers_counts_and_leaves_the_graph(parts):
    ctx = context(parts, "decode")
    gm = start_step(ctx)
    before = code(gm)
    assert check_markers(Splice(gm, ctx)) == NUM_LAYERS
    assert code(gm) == before


def test_check_markers_refuses_attention_without_a_cache(parts):
    ctx = context(parts, "decode")
    gm = start_step(ctx)
    marker = next(node for node in gm.graph.nodes if marker_kind(node) == "attention")
    marker.target, marker.args = nn.functional.scaled_dot_product_attention, marker.args[:3]
    with pytest.raises(PassError, match=r"model.layers.0.self_attn calls scaled_dot_product"):
        check_markers(Splice(gm, ctx))
    marker.target = torch.add  # a layer that lost its marker
    with pytest.raises(PassError, match=r"check_markers \(decode\): expected 2 matches, found 1"):
        run_passes(gm, ctx, SPLICE_PASSES[:1], level="torch")


def test_the_check_changes_no_node() -> None:
    check_left_alone("check_markers", step("decode", drafter=reading(aux_layers=(0, 1, 2))))
