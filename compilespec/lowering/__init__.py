"""Stage "lower": program graphs to callables, through Inductor or interpreted ("eager")."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compilespec import _torch_compat
from compilespec.errors import InvalidOption
from compilespec.lowering.artifacts import ArtifactCache, artifact_key
from compilespec.program import Lowered, LoweredPhase, Phase, PhaseGraph, SpecProgram

BACKENDS = ("inductor", "eager")

# Inductor never owns CUDA graphs (its trees copy inputs and re-record), and bf16 results are
# rounded where eager rounds them, so that the two backends agree.
INDUCTOR_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,
    "size_asserts": False,
    "nan_asserts": False,
    "fallback_random": True,
}

# A decode step is a hundred short calls: a C++ wrapper around them takes a third off the step.
# What is left beside products and attention is a few rows of element-wise work, where a parallel
# region costs more than it saves, and a fixed thread count would tie the artifact to the machine.
PHASE_OPTIONS: dict[Phase, dict[str, Any]] = {
    "decode": {"cpp_wrapper": True, "cpp.threads": 1},
    "prefill": {"cpp.dynamic_threads": True},
}


def lower(
    program: SpecProgram, *, backend: str = "inductor", cache: ArtifactCache | None = None
) -> Lowered:
    """One callable a phase; with "eager" the same rewritten graphs, run operator by operator.

    Raises: InvalidOption for an unknown backend.
    """
    if backend not in BACKENDS:
        raise InvalidOption(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    lower_phase = _interpret if backend == "eager" else _compile
    artifacts = cache or ArtifactCache()

    def lowered(graph: PhaseGraph) -> LoweredPhase:
        return lower_phase(graph, program, artifacts)

    return Lowered(
        program=program,
        backend=backend,
        phases={name: lowered(graph) for name, graph in program.phases.items()},
        variants={count: lowered(graph) for count, graph in program.variants.items()},
        replay=lowered(program.replay) if program.replay is not None else None,
    )


def _interpret(graph: PhaseGraph, program: SpecProgram, cache: ArtifactCache) -> LoweredPhase:
    return LoweredPhase(
        phase=graph.phase,
        call=_with_no_grad(graph.graph_module.forward),
        inputs=graph.inputs,
        outputs=graph.outputs,
        compile_ms=0.0,
        from_cache=False,
    )


def _compile(graph: PhaseGraph, program: SpecProgram, cache: ArtifactCache) -> LoweredPhase:
    started = time.perf_counter()
    options = {**INDUCTOR_OPTIONS, **PHASE_OPTIONS[graph.phase]}
    key = artifact_key(graph, program, options)
    stored = cache.load(key)
    if stored is None:
        compiled = _torch_compat.standalone_compile(graph.graph_module, graph.fakes, options)
        cache.save(key, compiled, graph.inputs, graph.outputs)
        call, inputs, outputs = compiled, graph.inputs, graph.outputs
    else:
        call, inputs, outputs = stored
    return LoweredPhase(
        phase=graph.phase,
        call=_with_no_grad(call),
        inputs=inputs,
        outputs=outputs,
        compile_ms=(time.perf_counter() - started) * 1e3,
        from_cache=stored is not None,
    )


def _with_no_grad(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            result: Sequence[torch.Tensor] = call(*inputs)
        return result

    return run
