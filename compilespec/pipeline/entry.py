"""`compile()`: five stages, one call each.

trace -> rewrite -> lower -> (capture) -> run.  `build_program` is the first two, `compile` all of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compilespec.cudagraphs.modes import GraphOptions, units_for
from compilespec.errors import InvalidOption
from compilespec.lowering import lower, prepare_kernels
from compilespec.methods.base import Capabilities, Drafter, Method, MethodConfig, TargetInfo
from compilespec.methods.registry import get_method
from compilespec.passes.acceptance import describe, is_lossless
from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.draft_loops.kept_inputs import READ_BY_REPLAY
from compilespec.passes.output_head_input import HeadFunction
from compilespec.passes.rewrite import rewrite_phase, rewrite_replay
from compilespec.passes.runner import PassContext
from compilespec.pipeline.options import (
    ACCEPTANCE_OPTIONS,
    CompileOptions,
    check_method_options,
    resolve_options,
)
from compilespec.program import (
    PHASES,
    BufferSpec,
    Phase,
    PhaseGraph,
    ProgramConfig,
    SpecProgram,
    Traced,
)
from compilespec.progress import Progress, Reporter
from compilespec.quantization import describe_quantized, quantize_drafter, quantize_target
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.engine import Engine
from compilespec.runtime.prefix_cache import lookahead_of, why_not
from compilespec.runtime.step_costs import measure
from compilespec.runtime.step_runner import StepRunner
from compilespec.tracing.load import Target, check_draft, find_draft, load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target

logger = logging.getLogger("compilespec")


def compile(
    model: nn.Module | str | Path,
    spec: str | Method | MethodConfig | None = "none",
    *,
    draft: str | Path | nn.Module | None = None,
    num_draft_tokens: int | Sequence[int] | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_prefill_tokens: int = 2048,
    kv_cache_tokens: int | None = None,
    enable_prefix_caching: bool = True,
    overlap: bool | str = "auto",
    greedy_step: bool | str = "auto",
    max_step_tokens: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backend: str = "inductor",
    cudagraphs: str | GraphOptions = "auto",
    buckets: Sequence[int] | Mapping[str, Sequence[Any]] | None = None,
    acceptance: str | Callable[..., Any] = "auto",
    logits_processor: Callable[..., Tensor] | None = None,
    host_processors: bool = False,
    prompt_logprobs: bool = False,
    quantize: Any = None,
    draft_quantize: Any = None,
    tokenizer: Any = None,
    progress: Callable[[Progress], object] | None = None,
    **method_options: Any,
) -> Engine:
    """Compile a causal language model and a drafter into one program that decodes speculatively.

    Args:
        model: an nn.Module, a directory in Hugging Face layout, or "demo".
        spec: drafting method by name, as a config, or a method object of one's own; "none" is
        plain decoding through the same path.
        draft: directory or module of the drafter; None looks beside the target.
        num_draft_tokens: K; None takes the checkpoint's own, else 3.  Several, such as (0, 2, 5),
        let every step take the one that pays, by measured times and recent acceptance.  At most 64,
        and below max_seq_len.
        max_seq_len: tokens per request, prompt included; None takes the model's limit, at most
        4096.
        kv_cache_tokens: size of the KV cache; None is max_batch_size * max_seq_len.
        enable_prefix_caching: keep the cache blocks of prompts and outputs until others need them,
        and find them again for requests that begin alike.
        overlap: launch a step before the tokens of the last one are read; "auto" where it gains.
        greedy_step: compile a second decode step for batches whose requests all want the argmax and
        nothing else (no sampling, penalties, bias, guide or log-probabilities): it never writes the
        logits where heads are fused with their argmax.  "auto": on CUDA.
        max_step_tokens: tokens of a step, prefill and decode together, so that long prompts delay
        other requests less; None is no limit beside max_prefill_tokens.
        backend: "inductor", or "eager" (the same rewritten graphs, interpreted).
        cudagraphs: "auto" (full_and_piecewise on CUDA, none on the CPU), "full_and_piecewise",
        "full", "full_decode_only", "piecewise", "none", or a `GraphOptions` with budgets.
        buckets: batch sizes that decode steps are padded to, or a dict of "decode" sizes and
        "prefill" pairs (requests, tokens); None pads nothing where no graphs are captured.
        quantize: a torchao config, its short name ("int8_weight_only", "int8_dynamic",
        "int4_weight_only", "float8_weight_only", "float8_dynamic"), or a `Quantize` that also says
        for which modules.  Needs the extra `quant`; `model` is left as it is.
        draft_quantize: the same for the drafter.  A head that it shares with the target becomes
        its own then, unless the target's is quantized: that one stays shared.
        acceptance: how drafts are judged.  "auto": greedy requests strictly, sampled ones by the
        target's own noise, so that their tokens are those of plain decoding with the same seed;
        "rejection" or "block": by probabilities, which keeps the distribution; a function marked
        with `compilespec.acceptance_rule`; or "relaxed", which is lossy.
        logits_processor: a function or module that is traced into the step and changes the target's
        logits; what it may read, and must not do, is said at `LogitsProcessor`.
        host_processors: requests may have a `logits_processor` of their own, a Python function. A
        step then waits for the host, copies its logits, and cannot be captured in a CUDA graph.
        prompt_logprobs: requests may ask for `prompt_logprobs`.  Prefill then gives out its hidden
        states; others pay nothing else.
        progress: called with a `compilespec.Progress` record whenever a step of starting begins,
        tells more of itself, or is done; the same lines go to the logger "compilespec" at INFO.
        Compiling stops at an exception of its own, which is raised here.
        method_options: options of the method, such as `aux_ids_are=`, and of the acceptance:
        `relaxed_topk`, `relaxed_delta`, `begin_thinking_token_id`, `end_thinking_token_id`;
        `force_num_accepted`, for benchmarks, accepts so many drafts whatever they are.

    Returns: an `Engine`, ready to generate.
    Raises: a `compilespec.errors.SpecError` that names what was expected, what came, and what to
    try.
    """
    method, method_options = _method_of(spec, draft, method_options)
    options = resolve_options(
        **_take(method_options, ACCEPTANCE_OPTIONS),
        cudagraphs=cudagraphs,
        acceptance=acceptance,
        logits_processor=logits_processor,
        host_processors=host_processors,
        prompt_logprobs=prompt_logprobs,
        quantize=quantize,
        draft_quantize=draft_quantize,
        backend=backend,
        buckets=buckets,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_prefill_tokens=max_prefill_tokens,
        kv_cache_tokens=kv_cache_tokens,
        num_draft_tokens=num_draft_tokens,
        enable_prefix_caching=enable_prefix_caching,
        overlap=overlap,
        greedy_step=greedy_step,
        max_step_tokens=max_step_tokens,
    )
    reporter = Reporter(progress)
    target = _load(model, dtype, device, tokenizer, options, reporter)
    method, options, why = _chosen(method, target, draft, options, method_options, reporter)
    if asked := target.generation_defaults.describe():
        logger.info(asked)
        why = (*why, asked)
    program = build_program(
        target, method, draft, options, method_options, notes=why, progress=reporter
    )
    kinds = options.graphs.kinds_on(program.config.device)
    lowered = lower(program, backend=options.backend, units=units_for(kinds), progress=reporter)
    with reporter.step("load", "weights and buffers, in place"):
        runner = StepRunner(lowered, buckets=options.buckets, graphs=options.graphs)
    runner.capture(reporter)
    capabilities = program.phases["decode"].context.capabilities
    shares = _why_not_shared(program, options) is None
    policy = None
    if program.variants:
        counts = (*program.variants, program.config.num_draft_tokens)
        with reporter.step("capture", "times of steps, by K"):
            policy = DraftPolicy(counts, measure(runner))
    reporter.ready()
    return Engine(
        runner,
        policy=policy,
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        generation_defaults=target.generation_defaults.params,
        plan=_plan(program, options, runner),
        graph_report=runner.graph_report,
        graphs=program.phases,
        buckets=runner.buckets,
        count_recompiles=lambda: runner.num_recompiles,
        on_finish=program.recorder.finish if program.recorder else None,
        on_preempt=program.recorder.forget if program.recorder else None,
        propose=program.propose_on_host,
        overlap=_why_not_overlapped(program, options) is None,
        prefix_lookahead=(
            lookahead_of(capabilities, program.config.num_draft_tokens) if shares else None
        ),
        max_step_tokens=options.max_step_tokens,
    )


def trace(
    model: nn.Module | str | Path,
    spec: str | Method | MethodConfig | None = "none",
    *,
    draft: str | Path | nn.Module | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    keep_graphs: bool = True,
    progress: Callable[[Progress], object] | None = None,
    **keywords: Any,
) -> SpecProgram:
    """The rewritten graphs without lowering: stages trace and rewrite of `compile`, same keywords.

    Args:
        keep_graphs: keep each pass's graph before and after in its `PassRecord`.
        progress: as for `compile`; no record "ready" ends it.
    """
    known = set(inspect.signature(resolve_options).parameters) - set(ACCEPTANCE_OPTIONS)
    own = _take(keywords, known)
    method, method_options = _method_of(spec, draft, keywords)
    options = resolve_options(**own, **_take(method_options, ACCEPTANCE_OPTIONS))
    reporter = Reporter(progress)
    target = _load(model, dtype, device, tokenizer, options, reporter)
    method, options, why = _chosen(method, target, draft, options, method_options, reporter)
    return build_program(
        target, method, draft, options, method_options, keep_graphs=keep_graphs, notes=why,
        progress=reporter,
    )  # fmt: skip


def _method_of(
    spec: str | Method | MethodConfig | None, draft: Any, options: Mapping[str, Any]
) -> tuple[Method, dict[str, Any]]:
    """The method that `spec` names or is, and its options; keywords win over those of a config.

    Raises: UnknownMethod, InvalidOption, DraftNotFound, before anything is loaded.
    """
    own: Mapping[str, Any] = {}
    if isinstance(spec, MethodConfig):
        method, own = get_method(spec.name), spec.options
    elif hasattr(spec, "capabilities") and hasattr(spec, "load"):
        method = cast(Method, spec)
    else:
        method = get_method(spec)
    given = {**own, **options}
    check_method_options(given, method.capabilities, list(inspect.signature(compile).parameters))
    check_draft(draft, method.capabilities)
    return method, given


def _take(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that are there, removed."""
    return {name: options.pop(name) for name in names if name in options}


