"""Stages trace and rewrite: the step graphs of a target and a drafter."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter, Method
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.find import find_draft
from compilespec.ops.device import traits_of
from compilespec.passes.context import PassContext
from compilespec.passes.order import rewrite_phase
from compilespec.passes.splice.absorb_latents import absorb_calls, describe_latents
from compilespec.passes.splice.acceptance.registry import is_lossless
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.passes.splice.output_head_input import HeadFunction
from compilespec.pipeline.adapters import adapter_shape, describe_adapters
from compilespec.pipeline.draft_counts import resolve_draft_counts
from compilespec.pipeline.draft_vocab import DraftVocabulary, choose_draft_ids
from compilespec.pipeline.options import CompileOptions
from compilespec.pipeline.trees import check_tree
from compilespec.program import (
    PHASES,
    AdapterShape,
    ByStep,
    Derived,
    PhaseGraph,
    ProgramConfig,
    SpecProgram,
    StepKey,
    Traced,
)
from compilespec.progress import Reporter
from compilespec.quantization import describe_quantized, quantize_drafter, with_plain_weights
from compilespec.quantization.calls import copy_products
from compilespec.quantization.configs import HEAD
from compilespec.tracing.load import Target
from compilespec.tracing.state_names import shared_with, state_names
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import TargetInfo, describe_target

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")


def build_program(
    target: Target,
    method: Method,
    draft: str | Path | nn.Module | Callable[..., Any] | None,
    options: CompileOptions,
    method_options: Mapping[str, Any],
    *,
    keep_graphs: bool = False,
    notes: Sequence[str] = (),
    progress: Reporter | None = None,
) -> SpecProgram:
    """Stages trace and rewrite: the step graphs of a target and its drafter, not lowered yet."""
    progress, found = progress or Reporter(), None
    if method.capabilities.takes_recipe:
        found = draft
    elif method.capabilities.needs_draft_weights:
        found = find_draft(draft, target, method.capabilities)
    with progress.step("trace", "target") as step:
        traced = trace_target(
            target.model,
            offsets=options.sharding is None,
            longest=options.longest_request(target.max_seq_len),
            by_request=True,
        )
        step.note(from_cache=traced.reused, why=traced.why_traced)
    info = describe_target(traced, target)
    drafter = _load_drafter(method, found, target, info, options, method_options, progress)
    capabilities = (drafter.capabilities if drafter else None) or method.capabilities
    drafts = capabilities.kind != "none"
    options, why_counts = resolve_draft_counts(options, capabilities, drafter)
    config = options.program_config(target, info, drafter if drafts else None)
    config = dataclasses.replace(config, adapters=adapter_shape(options, target, traced))
    check_sizes(capabilities, config, options)
    traced_draft = _capture(drafter, config, capabilities, info, progress) if drafter else {}
    check_tree(options, config, capabilities, traced, traced_draft)
    kept = choose_draft_ids(options, target, info.vocab_size, traced_draft)
    if options.prompt_logprobs:
        HeadFunction(traced)  # refuses a head that it could not run alone
    absorbed, latents = absorb_calls(traced_draft, config.adapters)
    absorbed, copies, derived = _with_copies(drafter, absorbed, keep_head=kept is not None)
    first = PassContext(
        phase="prefill",
        config=config,
        capabilities=capabilities,
        target=traced,
        draft=absorbed,
        drafter=Drafter() if drafter is None else drafter,
        acceptance=options.acceptance_rule,
        draft_ids=kept.ids if kept else None,
        traits=traits_of(config.device),
        logits_processor=options.processor,
        sharding=options.sharding,
        latents=latents,
        derived=derived,
    )
    contexts = _contexts(first, step_keys(options, config, capabilities))
    graphs = _rewritten(contexts, keep_graphs, progress)  # passes declare buffers, weights
    return SpecProgram(
        model=target.name,
        target=traced,
        capabilities=capabilities,
        drafter=first.drafter,
        config=config,
        reach=LOOPS[capabilities.kind].reach(config.num_draft_tokens),
        graphs=graphs,
        buffers=tuple({name: b for ctx in contexts for name, b in ctx.buffers.items()}.values()),
        weights=first.weights,
        derived=first.derived,
        lossless=is_lossless(options.acceptance_rule) and capabilities.lossless,
        notes=(
            *_notes(target, drafter, kept, config.adapters),
            *copies,
            *describe_latents(first.latents),
            *why_counts,
            *(first.sharding.describe() if first.sharding else ()),
            *notes,
        ),
    )


def step_keys(
    options: CompileOptions, config: ProgramConfig, capabilities: Capabilities
) -> tuple[StepKey, ...]:
    """The graphs that a program needs, in the order in which they are rewritten and lowered.

    Raises: InvalidOption for a greedy step where there can be none.
    """
    *smaller, largest = config.draft_counts
    keys = [*(StepKey(phase, largest) for phase in PHASES)]
    keys += (StepKey("decode", count) for count in smaller)
    if 0 in smaller and LOOPS[capabilities.kind].needs_replay:
        keys.append(StepKey("decode", largest, "replay"))
    if has_greedy_step(options, config):
        keys += (StepKey("decode", count, "greedy") for count in (*smaller, largest))
    return tuple(keys)


def _contexts(first: PassContext, keys: Sequence[StepKey]) -> list[PassContext]:
    """A context per graph.  All share their weights; the full steps of the largest K share their
    buffers; the others know only their own.
    """
    full = {StepKey(phase, first.config.num_draft_tokens) for phase in PHASES}
    return [
        dataclasses.replace(
            first,
            phase=key.phase,
            kind=key.kind,
            config=dataclasses.replace(first.config, num_draft_tokens=key.num_draft_tokens),
            inputs={},
            declared={},
            buffers=first.buffers if key in full else {},
        )
        for key in keys
    ]


def _rewritten(
    contexts: Sequence[PassContext], keep_graphs: bool, progress: Reporter
) -> ByStep[PhaseGraph]:
    graphs = []
    for index, ctx in enumerate(contexts, 1):
        with progress.step("rewrite", str(ctx.key), index=index, total=len(contexts)):
            in_lockstep = ctx.sharding is not None  # the ranks' steps are compared with the whole
            graph = rewrite_phase(ctx, keep_graphs=keep_graphs or in_lockstep)
            graphs.append(graph)
    return ByStep(graphs)


def _load_drafter(
    method: Method,
    found: Any,
    target: Target,
    info: TargetInfo,
    options: CompileOptions,
    method_options: Mapping[str, Any],
    progress: Reporter,
) -> Drafter | None:
    """The method's drafter, quantized on request; None where it has none.

    Raises: InvalidOption where a recipe says how it is quantized.
    """
    if method.capabilities.takes_recipe and options.draft_quantization is not None:
        raise InvalidOption(
            f"spec={method.capabilities.name!r} quantizes its copies as draft="
            "compilespec.SelfDraft(weights=...) says: leave draft_quantize= out"
        )
    if found is None and options.draft_quantization is None:
        return method.load(None, info, method_options)
    with progress.step("load", "drafter"):
        drafter = method.load(found, info, method_options)
        if isinstance(drafter, nn.Module):
            drafter.given_state = shared_with(state_names(drafter), drafter, target.model)
            if isinstance(found, Path) and found.is_dir():
                drafter.load_like = partial(_load_like, method, found, info, method_options)
        every = options.dequantize or options.sharding is not None
        if isinstance(drafter, nn.Module) and (every or options.draft_vocab_size is not None):
            drafter = with_plain_weights(
                drafter, lambda path: every or path.rsplit(".", 1)[-1] == HEAD
            )
        return quantize_drafter(drafter, options.draft_quantization)


def _load_like(
    method: Method,
    found: Path,
    info: TargetInfo,
    method_options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Drafter:
    """The drafter of a checkpoint that has other tensors, by the same names.

    Raises: CheckpointError, DraftMismatch, as the method's own `load`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in found.iterdir():
            if path.is_file() and not path.name.endswith((*WEIGHT_ENDINGS, ".index.json")):
                (folder / path.name).symlink_to(path.resolve())
        plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        save_file(plain, folder / "model.safetensors")
        drafter = method.load(folder, info, method_options)
    assert isinstance(drafter, Drafter)
    return drafter


