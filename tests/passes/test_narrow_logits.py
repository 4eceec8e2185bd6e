"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import torch

from compilespec.passes.graph.nodes import find_role, output_node, set_outputs
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.narrow_logits import narrow_logits
from tests.support.hand_graphs import emit
from tests.support.models import VOCAB
from tests.support.steps import logits_of, random_inputs, started
from tests.support.untouched import check_left_alone, step


def test_narrow_logits_runs_the_head_on_the_last_rows_only(parts):
    gm, ctx = started(parts, "prefill", "narrow_logits")
    inputs = random_inputs(ctx, 0)
    wide = logits_of(gm, ctx, inputs)
    assert narrow_logits(Splice(gm, ctx)) == 1
    narrow = logits_of(gm, ctx, inputs)
    assert (wide.shape, narrow.shape) == ((1, 7, VOCAB), (1, 2, VOCAB))
    torch.testing.assert_close(narrow, wide[:, inputs["last_R"].long()], rtol=1e-5, atol=1e-5)
    head = next(n for n in reversed(gm.graph.nodes) if n.target is torch._C._nn.linear)
    assert head.args[0].target == "index_select"


def test_narrow_logits_gathers_after_what_is_not_rowwise(parts):
    """A model that mixes the rows of its logits keeps them all until then."""
    gm, ctx = started(parts, "prefill", "narrow_logits")
    logits = find_role(gm, "logits")
    mixed = emit(gm, lambda x: x - x.amax(1, keepdim=True), logits, before=output_node(gm))
    mixed.meta["role"] = logits.meta.pop("role")
    set_outputs(gm, {"logits": mixed})
    inputs = random_inputs(ctx, 1)
    wide = logits_of(gm, ctx, inputs)
    narrow_logits(Splice(gm, ctx))
    assert torch.equal(logits_of(gm, ctx, inputs), wide[:, inputs["last_R"].long()])


def test_decode_needs_the_logits_of_all_rows() -> None:
    check_left_alone("narrow_logits", step("decode", "read_state"))
