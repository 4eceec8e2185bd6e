"""Stages trace and rewrite: the step graphs of a target and a drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter, Method
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.find import find_draft
from compilespec.passes.acceptance.registry import is_lossless
from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.draft_loops.kept_inputs import READ_BY_REPLAY
from compilespec.passes.output_head_input import HeadFunction
from compilespec.passes.rewrite import rewrite_phase, rewrite_replay
from compilespec.pipeline.options import CompileOptions
from compilespec.program import (
    PHASES,
    BufferSpec,
    Phase,
    PhaseGraph,
    ProgramConfig,
    SpecProgram,
    Traced,
)
from compilespec.progress import Reporter
from compilespec.quantization import describe_quantized, quantize_drafter
from compilespec.tracing.load import Target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import TargetInfo, describe_target


def build_program(
    target: Target,
    method: Method,
    draft: str | Path | nn.Module | None,
    options: CompileOptions,
    method_options: Mapping[str, Any],
    *,
    keep_graphs: bool = False,
    notes: Sequence[str] = (),
    progress: Reporter | None = None,
) -> SpecProgram:
    """Stages trace and rewrite: the step graphs of both phases, not lowered yet."""
    progress, found = progress or Reporter(), None
    if method.capabilities.needs_draft_weights:
        found = find_draft(draft, target, method.capabilities)
    with progress.step("trace", "target"):
        traced = trace_target(target.model)
    info = describe_target(traced, target)
    head = HeadFunction(traced) if options.prompt_logprobs else None
    drafter = _load_drafter(method, found, info, options, method_options, progress)
    capabilities = (drafter.capabilities if drafter else None) or method.capabilities
    drafts = capabilities.kind != "none"
    config = options.program_config(target, info, drafter if drafts else None)
    check_sizes(capabilities, config, options)
    loop = LOOPS[capabilities.kind]
    traced_draft: Mapping[str, Traced] = {}
    if drafter is not None:
        with progress.step("trace", "drafter"):
            traced_draft = drafter.capture(config, info)
    weights: dict[str, Tensor] = {}
    phases: dict[Phase, PhaseGraph] = {}
    buffers: dict[str, BufferSpec] = {}

    def context(phase: Phase, count: int | None = None, **changes: Any) -> PassContext:
        """What the passes of one graph read; of a step of `count` drafts where it is given."""
        own = config if count is None else dataclasses.replace(config, num_draft_tokens=count)
        shared: dict[str, Any] = {
            "phase": phase,
            "config": own,
            "capabilities": capabilities,
            "target": traced,
            "draft": traced_draft,
            "aux_layers": tuple(drafter.aux_layers) if drafter else (),
            "chain": getattr(drafter, "chain", "module_rows"),
            "acceptance": options.acceptance_rule,
            "kv_layers": tuple(drafter.kv_layers) if drafter else (),
            "kv_block_sizes": _block_sizes(drafter, config),
            "weights": weights,
            "buffers": buffers,
            "prepack": config.device.type == "cpu",
            "logits_processor": options.processor,
            "host_processors": options.host_processors,
            "prompt_logprobs": options.prompt_logprobs,
        }
        return PassContext(**{**shared, **changes})

    numbers, total = itertools.count(1), num_graphs(options, config, capabilities)

    def rewriting(ctx: PassContext) -> contextlib.AbstractContextManager[object]:
        return progress.step("rewrite", ctx.title, index=next(numbers), total=total)

    def rewritten(ctx: PassContext) -> PhaseGraph:
        with rewriting(ctx):
            return rewrite_phase(ctx, keep_graphs=keep_graphs)

    for phase in PHASES:
        phases[phase] = rewritten(context(phase))
    variants, replay, parts = {}, None, [buffers]
    if options.smaller_draft_counts:
        for count in options.smaller_draft_counts:
            parts.append({})
            variants[count] = rewritten(context("decode", count, buffers=parts[-1]))
        if 0 in variants and loop.needs_replay:
            parts.append({})
            ctx = context("decode", buffers=parts[-1], read_only=READ_BY_REPLAY)
            with rewriting(ctx):
                replay = rewrite_replay(ctx)
    greedy: dict[int, PhaseGraph] = {}
    if has_greedy_step(options, config):
        for count in (*options.smaller_draft_counts, config.num_draft_tokens):
            parts.append({})
            is_largest = count == config.num_draft_tokens
            ctx = context(
                "decode", None if is_largest else count, buffers=parts[-1], greedy_only=True
            )
            greedy[count] = rewritten(ctx)
    return SpecProgram(
        method=method.capabilities.name,
        model=target.name,
        config=config,
        phases=phases,
        buffers=tuple({name: spec for part in parts for name, spec in part.items()}.values()),
        weights=weights,
        vocab_size=info.vocab_size,
        target_weights=traced.weights,
        lossless=is_lossless(options.acceptance_rule) and capabilities.lossless,
        num_reserved_tokens=loop.num_reserved_tokens(config.num_draft_tokens),
        num_repeated_tokens=loop.num_repeated_tokens(config.num_draft_tokens),
        prefix_lookahead=loop.lookahead(config.num_draft_tokens),
        has_own_blocks=bool(_block_sizes(drafter, config)),
        recorder=drafter.recorder if drafter else None,
        propose_on_host=drafter.propose_on_host if drafter else None,
        host_processors=options.host_processors,
        head=head,
        variants=variants,
        greedy=greedy,
        replay=replay,
        notes=(*_notes(target, drafter), *notes),
    )


def _load_drafter(
    method: Method,
    found: Path | nn.Module | None,
    info: TargetInfo,
    options: CompileOptions,
    method_options: Mapping[str, Any],
    progress: Reporter,
) -> Drafter | None:
    """The method's drafter, quantized where that is asked for; None where it has none."""
    if found is None and options.draft_quantization is None:
        return method.load(None, info, method_options)
    with progress.step("load", "drafter"):
        return quantize_drafter(
            method.load(found, info, method_options), options.draft_quantization
        )


