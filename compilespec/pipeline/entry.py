"""`compile()`: five stages, one call each.

trace -> rewrite -> lower -> (capture) -> run.  `build_program` is the first two, `compile` all of
them.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import torch
from torch import nn

from compilespec._torch_compat import warn_if_untested
from compilespec.cudagraphs.modes import units_for
from compilespec.errors import InvalidOption
from compilespec.lowering import check_compiler, lower, prepare_kernels
from compilespec.methods.base import Method, MethodConfig
from compilespec.methods.find import check_inside, read_draft
from compilespec.methods.registry import get_method
from compilespec.passes.splice.acceptance.options import ACCEPTANCE_OPTIONS, warn_if_lossy
from compilespec.pipeline.adapters import with_adapters
from compilespec.pipeline.build import build_program
from compilespec.pipeline.draft_vocab import check_has_head
from compilespec.pipeline.explainer import explainer
from compilespec.pipeline.images import image_reader
from compilespec.pipeline.keyword_types import CompileKeywords, SpecName
from compilespec.pipeline.keywords import shown_fields, shows
from compilespec.pipeline.options import CompileOptions, check_method_options
from compilespec.pipeline.parallel import check_ranks, join_ranks, lead_or_follow
from compilespec.pipeline.plan import (
    describe_plan,
    num_state_places,
    why_not_overlapped,
    why_not_shared,
)
from compilespec.pipeline.tiers import prefix_tiers
from compilespec.program import Lowered, SpecProgram
from compilespec.progress import Progress, Reporter, rare_collections, reporting
from compilespec.quantization import quantize_target
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.engine import Engine
from compilespec.runtime.serving import EngineReport, ServingOptions
from compilespec.runtime.step_costs import measure
from compilespec.runtime.step_runner import StepRunner
from compilespec.runtime.weight_updates import UpdatableModule, WeightUpdates
from compilespec.runtime.weights import weight_inputs
from compilespec.tracing.load import Target, load_target
from compilespec.tracing.placement import read_device, read_dtype

logger = logging.getLogger("compilespec")


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """The checked keywords of a call; nothing is loaded yet."""

    method: Method
    draft: str | Path | nn.Module | Callable[..., Any] | None
    options: CompileOptions
    method_options: Mapping[str, Any]
    notes: tuple[str, ...] = ()  # the reasons, for `Engine.plan()`


@shows(CompileOptions)
@rare_collections()
def compile(
    model: nn.Module | str | Path,
    spec: SpecName | str | Method | MethodConfig | None = "none",
    *,
    draft: str | Path | nn.Module | Callable[..., Any] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    progress: Callable[[Progress], object] | Literal[False] | None = None,
    **keywords: Unpack[CompileKeywords],
) -> Engine:
    """Compile a causal language model and a drafter into one program that decodes speculatively.

    Args:
        model: an nn.Module, a directory in Hugging Face layout, a name of the hub ("org/name" or
            "org/name@revision"), a GGUF file (extra `gguf`), or "demo".
        spec: drafting method by name, as a config, or your own method object; "none" is plain
            decoding through the same path.
        draft: directory, name of the hub or module of the drafter (for spec="user" a function,
            too); None looks beside the target and in its checkpoint, then for a published one.
        dtype: of the weights; None takes the model's own, a directory's is that of its config.
        device: where it runs; None takes the model's own.
        tokenizer: for prompts that are text; None takes the one beside the model, if there is one.
        progress: called with a `compilespec.Progress` record whenever a step of starting begins,
            tells more of itself, or is done; the same lines go to the logger "compilespec" at INFO.
            Without it, a start of more than five seconds prints a line a step on stderr, unless
            that logger is at INFO; False prints none.  Compiling stops at its exception,
            which is raised here.
        {keywords}
        method_options: options of the method, such as `aux_ids_are=`, and of the acceptance:
            `relaxed_topk`, `relaxed_delta`, `begin_thinking_token_id`, `end_thinking_token_id`;
            `force_num_accepted`, for benchmarks, accepts n drafts regardless of their tokens.

    Returns: an `Engine`, ready to generate.
    Raises: a `compilespec.errors.SpecError` that names what was expected, what was given, and
        what to try.
    """
    asked = _ask(spec, draft, keywords)
    check_compiler(asked.options.backend, _device_of(model, device))
    with reporting(progress) as reporter:
        return _start(
            lambda: _load(model, dtype, device, tokenizer, asked, reporter), asked, reporter
        )


def _start(load: Callable[[], Target], asked: CheckedCall, reporter: Reporter) -> Engine:
    ranks = join_ranks(asked.options, asked.method.capabilities)
    target = load()
    asked = _choose(asked, target, reporter)
    if defaults := target.generation_defaults.describe():
        logger.info(defaults)
        asked = dataclasses.replace(asked, notes=(*asked.notes, defaults))
    program = _build(asked, target, reporter)
    options = asked.options
    if ranks is not None:
        check_ranks(ranks, program, options, target, reporter)
    kinds = options.graphs.kinds_on(program.config.device)
    lowered = lower(program, backend=options.backend, units=units_for(kinds), progress=reporter)
    with reporter.step("load", "weights and buffers, in place"):
        runner = StepRunner(
            lowered,
            buckets=options.bucket_sizes,
            graphs=options.graphs,
            model=target.model,
            num_state_places=num_state_places(program, options),
        )
    runner.capture(reporter)
    executor = runner if ranks is None else lead_or_follow(ranks, runner, reporter)
    policy = None
    if program.config.several:
        with reporter.step("capture", "times of steps, by K"):
            policy = DraftPolicy(
                program.config.several,
                measure(executor),
                looks_up=program.capabilities.looks_up,
            )
    explain = explainer(program, target, asked.method, asked.draft, options, asked.method_options)
    serving = _serving_options(program, options, target, runner, policy, reporter, explain)
    if ranks is None:
        updates = _weight_updates(program, options, target, lowered, runner)
        serving = dataclasses.replace(serving, updates=updates)
    reporter.ready()
    engine = Engine(executor, target.tokenizer, serving)
    for name, adapter in (target.adapters or {}).items():
        engine.adapters.put(name, adapter)
    return engine


@shows(CompileOptions)
def trace(
    model: nn.Module | str | Path,
    spec: SpecName | str | Method | MethodConfig | None = "none",
    *,
    draft: str | Path | nn.Module | Callable[..., Any] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    keep_graphs: bool = True,
    progress: Callable[[Progress], object] | Literal[False] | None = None,
    **keywords: Unpack[CompileKeywords],
) -> SpecProgram:
    """The rewritten graphs without lowering: stages trace and rewrite of `compile`, same keywords.

    Args:
        keep_graphs: keep each pass's graph before and after in its `PassRecord`.
        progress: as for `compile`; but without a last record "ready".
    """
    asked = _ask(spec, draft, keywords)
    with reporting(progress) as reporter:
        target = _load(model, dtype, device, tokenizer, asked, reporter)
        return _build(_choose(asked, target, reporter), target, reporter, keep_graphs=keep_graphs)


def _ask(
    spec: str | Method | MethodConfig | None,
    draft: str | Path | nn.Module | Callable[..., Any] | None,
    keywords: Mapping[str, Any],
) -> CheckedCall:
    """The method that `spec` names or is, and the options; keywords win over those of a config.

    Raises: UnknownMethod, InvalidOption, NotSupported, DraftNotFound, before anything is loaded.
    """
    names = {field.name for field in shown_fields(CompileOptions)}
    given = {name: value for name, value in keywords.items() if name not in names}
    if isinstance(spec, MethodConfig):
        method = get_method(spec.name)
        given = {**spec.options, **given}
    elif hasattr(spec, "capabilities") and hasattr(spec, "load"):
        method = cast(Method, spec)
    else:
        method = get_method(spec)
    check_method_options(given, method.capabilities, list(inspect.signature(compile).parameters))
    draft = read_draft(draft, method.capabilities)
    own = {name: value for name, value in keywords.items() if name in names}
    vocab = getattr(draft, "vocab", None) if method.capabilities.takes_recipe else None
    if vocab is not None:
        own.setdefault("draft_vocab_size", vocab)
    judging = {name: given.pop(name) for name in ACCEPTANCE_OPTIONS if name in given}
    options = CompileOptions(**own, **judging)
    check_has_head(options, method.capabilities)
    warn_if_untested()
    warn_if_lossy(options.acceptance_rule)
    return CheckedCall(method=method, draft=draft, options=options, method_options=given)


def _device_of(model: object, device: torch.device | str | None) -> torch.device:
    """The device, before anything is loaded."""
    own = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return read_device(device) or (torch.device("cpu") if own is None else own.device)


def _load(
    model: nn.Module | str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    tokenizer: Any,
    asked: CheckedCall,
    reporter: Reporter,
) -> Target:
    """The target with its adapters, quantized on request."""
    check_inside(model, asked.draft, asked.method.capabilities)
    options = asked.options
    with reporter.step("load", "target") as step:
        keeps = options.keeps_blocks(_device_of(model, device), read_dtype(dtype))
        target = load_target(
            model,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            keeps_blocks=keeps,
            tell=lambda detail: step.tell(detail=detail),
        )
        return quantize_target(with_adapters(target, options), options.quantization)


def _choose(asked: CheckedCall, target: Target, reporter: Reporter) -> CheckedCall:
    """The chosen method and its K; `auto` picks one here."""
    capabilities = asked.method.capabilities
    if not capabilities.chooses:
        return asked
    if asked.draft is not None or asked.method_options:
        raise InvalidOption(
            f"spec={capabilities.name!r} looks for drafters itself: leave out draft= and "
            f"method options, or name the method"
        )
    from compilespec.pipeline.auto import choose

    prepare_kernels(target.device, reporter)
    with reporter.step("trace", "trials of methods") as step:

        def build(one: Method, trial: CompileOptions) -> SpecProgram:
            step.tell(detail=one.capabilities.name)
            return build_program(target, one, None, trial, {})

        choice = choose(target, asked.options, build)
    return dataclasses.replace(
        asked, method=choice.method, options=choice.options, notes=choice.why
    )


def _build(
    asked: CheckedCall, target: Target, reporter: Reporter, *, keep_graphs: bool = False
) -> SpecProgram:
    return build_program(
        target,
        asked.method,
        asked.draft,
        asked.options,
        asked.method_options,
        keep_graphs=keep_graphs,
        notes=asked.notes,
        progress=reporter,
    )


def _weight_updates(
    program: SpecProgram,
    options: CompileOptions,
    target: Target,
    lowered: Lowered,
    runner: StepRunner,
) -> WeightUpdates:
    module = UpdatableModule.of(target.model, target.state, options.quantization)
    specs = weight_inputs(lowered.graphs)
    return WeightUpdates(program, specs, runner.weights, module, options.draft_quantization)


def _serving_options(
    program: SpecProgram,
    options: CompileOptions,
    target: Target,
    runner: StepRunner,
    policy: DraftPolicy | None,
    reporter: Reporter,
    explain: Callable[..., Any] | None,
) -> ServingOptions:
    images, how = image_reader(target, options, runner.geometry, reporter)
    plan = describe_plan(program, options, runner)
    if images is not None:
        plan["tower"] = how
    report = EngineReport(
        plan=plan,
        buckets=runner.buckets,
        captured=runner.graph_report,
        count_recompiles=lambda: runner.num_recompiles + (images.num_recompiles if images else 0),
        count_state_copies=lambda: runner.num_state_copies,
        explain=explain,
    )
    return ServingOptions(
        program=program,
        eos_token_ids=target.eos_token_ids,
        generation_defaults=target.generation_defaults.params,
        report=report,
        overlap=why_not_overlapped(program, options) is None,
        shares_prefixes=why_not_shared(program, options) is None,
        tiers=prefix_tiers(program, options, runner),
        max_step_tokens=options.max_step_tokens,
        policy=policy,
        images=images,
    )
