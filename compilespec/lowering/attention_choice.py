"""The choice of kernels for a program's attention, before anything is compiled or captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from compilespec.ops._library import has_triton
from compilespec.ops.device import traits_of
from compilespec.ops.paged_attention.choice import why_not_flash
from compilespec.ops.paged_attention.form import Form, form_of
from compilespec.program import BufferSpec, SpecProgram


def attention_kernels(program: SpecProgram) -> Mapping[str, str]:
    """By form of attention, such as "heads of 128, blocks of 16": the kernel, and why no other."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    forms = {
        form for graph in program.graphs.values() for form in _forms(graph.spliced.graph, buffers)
    }
    device = program.config.device
    return {str(form): _kernel(form, device) for form in sorted(forms, key=str)}


def _forms(graph: fx.Graph, buffers: Mapping[str, BufferSpec]) -> Iterator[Form]:
    target = torch.ops.compilespec.paged_attention.default
    names = [argument.name for argument in target._schema.arguments]
    for node in graph.find_nodes(op="call_function", target=target):
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        caches = [
            buffers[cache.meta["role"]] if isinstance(cache, fx.Node) else None
            for cache in (given["key_cache"], given["value_cache"])
        ]
        assert caches[0] is not None
        yield form_of(
            caches[0], caches[1], given["window"], given["softcap"],
            has_sinks=given["sinks_N"] is not None, value_dim=given.get("value_dim", 0),
            has_paths=given.get("path_BSP") is not None,
        )  # fmt: skip


def _kernel(form: Form, device: torch.device) -> str:
    if not traits_of(device).is_cuda:
        return "C++" if traits_of(device).is_cpu else "torch"
    if not has_triton():
        return "torch: Triton is not installed, or switched off"
    why_not = why_not_flash(form, device)
    return f"Triton (not FlashAttention-3: {why_not})" if why_not else "FlashAttention-3"
