"""Weights as the graphs ask for them: merged ones are in memory once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from compilespec import trace
from compilespec.ops.device import CUDA
from compilespec.passes.context import PassContext
from compilespec.pipeline import build
from compilespec.program import SpecProgram
from compilespec.runtime.weights import bind_weights, share_merged
from tests.support.models import tiny_target


def merged_program(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> SpecProgram:
    """As on CUDA: products are merged, and no weight is packed."""
    monkeypatch.setattr(
        build, "PassContext", lambda **given: PassContext(**{**given, "traits": CUDA})
    )
    return trace(model, "none", max_batch_size=2, max_seq_len=32, keep_graphs=False)


def name_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def test_a_models_parameters_become_rows_of_the_merged_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_target("qwen2", num_layers=2)  # with biases
    ids = torch.tensor([[5, 6, 7]])
    before = {name: t.detach().clone() for name, t in name_tensors(model)}
    want = model(ids).logits
    program = merged_program(model, monkeypatch)
    bound = bind_weights(program, program.graphs)
    merged = {name: w for name, w in bound.items() if name not in program.weights}
    given_back = share_merged(model, program, program.graphs, bound)
    assert dict(name_tensors(model)).keys() == before.keys()
    for name, tensor in name_tensors(model):
        assert torch.equal(tensor, before[name])
    assert torch.equal(model(ids).logits, want)
    stores = {w.untyped_storage().data_ptr() for w in merged.values()}
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
            assert linear.weight.untyped_storage().data_ptr() in stores
        assert layer.self_attn.k_proj.bias.untyped_storage().data_ptr() in stores
        assert layer.mlp.down_proj.weight.untyped_storage().data_ptr() not in stores
    shared = [p for p in model.parameters() if p.untyped_storage().data_ptr() in stores]
    assert given_back == sum(p.nbytes for p in shared) > 0
    for name, weight in program.weights.items():
        assert torch.equal(weight, before[name.removeprefix("target.")])
    assert share_merged(model, program, program.graphs, bound) == given_back  # again: no change