def _load(
    model: nn.Module | str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    tokenizer: Any,
    options: CompileOptions,
    reporter: Reporter,
) -> Target:
    """The target, quantized where that is asked for."""
    with reporter.step("load", "target"):
        target = load_target(model, dtype=dtype, device=device, tokenizer=tokenizer)
        return quantize_target(target, options.quantize)


def _chosen(
    method: Method,
    target: Target,
    draft: str | Path | nn.Module | None,
    options: CompileOptions,
    method_options: Mapping[str, Any],
    reporter: Reporter,
) -> tuple[Method, CompileOptions, tuple[str, ...]]:
    """The method itself, or the one that it picks, with its K and the reasons."""
    if not method.capabilities.chooses:
        return method, options, ()
    if draft is not None or method_options:
        raise InvalidOption(
            f"spec={method.capabilities.name!r} looks for drafters itself: leave out draft= and "
            f"method options, or name the method"
        )
    from compilespec.pipeline.auto import choose

    prepare_kernels(target.device, reporter)
    with reporter.step("trace", "trials of methods") as step:

        def build(one: Method, trial: CompileOptions) -> SpecProgram:
            step.tell(detail=one.capabilities.name)
            return build_program(target, one, None, trial, {})

        choice = choose(target, options, build)
    return choice.method, choice.options, choice.why


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
    num_repeated = num_repeated_tokens(capabilities, config)
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
            "acceptance": options.acceptance,
            "kv_layers": tuple(drafter.kv_layers) if drafter else (),
            "kv_block_sizes": _block_sizes(drafter, config),
            "weights": weights,
            "buffers": buffers,
            "prepack": config.device.type == "cpu",
            "logits_processor": options.logits_processor,
            "host_processors": options.host_processors,
            "prompt_logprobs": options.prompt_logprobs,
        }
        return PassContext(**{**shared, **changes})

    numbers, total = itertools.count(1), num_graphs(options, config, capabilities)

    def rewriting(ctx: PassContext) -> contextlib.AbstractContextManager[object]:
        return progress.step("rewrite", ctx.title, index=next(numbers), total=total)

    def rewritten(ctx: PassContext) -> PhaseGraph:
        with rewriting(ctx):
            return rewrite_phase(ctx, keep_graphs=keep_graphs, disabled=options.disabled_passes)

    for phase in PHASES:
        phases[phase] = rewritten(context(phase))
    variants, replay, parts = {}, None, [buffers]
    if options.smaller_draft_counts:
        check_several_k(capabilities, options)
        loop = LOOPS[capabilities.kind]
        for count in options.smaller_draft_counts:
            parts.append({})
            variants[count] = rewritten(context("decode", count, buffers=parts[-1]))
        if 0 in variants and loop.needs_replay:
            parts.append({})
            ctx = context("decode", buffers=parts[-1], read_only=READ_BY_REPLAY)
            with rewriting(ctx):
                replay = rewrite_replay(ctx, disabled=options.disabled_passes)
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
        num_repeated_tokens=num_repeated,
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
    if found is None and options.draft_quantize is None:
        return method.load(None, info, method_options)
    with progress.step("load", "drafter"):
        return quantize_drafter(method.load(found, info, method_options), options.draft_quantize)


