"""The prefix cache beyond the pool, as the keywords of `compile()` ask for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from compilespec.lowering.artifacts import artifact_key, tensor_bytes
from compilespec.pipeline.options import CompileOptions
from compilespec.pipeline.plan import why_no_tiers
from compilespec.program import SpecProgram
from compilespec.runtime.packed_rows import PackedRows
from compilespec.runtime.prefix_files import PrefixFiles
from compilespec.runtime.prefix_tiers import PrefixTiers
from compilespec.runtime.step_runner import StepRunner
from compilespec.tracing.quantized_weights import plain_tensors


def prefix_tiers(
    program: SpecProgram, options: CompileOptions, runner: StepRunner
) -> PrefixTiers | None:
    """None where nothing is kept.  Raises: InvalidOption for a folder that cannot be used."""
    if why_no_tiers(program, options) is not None:
        return None
    caches = [runner.buffers[spec.name] for spec in program.buffers if spec.kind == "cache"]
    if not caches:
        return None
    files = None
    if options.prefix_dir is not None:
        folder, max_bytes = Path(options.prefix_dir), options.prefix_disk_mib * 2**20
        steps = _digest_of_steps(program, options)
        files = PrefixFiles(folder, max_bytes, lambda: _version(program, steps))
    return PrefixTiers(
        PackedRows(caches),
        PackedRows(runner.kept_states) if runner.kept_states else None,
        (options.prefix_host_mib or 0) * 2**20,
        files,
    )


def _digest_of_steps(program: SpecProgram, options: CompileOptions) -> bytes:
    """The keys of all compiled steps: code, graphs, sizes, torch, the machine."""
    graphs = program.graphs.values()
    keys = [artifact_key(graph, program, {"backend": options.backend}).name for graph in graphs]
    return " ".join(keys).encode()


def _version(program: SpecProgram, steps: bytes) -> str:
    """A digest of the steps and of all values of the weights."""
    digest = hashlib.sha256(steps)
    for name, weight in sorted(program.weights.items()):
        for plain in plain_tensors(weight):
            digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            digest.update(tensor_bytes(plain))
    return digest.hexdigest()[:32]