def _capture(
    drafter: Drafter,
    config: ProgramConfig,
    capabilities: Capabilities,
    info: TargetInfo,
    progress: Reporter,
) -> dict[str, Traced]:
    """The drafter's calls, all that the loop of its kind splices."""
    _check_block_sizes(drafter, config)
    with progress.step("trace", "drafter") as step:
        calls = drafter.capture(config, info)
        whys = [one.why_traced for one in calls.values() if not one.reused]
        step.note(from_cache=not whys, why=whys[0] if whys else "")
    name, loop = capabilities.name, LOOPS[capabilities.kind]
    loop.check_calls(name, type(drafter).__name__, calls, config.num_draft_tokens)
    return calls


def has_greedy_step(options: CompileOptions, config: ProgramConfig) -> bool:
    """True where batches without a sampled request have their own decode step.

    Raises: InvalidOption where a greedy step is asked for and the rule or a processor needs the
    logits.
    """
    needs_logits = options.acceptance_rule.rule != "strict" or options.host_processors
    if options.greedy_step == "auto":
        pays = traits_of(config.device).has_launch_costs or config.tree is not None
        return pays and not needs_logits
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
    if capabilities.combines and options.acceptance_rule.reads_draft_probs:
        raise InvalidOption(
            f"acceptance={options.acceptance_rule.rule!r} reads the probabilities of drafts, which "
            f"those of a look-up in spec={capabilities.name!r} do not have: leave acceptance= at "
            "'auto'"
        )
    if smaller and options.acceptance_rule.reads_draft_probs:
        raise InvalidOption(
            f"acceptance={options.acceptance_rule.rule!r} takes one K: give num_draft_tokens= one "
            f"number, or leave acceptance= at 'auto'"
        )


