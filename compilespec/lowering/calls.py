"""Compiles one traced call at fixed sizes, outside the steps; results are kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from compilespec import _torch_compat
from compilespec.lowering import inductor_options
from compilespec.lowering.artifacts import ArtifactCache, Interface, graph_digest, piece_file_key
from compilespec.lowering.constants import compile_graph
from compilespec.lowering.pieces import structural_key
from compilespec.program import Traced
from compilespec.progress import Step


def compile_call(
    traced: Traced, arguments: Mapping[str, Tensor], step: Step
) -> Callable[..., Sequence[Tensor]]:
    """A callable with the inputs that `traced.bind` gives, for arguments of these sizes alone."""
    inputs = traced.bind(**arguments)
    mode = _torch_compat.fake_mode()
    fakes = [_torch_compat.fake_tensor(mode, value) for value in inputs]
    with step.inside("rewrite", "to ATen"):
        aten = _torch_compat.retrace(traced.graph_module, fakes, mode)
    device = inputs[0].device
    options, cache = inductor_options(device, "prefill"), ArtifactCache()
    key = piece_file_key(f"{structural_key(aten)} {graph_digest(aten)}", options, device)
    stored = cache.load(key)
    step.note(from_cache=stored is not None)
    call: Callable[..., Sequence[Tensor]]
    if stored is None:
        step.tell(why="no call like it is cached")
        compiled = compile_graph(aten, fakes, options)
        cache.save(key, compiled, Interface())
        call = compiled
    else:
        call, _ = stored
    return call
