"""Weights in the layout that the lowered graphs ask for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.ops.quantized_linear import LAYOUTS
from compilespec.program import InputSpec, LoweredPhase, SpecProgram, StepKey


def bind_weights(program: SpecProgram, graphs: Mapping[StepKey, LoweredPhase]) -> dict[str, Tensor]:
    """Every weight input by name, merged and packed once however many graphs read it."""
    bound: dict[str, Tensor] = {}
    for graph in graphs.values():
        for spec in graph.inputs:
            if spec.kind == "weight" and spec.name not in bound:
                bound[spec.name] = materialise(spec, program.weights)
    return bound


def materialise(spec: InputSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """A weight input: its sources, concatenated by rows and packed as the graph asks."""
    parts = [weights[name] for name in spec.sources]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return LAYOUTS[spec.packed](tensor) if spec.packed else tensor