def _with_copies(
    drafter: Drafter | None, calls: dict[str, Traced], *, keep_head: bool
) -> tuple[dict[str, Traced], tuple[str, ...], dict[str, Derived]]:
    """The calls of a drafter that is the target, with copies of its products, a line for
    `Engine.plan()`, and how the copies are made.
    """
    if drafter is None or drafter.copied_in is None:
        return calls, (), {}
    form = drafter.copied_in
    forward, text, derived = copy_products(calls["forward"], form, keep_head=keep_head)
    return {**calls, "forward": forward}, (text,), derived


def _check_block_sizes(drafter: Drafter, config: ProgramConfig) -> None:
    """Raises: InvalidOption unless each draft step, or none, has its own size of blocks."""
    sizes = drafter.kv_block_sizes
    if sizes and len(sizes) != config.num_draft_tokens:
        raise InvalidOption(
            f"kv_block_sizes: expected one for each of the {config.num_draft_tokens} draft steps, "
            f"got {len(sizes)}"
        )


def _notes(
    target: Target,
    drafter: Drafter | None,
    kept: DraftVocabulary | None,
    adapters: AdapterShape | None,
) -> tuple[str, ...]:
    notes = [target.describe(), *target.notes]
    if adapters is not None:
        notes.append(describe_adapters(adapters, target.adapters or {}))
    if drafter is not None:
        describe = getattr(drafter, "describe", None)
        notes.append(describe() if describe else type(drafter).__name__)
    if kept is not None:
        notes.append(kept.describe())
    for name, module in (("target", target.model), ("draft", drafter)):
        if module is not None and (text := describe_quantized(module)):
            notes.append(f"{name} quantized: {text}")
    return tuple(notes)
