"""Whole engines on the executable model of a GPU: the program's own graphs, interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from compilespec.lowering import lower
from compilespec.lowering.stitching import Stitched
from compilespec.program import ByStep, Lowered, LoweredPhase, PhaseGraph, SpecProgram
from tests.support.gpu_model import Gpu, Kernel


@contextlib.contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Within, `compilespec.compile` makes engines whose steps run on the model."""

    def lower_there(program: SpecProgram, **given: Any) -> Lowered:
        return moved(lower(program, **{**given, "backend": "eager"}), gpu)

    with gpu.installed(), mock.patch("compilespec.pipeline.entry.lower", lower_there):
        yield


def moved(lowered: Lowered, gpu: Gpu) -> Lowered:
    """The same steps, launched on the device of the model."""
    program = lowered.program
    there = replace(program, config=replace(program.config, device=gpu.device))
    graphs = [_on(gpu, phase, program.graphs[key]) for key, phase in lowered.graphs.items()]
    return replace(lowered, program=there, graphs=ByStep(graphs))


def _on(gpu: Gpu, phase: LoweredPhase, graph: PhaseGraph) -> LoweredPhase:
    if phase.stitched is None:
        target = torch.ops.compilespec.host_process.default
        waits = any(node.target is target for node in graph.graph_module.graph.nodes)
        return replace(phase, call=Kernel(gpu, phase.call, waits=waits))
    pieces = {name: Kernel(gpu, piece) for name, piece in phase.stitched.pieces.items()}
    stitched = Stitched(phase.stitched.plan, pieces)
    return replace(phase, call=stitched, stitched=stitched)
