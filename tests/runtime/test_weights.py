"""Weights as the graphs ask for them: merged ones are in memory once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from compilespec import compile, trace
from compilespec.lowering import lower
from compilespec.ops.device import CUDA
from compilespec.passes.context import PassContext
from compilespec.pipeline import build
from compilespec.program import BufferSpec, InputSpec, SpecProgram
from compilespec.runtime import step_runner, weights
from compilespec.runtime.buffers import allocate
from compilespec.runtime.step_runner import StepRunner
from compilespec.runtime.weights import bind_weights, materialise
from tests.support.drafters import METHODS, traced_info
from tests.support.models import tiny_target


def merged_program(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, spec: str = "none", **options: Any
) -> SpecProgram:
    """As on CUDA: products are merged, and no weight is packed."""
    monkeypatch.setattr(
        build, "PassContext", lambda **given: PassContext(**{**given, "traits": CUDA})
    )
    return trace(model, spec, max_batch_size=2, max_seq_len=32, keep_graphs=False, **options)


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
    bound = bind_weights(program, program.graphs, model)
    merged = {name: w for name, w in bound.items() if name not in program.weights}
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
    for name, weight in program.weights.items():
        assert torch.equal(weight, before[name.removeprefix("target.")])
    again = bind_weights(program, program.graphs, model)
    assert all(torch.equal(weight, again[name]) for name, weight in merged.items())


class Live:
    """Storages of weights that something holds."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self._storages.items() if not ref.expired())


@pytest.mark.parametrize("spec", ["none", "draft_model"])
def test_one_merged_weight_at_a_time_is_in_memory_twice_and_caches_come_after(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An 8B model in bf16 took 30 GB to start and 21 to run."""
    model = tiny_target("llama", num_layers=4)
    drafter = METHODS[spec](model, traced_info(model), 1) if spec != "none" else {}
    lowered = lower(merged_program(model, monkeypatch, spec, **drafter), backend="eager")
    live = Live(lowered.program.weights.values())
    steady, largest, at_caches = live.num_bytes, 0, []

    def noted(spec: InputSpec, given: Mapping[str, Tensor]) -> Tensor:
        nonlocal largest
        made = materialise(spec, given)
        if len(spec.sources) > 1:
            largest = max(largest, made.nbytes)
            live.note(made)
        return made

    def allocated(spec: BufferSpec, device: torch.device) -> Tensor:
        at_caches.append(live.num_bytes)
        return allocate(spec, device)

    monkeypatch.setattr(weights, "materialise", noted)
    monkeypatch.setattr(step_runner, "allocate", allocated)
    runner = StepRunner(lowered, model=model)
    assert largest
    assert live.peak == steady + largest
    assert set(at_caches) == {steady}
    assert live.num_bytes == steady
    runner.close()


def test_compile_merges_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama", num_layers=1)
    merged_program(model, monkeypatch)  # from now on as on CUDA
    with compile(model, "none", backend="eager", max_batch_size=1, max_seq_len=16) as engine:
        runner: Any = engine.executor
        (name,) = (name for name in runner.weights if "k_proj" in name)
        part = model.model.layers[0].self_attn.k_proj.weight.untyped_storage()
        assert part.data_ptr() == runner.weights[name].untyped_storage().data_ptr()
