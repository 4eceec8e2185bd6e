"""The ATen passes on real steps: before and after agree."""

from __future__ import annotations

import pytest
import torch

from compilespec.passes.graph.nodes import get_outputs
from tests.support.steps import (
    ATEN,
    NUM_DRAFT_TOKENS,
    NUM_LAYERS,
    assert_same,
    random_inputs,
    run,
    targets,
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("cleanup", 0.0),
        ("merge_projections", 2e-5),
        ("fuse_head_argmax", 0.0),
        ("read_long_rows", 0.0),
        ("prepack_linears", 2e-5),
        ("bound_positions", 0.0),
        ("check_mutations", 0.0),
    ],
)
def test_before_and_after_agree(rewritten, name, bound, seed):
    """Rounding passes: 2e-5 of a cache's largest entry is ~170 float32 ulp over 2 layers."""
    ctx, inputs = rewritten.ctx, random_inputs(rewritten.ctx, seed)
    before, after = (run(gm, ctx, inputs) for gm in (rewritten.before(name), rewritten.after(name)))
    assert_same(after, before, bound=bound)


def test_the_real_graphs_are_rewritten(rewritten):
    records, final = rewritten.records, rewritten.final
    assert records["cleanup"].nodes_after < records["cleanup"].nodes_before
    # Per target layer q, k, v and gate, up; the drafter alike, once a pass.
    num_layers = NUM_LAYERS + NUM_DRAFT_TOKENS
    assert records["merge_projections"].matches == 2 * num_layers
    num_products = 4 * num_layers + 1 + NUM_DRAFT_TOKENS + 1  # heads; the drafter's fc, once
    assert records["prepack_linears"].matches == num_products
    assert targets(final).count(torch.ops.compilespec.packed_linear.default) == num_products
    assert ATEN.mm.default not in targets(final)
    buffers = rewritten.ctx.buffers.values()
    assert records["check_mutations"].matches == sum(not spec.by_host for spec in buffers)
    roles = [node.meta["role"] for node in final.graph.nodes if node.op == "placeholder"]
    assert len(roles) == len(set(roles))


def test_outputs_are_named(rewritten):
    assert list(get_outputs(rewritten.final)) == ["emitted_BS", "num_emitted_B"]
