"""The contents of `Engine.plan()`: the decisions and their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from compilespec._torch_compat import storage_place
from compilespec.ops.device import traits_of
from compilespec.passes.splice.acceptance.registry import describe
from compilespec.pipeline.options import CompileOptions
from compilespec.program import SpecProgram
from compilespec.runtime.prefix_cache import why_not
from compilespec.runtime.step_runner import StepRunner


def describe_plan(
    program: SpecProgram, options: CompileOptions, runner: StepRunner
) -> dict[str, Any]:
    """Method, sizes, features that are on or off, and the reasons, in plain values."""
    config = program.config
    return {
        "model": program.model,
        "method": program.method,
        "num_draft_tokens": config.num_draft_tokens,
        "acceptance": describe(options.acceptance_rule),
        "lossless": program.lossless,
        "buckets": runner.buckets,
        "backend": options.backend,
        "dtype": str(config.dtype).removeprefix("torch."),
        "device": str(config.device),
        "max_batch_size": config.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "weights_mib": _num_bytes(runner.weights.values()) / 2**20,
        "kv_cache_mib": sum(b.num_bytes for b in program.buffers if b.kind == "cache") / 2**20,
        "state_mib_per_request": program.state_bytes_per_request / 2**20,
        "cached_states_mib": runner.num_kept_state_bytes / 2**20,
        "kv_cache_bytes_per_token": program.cache_bytes_per_token,
        "compile": runner.lowered.costs() if runner.lowered else {},
        "attention": dict(runner.lowered.attention) if runner.lowered else {},
        "prefix_caching": _on_or_off(why_not_shared(program, options)),
        "prefix_tiers": _on_or_off(why_no_tiers(program, options)),
        "overlap": _on_or_off(why_not_overlapped(program, options)),
        "why": program.notes,
    }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """The number of bytes; shared storage counts once."""
    return sum({storage_place(tensor): tensor.nbytes for tensor in tensors}.values())


def _on_or_off(why_not: str | None) -> str:
    return "on" if why_not is None else f"off: {why_not}"


def why_not_shared(program: SpecProgram, options: CompileOptions) -> str | None:
    """The reason why requests do not share blocks of a common prefix; None: they do."""
    if not options.enable_prefix_caching:
        return "enable_prefix_caching=False"
    if program.recurrent_states and options.max_cached_states == 0:
        return "max_cached_states=0, and recurrent layers need them"
    return why_not(program)


def why_no_tiers(program: SpecProgram, options: CompileOptions) -> str | None:
    """The reason why no blocks are kept beyond the KV cache; None: they are."""
    if not options.has_prefix_tiers:
        return "neither prefix_host_mib= nor prefix_dir= was given"
    return why_not_shared(program, options)


def num_state_places(program: SpecProgram, options: CompileOptions) -> int:
    """The number of copies of recurrent states that prefix caching may keep."""
    if why_not_shared(program, options) is not None:
        return 0
    asked = options.max_cached_states
    return max(8, 2 * options.max_batch_size) if asked is None else asked


def why_not_overlapped(program: SpecProgram, options: CompileOptions) -> str | None:
    """The reason why a step is launched only after the last one's tokens were read; None:
    before.
    """
    drafter = program.drafter
    if drafter is not None and drafter.propose_on_host is not None:
        return "drafts come from the host, which needs the tokens"
    if drafter is not None and drafter.recorder is not None:
        return "the host records every step's hidden states"
    if options.overlap == "auto" and not traits_of(program.config.device).has_launch_costs:
        return "nothing is gained on the CPU"
    return "overlap=False" if options.overlap is False else None
