"""MTP checkpoints: the published layouts, and DeepSeek-V3 against transformers' own drafting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compilespec
from compilespec.methods.mtp.load import load_drafter
from compilespec.tracing.load import load_target
from tests.support.models import target_info
from tests.support.oracles import check_oracle

CASE = Path(__file__).parents[1] / "data" / "oracles" / "d_mtp_deepseek_v3_n1"


@pytest.fixture(scope="module")
def deepseek():
    return load_target(CASE / "target", dtype=torch.float32).model


def test_a_deepseek_module_computes_what_transformers_does(deepseek):
    io, meta = load_file(CASE / "io.safetensors"), json.loads((CASE / "meta.json").read_text())
    drafter = load_drafter(CASE / "target", target_info(deepseek, 256), {}, recycled=False)
    (step,) = drafter.steps
    ids = io["in.shifted_ids"].unsqueeze(0)
    hidden = io["out.target_hidden_postnorm"].unsqueeze(0)
    normed, recycled = step(ids, torch.arange(ids.shape[1]).unsqueeze(0), hidden)
    assert torch.equal(normed, recycled)
    torch.testing.assert_close(normed[0], io["out.mtp0_hidden"], atol=meta["atol"], rtol=1e-4)
    best = io["out.mtp0_logits"].argmax(-1).to(torch.int32)
    assert torch.equal(step.propose(normed[0]), best)


@pytest.mark.parametrize("method", ["mtp_eagle", "mtp"])
def test_deepseek_drafts_and_accepts_as_transformers_does(method):
    """The checkpoint directory as it is, the modules inside the target's own files."""
    io, meta = load_file(CASE / "io.safetensors"), json.loads((CASE / "meta.json").read_text())
    with compilespec.compile(
        str(CASE / "target"), spec=method, num_draft_tokens=1, backend="eager", max_batch_size=2,
        max_seq_len=64,
    ) as engine:  # fmt: skip
        check_oracle(engine, meta, io)