def num_graphs(options: CompileOptions, config: ProgramConfig, capabilities: Capabilities) -> int:
    """How many steps `build_program` rewrites."""
    smaller = options.smaller_draft_counts
    num_greedy = len(smaller) + 1 if has_greedy_step(options, config) else 0
    has_replay = 0 in smaller and LOOPS[capabilities.kind].needs_replay
    return len(PHASES) + len(smaller) + num_greedy + has_replay


def has_greedy_step(options: CompileOptions, config: ProgramConfig) -> bool:
    """Whether batches without a sampled request have a decode step of their own.

    Raises: InvalidOption where it is asked for, and the rule or a processor needs the logits.
    """
    needs_logits = options.acceptance_rule.rule != "strict" or options.host_processors
    if options.greedy_step == "auto":
        return config.device.type == "cuda" and not needs_logits
    if options.greedy_step and needs_logits:
        raise InvalidOption(
            "greedy_step=True needs acceptance='auto' and host_processors=False: others read the "
            "logits; leave greedy_step= out"
        )
    return options.greedy_step is True


def check_sizes(capabilities: Capabilities, config: ProgramConfig, options: CompileOptions) -> None:
    """Raises: InvalidOption where the draft loop cannot work with K, or with several of them."""
    smaller = options.smaller_draft_counts
    LOOPS[capabilities.kind].check(capabilities.name, config, smaller)
    if smaller and options.acceptance_rule.reads_draft_probs:
        raise InvalidOption(
            f"acceptance={options.acceptance_rule.rule!r} takes one K: give num_draft_tokens= one "
            f"number, or leave acceptance= at 'auto'"
        )


def _block_sizes(drafter: Drafter | None, config: ProgramConfig) -> tuple[int, ...]:
    """Tokens per block of each draft step's cache; empty: the program's blocks."""
    sizes = drafter.kv_block_sizes if drafter is not None else ()
    if sizes and len(sizes) != config.num_draft_tokens:
        raise InvalidOption(
            f"kv_block_sizes: expected one for each of the {config.num_draft_tokens} draft steps, "
            f"came {len(sizes)}"
        )
    return sizes


def _notes(target: Target, drafter: Drafter | None) -> tuple[str, ...]:
    notes = [target.describe()]
    if drafter is not None:
        describe = getattr(drafter, "describe", None)
        notes.append(describe() if describe else type(drafter).__name__)
    for name, module in (("target", target.model), ("draft", drafter)):
        if module is not None and (text := describe_quantized(module)):
            notes.append(f"{name} quantized: {text}")
    return tuple(notes)
