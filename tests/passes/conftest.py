"""One captured target and drafter, cut into steps once."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from compilespec.methods.eagle3 import random_head
from compilespec.passes.graph.nodes import snapshot
from compilespec.passes.graph.retrace import start_step, to_aten
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, run_passes
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.models import tiny_target
from tests.support.steps import CONFIG, NUM_DRAFT_TOKENS, NUM_LAYERS, Rewritten, context


@pytest.fixture(scope="session")
def parts():
    model = tiny_target("qwen2", torch.float32)  # its q, k and v have biases
    del model.model.layers[NUM_LAYERS:]
    target = trace_target(model)
    info = describe_target(target, load_target(model))
    drafter = random_head(info, aux_layers=(0, 1, 2), num_draft_tokens=NUM_DRAFT_TOKENS).eval()
    return target, drafter.capture(CONFIG, info)


@pytest.fixture(scope="session", params=["prefill", "decode"])
def rewritten(parts, request) -> Rewritten:
    ctx = context(parts, request.param)
    spliced = start_step(ctx)
    run_passes(spliced, ctx, SPLICE_PASSES, level="torch")
    aten, _ = to_aten(spliced, ctx)
    first = fx.GraphModule(aten, snapshot(aten.graph))
    records = run_passes(aten, ctx, ATEN_PASSES, level="aten", keep_graphs=True)
    return Rewritten(ctx, spliced, first, {record.name: record for record in records}, aten)
