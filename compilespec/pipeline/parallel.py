"""The additions of a tensor-parallel start: join, compare, check, and follow."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compilespec.errors import NotSupported
from compilespec.inspect.lockstep import check_lockstep
from compilespec.inspect.stages import context_of
from compilespec.lowering.artifacts import source_digest
from compilespec.methods.capabilities import Capabilities
from compilespec.ops.device import traits_of
from compilespec.pipeline.options import CompileOptions
from compilespec.program import PIECE, SpecProgram
from compilespec.progress import Reporter
from compilespec.runtime.executor import Executor
from compilespec.runtime.ranks import LeadExecutor, Ranks, follow
from compilespec.runtime.step_runner import StepRunner
from compilespec.tracing.load import Target
from compilespec.tracing.quantized_weights import is_quantized


def join_ranks(options: CompileOptions, method: Capabilities) -> Ranks | None:
    """This process among those of its job; None for a single process.

    Raises: NotSupported where something asked for is not built for several ranks.
    """
    size = options.tensor_parallel_size
    if size == 1:
        return None
    check_parallel(options, method)
    return Ranks(size)


def check_parallel(options: CompileOptions, method: Capabilities) -> None:
    """Raises: NotSupported."""
    missing = {
        "spec='auto' (name the method)": method.chooses,
        f"spec={method.name!r}": method.outputs_hidden_states or method.kind == "in_place",
        "host_processors=True": options.host_processors,
        "prompt_logprobs=True": options.prompt_logprobs,
        "prompt_embeds=True": options.prompt_embeds,
    }
    for name, is_asked in missing.items():
        if is_asked:
            raise NotSupported(
                f"{name} is not built for tensor_parallel_size={options.tensor_parallel_size}: "
                "leave it out, or run one process"
            )


def check_ranks(
    ranks: Ranks,
    program: SpecProgram,
    options: CompileOptions,
    target: Target,
    reporter: Reporter,
) -> None:
    """Compare the ranks, and one step of each phase with that of one process; then this rank drops
    the whole weights that it holds parts of.

    Raises: RanksDiffer where a rank has other code, options or weights; NotSupported; PassError
        where the ranks' steps do not give what one process computes.
    """
    _compare(ranks, program, options)
    with reporter.step("load", "ranks in lockstep"):
        check_lockstep(program, ranks.group, ranks.tell)
    _forget_whole(program, target)


def _compare(ranks: Ranks, program: SpecProgram, options: CompileOptions) -> None:
    if not traits_of(program.config.device).is_cpu:
        raise NotSupported(
            f"tensor_parallel_size={ranks.size} runs on the CPU alone so far, by gloo; got "
            f"device={program.config.device}"
        )
    steps = [graph.spliced.code for graph in program.graphs.values()]
    ranks.agree(
        {
            "version of torch": torch.__version__,
            "version of compilespec": source_digest()[:12],
            "method": program.method,
            **{f"{name}=": value for name, value in _plain_options(options).items()},
            "weights": f"{_checksum(_whole_weights(program)):08x}",
            "graphs": f"{zlib.crc32(''.join(steps).encode()):08x}",
        }
    )


def _plain_options(options: CompileOptions) -> dict[str, str]:
    """Options for comparison; functions and other objects, which may lie anywhere, count by
    type.
    """
    plain = (str, int, float, tuple, list, dict, type(None))
    return {
        name: repr(value) if isinstance(value, plain) else type(value).__name__
        for name, value in vars(options).items()
        if name in {field.name for field in dataclasses.fields(options)}
    }


def _whole_weights(program: SpecProgram) -> Mapping[str, Tensor]:
    return {n: w for n, w in program.weights.items() if not n.endswith(PIECE)}


def _checksum(weights: Mapping[str, Tensor]) -> int:
    total = 0
    for name, tensor in sorted(weights.items()):
        total = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), total)
        numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        total = zlib.crc32(numbers.data, total)
    return total


def _forget_whole(program: SpecProgram, target: Target) -> None:
    """Drop weights that this rank has a part of, and a model that was loaded here."""
    unread: set[str] = set()
    for graph in program.graphs.values():
        ctx = context_of(graph)
        assert ctx.sharding is not None
        unread |= {n for n in ctx.sharding.sources.values() if _is_unread(program, n)}
        unread |= {n for n, w in ctx.target.weights.items() if is_quantized(w)}  # read in parts
        for kept in (ctx.weights, ctx.sharding.whole, ctx.target.weights):
            if isinstance(kept, dict):
                kept.update({n: _without_memory(kept[n]) for n in unread & kept.keys()})
    for module in target.model.modules() if target.directory is not None else ():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_without_memory(parameter), False)


def _is_unread(program: SpecProgram, name: str) -> bool:
    return not any(name in context_of(graph).inputs for graph in program.graphs.values())


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def lead_or_follow(ranks: Ranks, runner: StepRunner, reporter: Reporter) -> Executor:
    """Rank 0's executor.  On other ranks this follows rank 0 until its engine closes, and ends the
    process.

    Raises: SystemExit.
    """
    if ranks.rank == 0:
        return LeadExecutor(runner, ranks)
    reporter.ready()
    follow(runner, ranks)
    raise SystemExit(0)
