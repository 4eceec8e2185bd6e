"""What is claimed of a step's code: read off its kernels and its dry run, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from compilespec.passes.graph.fakes import EXAMPLE_SIZES
from compilespec.program import BufferSpec
from tools.without_gpu.dry_run import Call, DryRun
from tools.without_gpu.gpus import Gpu
from tools.without_gpu.machine_code import CompiledStep, Kernel

MOST_REGISTERS = 255  # of a thread, on every architecture since sm_35
MUCH = 128 << 10  # bytes for a program: more than those of a norm's row
# Bytes of a thread: the sine of a large angle needs 32, and registers spill, no tile does (other
# GPUs than Hopper: up to 264 in attention with paths).
MOST_STACK = 288


def facts(
    compiled: CompiledStep, run: DryRun, buffers: Sequence[BufferSpec], context: int = 2048
) -> dict[str, Any]:
    """By name, for JSON.  Bytes are counted with `context` tokens of every request in the cache."""
    kernels = [*compiled.kernels, *run.kernels]
    floor, total = bytes_of(run, buffers, context)
    return {
        "launches": launches_of(run),
        "launches_of_a_layer": launches_of(DryRun(calls=first_layer(run))),
        "library_calls": Counter(call.name for call in run.calls if call.kind == "library"),
        "own_calls": Counter(call.name for call in run.calls if call.kind == "own"),
        "bytes": total,
        "floor_bytes": floor,
        "bytes_over_floor": round(total / floor, 4) if floor else None,
        "most_reads_of_a_weight": most_reads(run),
        "cache_copies": run.cache_copies,
        "weights_beside_products": beside_products(run),
        "host_copies": run.host_copies,
        "syncs": run.syncs,
        "references": run.references,
        "fewest_programs": fewest_programs(run),
        "num_kernels": len(kernels),
        "most_registers": max(kernel.registers for kernel in kernels),
        "most_shared": max(kernel.shared for kernel in kernels),
        "spilled": spilled(kernels),
        "compile_s": round(compiled.seconds, 1),
    }


def faults(found: dict[str, Any], gpu: Gpu) -> list[str]:
    """What no step may do, of what `facts` found."""
    said = [
        f"{what}: {', '.join(found[name])}"
        for name, what in (
            ("cache_copies", "a cache is copied"),
            ("weights_beside_products", "generated code reads weights"),
            ("host_copies", "host and device exchange data"),
            ("syncs", "the host waits"),
            ("references", "operators without a kernel"),
            ("spilled", "registers spill"),
        )
        if found[name]
    ]
    for name, programs in found["fewest_programs"].items():
        if programs < gpu.num_multiprocessors:
            said.append(f"{name}: {programs} programs, {gpu.num_multiprocessors} multiprocessors")
    if found["most_registers"] > MOST_REGISTERS:
        said.append(f"{found['most_registers']} registers, of {MOST_REGISTERS}")
    if found["most_shared"] > gpu.most_shared:
        said.append(f"{found['most_shared']} bytes of shared memory, of {gpu.most_shared}")
    return said


def fewest_programs(run: DryRun) -> dict[str, int]:
    """Of the generated kernels whose programs move `MUCH` each, if any: the one with the fewest."""
    generated = (call for call in run.calls if call.kind == "generated")
    calls = [call for call in generated if call.num_bytes >= MUCH * call.grid[0]]
    if not calls:
        return {}
    fewest = min(calls, key=lambda call: call.grid)
    return {fewest.name: fewest.grid[0]}


def spilled(kernels: Sequence[Kernel]) -> list[str]:
    """Kernels that spill registers in every configuration."""
    least: dict[str, int] = {}
    for kernel in kernels:
        least[kernel.name] = min(kernel.stack, least.get(kernel.name, kernel.stack))
    return [f"{name} ({stack} bytes)" for name, stack in least.items() if stack > MOST_STACK]


def launches_of(run: DryRun) -> dict[str, int]:
    kinds = Counter(str(call.kind) for call in run.calls)
    return {"all": kinds.total(), **kinds}


def first_layer(run: DryRun) -> list[Call]:
    """The launches from behind the first attention up to, and with, the second."""
    ends = [place for place, call in enumerate(run.calls) if call.name == "attend_kernel"]
    return run.calls[ends[0] + 1 : ends[1] + 1] if len(ends) > 1 else []


def most_reads(run: DryRun) -> dict[str, int]:
    """How often a matrix of weights is read, at most: of the target, and of the drafter."""
    counts = Counter(
        source for call in run.calls for entry in call.whole_matrices for source in entry.sources
    )
    most: dict[str, int] = {}
    for name, count in counts.items():
        owner = name.partition(".")[0]
        most[owner] = max(count, most.get(owner, 0))
    return most


def beside_products(run: DryRun) -> list[str]:
    """Weights that generated code reads from end to end, such as to copy or to dequantise them."""
    return [
        source
        for call in run.calls
        if call.kind == "generated"
        for entry in call.whole_matrices
        for source in entry.sources
    ]


def bytes_of(run: DryRun, buffers: Sequence[BufferSpec], context: int) -> tuple[int, int]:
    """(the floor, all): the floor is matrices of weights, and what attention reads of caches."""
    per_token = {
        buffer.name: buffer.num_bytes // (buffer.shape[0] * buffer.shape[1])
        for buffer in buffers
        if buffer.kind == "cache"
    }
    cached = 0
    for call in run.calls:
        if call.name == "attend_kernel":
            names = (entry.name for entry in call.inputs if entry.kind == "cache")
            cached += EXAMPLE_SIZES["B"] * context * sum(per_token[name] for name in names)
    weights = sum(sum(call.whole_matrices.values()) for call in run.calls)
    return weights + cached, sum(call.num_bytes for call in run.calls) + cached
