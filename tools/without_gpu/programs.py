"""Programs at real size, with few layers: layers are alike, and so is their code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from compilespec.lowering.host_waits import why_host_waits
from compilespec.lowering.pieces import split_at_attention
from compilespec.program import InputSpec, SpecProgram
from tools.gpu.models import SHAPES
from tools.without_gpu.absent import absent_gpu
from tools.without_gpu.dry_run import dry_run
from tools.without_gpu.facts import facts, faults
from tools.without_gpu.gpus import GPUS
from tools.without_gpu.machine_code import compile_step
from tools.without_gpu.steps import CUDA, meta_target, on_cuda, program_on_cuda

SIZES: dict[str, Any] = {"max_batch_size": 64, "max_seq_len": 4096}


def real_program(shape: str, *, spec: str, layers: int, **keywords: Any) -> SpecProgram:
    """The program of a model of `tools.gpu.models.SHAPES`, in bfloat16; keywords also of
    `program_on_cuda`.
    """
    chosen = SHAPES[shape]
    config = {**chosen.config, "num_hidden_layers": layers}
    target = meta_target(chosen.family, config, torch.bfloat16)
    return program_on_cuda(target, spec, **SIZES, **keywords)


def proven_steps(
    program: SpecProgram, arch: str, depth: int, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """Compile every step, or the one of a name such as "decode.3.greedy"; one record a step.

    A dry run does not see waits within a library's call: `waits_for_host` says what is known of the
    step's operators; such a step is not captured.

    Args:
        depth: layers of the whole model, for whose launches those of a layer are multiplied.
    """
    gpu = GPUS[arch]
    for key, graph in program.graphs.items():
        name = program.graphs.name(key)
        if only is not None and name != only:
            continue
        compiled = compile_step(on_cuda(graph.graph_module, graph.fakes, graph.inputs), gpu)
        with absent_gpu(gpu):
            waits_for_host = why_host_waits(graph.graph_module, CUDA)
        found = facts(compiled, dry_run(compiled, gpu), program.buffers)
        missing = depth - graph.num_layers if name != "replay" else 0
        launches = found["launches"]["all"] + missing * found["launches_of_a_layer"]["all"]
        yield {
            "step": name,
            "arch": arch,
            "faults": faults(found, gpu),
            "waits_for_host": waits_for_host,
            "launches_at_full_depth": launches,
            **found,
        }


def proven_pieces(
    program: SpecProgram, arch: str, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """Compile the distinct pieces of every step, or of the one of a name; one record a piece.

    The operators between pieces are those of the whole step.
    """
    gpu = GPUS[arch]
    for key, graph in program.graphs.items():
        name = program.graphs.name(key)
        if only is not None and name != only:
            continue
        plan, pieces = split_at_attention(graph.graph_module)
        places = {step.piece: step.inputs for step in plan.piece_steps}
        for number, (piece_key, piece) in enumerate(pieces.items(), 1):
            given = (graph.inputs[n : n + 1] for n in places[piece_key])
            inputs = [one[0] if one else _VALUE for one in given]
            compiled = compile_step(on_cuda(piece.graph_module, piece.fakes, inputs), gpu)
            found = facts(compiled, dry_run(compiled, gpu), program.buffers)
            yield {
                "step": f"{name}, piece {number} of {len(pieces)}",
                "arch": arch,
                "faults": faults(found, gpu),
                **found,
            }


_VALUE = InputSpec(name="value", kind="state")  # what an operator or another piece made