def num_graphs(options: CompileOptions, config: ProgramConfig, capabilities: Capabilities) -> int:
    """How many steps `build_program` rewrites."""
    smaller, loop = options.smaller_draft_counts, LOOPS.get(capabilities.kind)
    num_greedy = len(smaller) + 1 if has_greedy_step(options, config) else 0
    has_replay = loop is not None and 0 in smaller and loop.needs_replay
    return len(PHASES) + len(smaller) + num_greedy + has_replay


def has_greedy_step(options: CompileOptions, config: ProgramConfig) -> bool:
    """Whether batches without a sampled request have a decode step of their own.

    Raises: InvalidOption where it is asked for, and the rule or a processor needs the logits.
    """
    needs_logits = options.acceptance.rule != "strict" or options.host_processors
    if options.greedy_step is None:
        return config.device.type == "cuda" and not needs_logits
    if options.greedy_step and needs_logits:
        raise InvalidOption(
            "greedy_step=True needs acceptance='auto' and host_processors=False: others read the "
            "logits; leave greedy_step= out"
        )
    return options.greedy_step


def check_several_k(capabilities: Capabilities, options: CompileOptions) -> None:
    """Raises: InvalidOption where a method's drafts cannot be fewer in some steps."""
    loop, name = LOOPS.get(capabilities.kind), capabilities.name
    if loop is None:
        raise InvalidOption(f"spec={name!r} drafts nothing: leave out num_draft_tokens=")
    if not loop.several_k:
        raise InvalidOption(
            f"spec={name!r} runs all its modules in every step, or their caches would have holes: "
            f"give num_draft_tokens= one number"
        )
    if 0 in options.smaller_draft_counts and not loop.allows_no_drafts:
        raise InvalidOption(
            f"spec={name!r} must see every token, or its cache would have holes: leave 0 out of "
            f"num_draft_tokens="
        )
    if options.acceptance.reads_draft_probs:
        raise InvalidOption(
            f"acceptance={options.acceptance.rule!r} takes one K: give num_draft_tokens= one "
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


def num_repeated_tokens(capabilities: Capabilities, config: ProgramConfig) -> int:
    """Module i of a windowed drafter needs tokens, and hidden states, i rows ahead: the rows that
    end a chunk are run again with the next one (H-4, H-22).

    Raises: InvalidOption where that leaves a chunk no room for others.
    """
    count = config.num_draft_tokens - 1 if capabilities.kind == "windowed" else 0
    if config.max_prefill_tokens <= count:
        raise InvalidOption(
            f"max_prefill_tokens must be above {count}: spec={capabilities.name!r} with "
            f"num_draft_tokens={config.num_draft_tokens} begins each chunk of a prompt with the "
            f"{count} tokens before it; got {config.max_prefill_tokens}"
        )
    return count


def _notes(target: Target, drafter: Drafter | None) -> tuple[str, ...]:
    notes = [target.describe()]
    if drafter is not None:
        describe = getattr(drafter, "describe", None)
        notes.append(describe() if describe else type(drafter).__name__)
    for name, module in (("target", target.model), ("draft", drafter)):
        if module is not None and (text := describe_quantized(module)):
            notes.append(f"{name} quantized: {text}")
    return tuple(notes)


def _plan(program: SpecProgram, options: CompileOptions, runner: StepRunner) -> dict[str, Any]:
    config = program.config
    capabilities: Capabilities = program.phases["decode"].context.capabilities
    return {
        "model": program.model,
        "method": program.method,
        "num_draft_tokens": config.num_draft_tokens,
        "acceptance": describe(options.acceptance),
        "lossless": is_lossless(options.acceptance) and capabilities.lossless,
        "buckets": runner.buckets,
        "backend": options.backend,
        "dtype": str(config.dtype).removeprefix("torch."),
        "device": str(config.device),
        "max_batch_size": config.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "kv_cache_mib": sum(b.num_bytes for b in program.buffers if b.kind == "cache") / 2**20,
        "compile": runner.lowered.costs() if runner.lowered else {},
        "prefix_caching": _on_or_off(_why_not_shared(program, options)),
        "overlap": _on_or_off(_why_not_overlapped(program, options)),
        "why": program.notes,
    }


def _on_or_off(why_not: str | None) -> str:
    return "on" if why_not is None else f"off: {why_not}"


def _why_not_shared(program: SpecProgram, options: CompileOptions) -> str | None:
    """Why requests do not share the cache blocks of a common beginning; None: they do."""
    return why_not(program) if options.enable_prefix_caching else "enable_prefix_caching=False"


def _why_not_overlapped(program: SpecProgram, options: CompileOptions) -> str | None:
    """Why a step is launched only when the last one's tokens were read; None: it is before."""
    if program.propose_on_host is not None:
        return "drafts come from the host, which needs the tokens"
    if program.recorder is not None:
        return "the host records every step's hidden states"
    if options.overlap is None and program.config.device.type != "cuda":
        return "nothing is gained on the CPU"
    return "overlap=False" if options.overlap is False else None
