"""`compile()`: five stages, one call each.

trace -> rewrite -> lower -> (capture) -> run.  `build_program` is the first two, `compile` all of
them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compilespec.cudagraphs.modes import GraphOptions, units_for
from compilespec.errors import InvalidOption
from compilespec.lowering import lower, prepare_kernels
from compilespec.methods.base import Method, MethodConfig
from compilespec.methods.find import check_draft
from compilespec.methods.registry import get_method
from compilespec.passes.acceptance.options import ACCEPTANCE_OPTIONS
from compilespec.pipeline.build import build_program
from compilespec.pipeline.options import CompileOptions, check_method_options, resolve_options
from compilespec.pipeline.plan import describe_plan, why_not_overlapped, why_not_shared
from compilespec.program import SpecProgram
from compilespec.progress import Progress, Reporter
from compilespec.quantization import quantize_target
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.engine import Engine
from compilespec.runtime.serving import ServingOptions
from compilespec.runtime.step_costs import measure
from compilespec.runtime.step_runner import StepRunner
from compilespec.tracing.load import Target, load_target

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
    shares = why_not_shared(program, options) is None
    policy = None
    if program.variants:
        with reporter.step("capture", "times of steps, by K"):
            policy = DraftPolicy(runner.geometry.draft_counts, measure(runner))
    reporter.ready()
    options_of_engine = ServingOptions(
        eos_token_ids=target.eos_token_ids,
        generation_defaults=target.generation_defaults.params,
        plan=describe_plan(program, options, runner),
        graphs=program.phases,
        buckets=runner.buckets,
        overlap=why_not_overlapped(program, options) is None,
        prefix_lookahead=program.prefix_lookahead if shares else None,
        max_step_tokens=options.max_step_tokens,
        policy=policy,
        propose=program.propose_on_host,
        on_finish=program.recorder.finish if program.recorder else None,
        on_preempt=program.recorder.forget if program.recorder else None,
        count_recompiles=lambda: runner.num_recompiles,
        graph_report=runner.graph_report,
    )
    return Engine(runner, target.tokenizer, options_of_engine)


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
