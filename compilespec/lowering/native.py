"""The plan of a step as one C++ call, where every piece is a C++ function.  A deep decode step has
a hundred short calls; from Python each costs some ten microseconds.

A deep decode step has a hundred short calls; from Python each of them costs some ten microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from compilespec.lowering.constants import Compiled
from compilespec.lowering.stitching import OpStep, StitchPlan
from compilespec.ops._build import load_kernels


def native_call(
    plan: StitchPlan, pieces: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[Any, ...]] | None:
    """A C++ call that does `Stitched`'s work without Python; None where a piece needs Python."""
    libraries = {
        key: str(piece.library)
        for key, piece in pieces.items()
        if isinstance(piece, Compiled) and piece.library is not None
    }
    if len(libraries) < len(pieces) or not load_kernels():
        return None
    native = torch.classes.compilespec.StepPlan(plan.num_inputs)
    for step, dying in zip(plan.steps, plan.dies_after, strict=True):
        if isinstance(step, OpStep):
            name, _, overload = step.target.replace(".", "::", 1).partition(".")
            given = [None if kind == "value" else value for kind, value in step.args]
            places = [place for place, (kind, _) in enumerate(step.args) if kind == "value"]
            native.add_op(
                name, "" if overload == "default" else overload, tuple(given), places,
                list(step.inputs), step.output, list(dying),
            )  # fmt: skip
        else:
            piece = pieces[step.piece]
            assert isinstance(piece, Compiled)
            native.add_piece(
                libraries[step.piece], list(step.inputs), list(piece.constants), list(step.outputs),
                list(dying),
            )  # fmt: skip
    native.set_outputs(list(plan.outputs))
    run = native.run
    return lambda *inputs: tuple(run(inputs))
