"""The choice of `spec="auto"`: try the methods that the checkpoint offers, predict, pick.

For every method whose drafter is found, a few prompts are decoded with the interpreted graphs,
which gives the acceptance length for every K at once; the cost model gives the time of a step, by
the roofline of the device.  The prediction is their quotient.  Where none is predicted to beat
plain decoding, look-ups with several K are taken, 0 among them: a step without a match drafts
nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.errors import SpecError
from compilespec.inspect.cost import StepCost, estimate
from compilespec.inspect.devices import Device, find_device
from compilespec.lowering import lower
from compilespec.methods.base import Method
from compilespec.methods.registry import METHODS
from compilespec.ops.device import traits_of
from compilespec.passes.proofs.sizes import Expr, K
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.pipeline.options import AUTO, CompileOptions
from compilespec.program import PHASES, ByStep, SpecProgram
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.step_runner import StepRunner
from compilespec.tracing.load import Target

Build = Callable[[Method, CompileOptions], SpecProgram]

DRAFT_LENGTHS = (1, 2, 3, 5)
TEXTS = (
    "def main(arguments):\n    ",
    "The history of the city begins",
    "1. Wash the rice until the water",
)
NUM_TOKENS = 32  # decoded after each prompt
TRIAL_SEQ_LEN = 256


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """The method, the options with its K, and the reasons, a line each."""

    method: Method
    options: CompileOptions
    why: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method with one K, and its predicted speed."""

    method: Method
    num_draft_tokens: int
    acceptance_length: float
    ratio: float  # to plain decoding

    def __str__(self) -> str:
        return (
            f"{self.method.capabilities.name} K={self.num_draft_tokens}: acceptance length "
            f"{self.acceptance_length:.2f}, predicted {self.ratio:.2f}x plain"
        )


def choose(target: Target, options: CompileOptions, build: Build) -> AutoChoice:
    """Pick the method and K with the best prediction at batch size 1.  If several K were given, the
    best one counts, and all are kept.

    Args:
        build: makes the program of a method under options.
    """
    plain = next(m for m in METHODS if m.capabilities.name == "none")
    candidates: list[Candidate] = []
    skipped: list[str] = []
    lengths = tuple(count for count in options.draft_counts if count) or DRAFT_LENGTHS
    given = options.num_draft_tokens
    tried = max(lengths) if given in (None, AUTO) else given
    trial = _trial_options(target, options)
    base = build(plain, _without_drafts(trial))
    prompts = _prompts(target, base.config.vocab_size)
    device = _device(base)
    plain_ms = _step_ms(_decode_cost(base, device), device, 0)
    for method in METHODS:
        if method.capabilities.kind == "none":
            continue
        try:
            program = build(method, dataclasses.replace(trial, num_draft_tokens=tried))
            emitted = _emitted_per_step(program, target, prompts)
        except SpecError as error:
            skipped.append(f"{method.capabilities.name}: {' '.join(str(error).split())}")
            continue
        cost = _decode_cost(program, device)
        for count in lengths:
            length = statistics.fmean(min(n, count + 1) for n in emitted)
            ratio = length * plain_ms / _step_ms(cost, device, count)
            candidates.append(
                Candidate(
                    method=method, num_draft_tokens=count, acceptance_length=length, ratio=ratio
                )
            )
    candidates.sort(key=lambda one: one.ratio, reverse=True)
    best = candidates[0] if candidates and candidates[0].ratio > 1 else None
    lines = [f"auto tried {len(prompts)} prompts, {device}", *map(str, candidates)]
    lines += [f"auto left out {reason}" for reason in skipped]
    if best is None:
        return _where_none_pays(options, candidates, plain, lines)
    if given is None:  # measurements in service say more than the trial
        one_k = LOOPS[best.method.capabilities.kind].why_one_k is not None
        given = best.num_draft_tokens if one_k else AUTO
    chosen = dataclasses.replace(options, num_draft_tokens=given)
    why = (f"auto picked {best}", *lines)
    return AutoChoice(method=best.method, options=chosen, why=why)


def _where_none_pays(
    options: CompileOptions, candidates: Sequence[Candidate], plain: Method, lines: Sequence[str]
) -> AutoChoice:
    """The look-up that did best, where its steps may draft nothing; else plain decoding."""
    why = "nothing is predicted to beat plain decoding"
    found = (one.method for one in candidates if one.method.capabilities.only_looks_up)
    method = next(found, None)
    may_skip = options.num_draft_tokens in (None, AUTO) or 0 in options.draft_counts
    if method is None or not may_skip or options.acceptance_rule.reads_draft_probs:
        why = f"auto picked none: {why}"
        return AutoChoice(method=plain, options=_without_drafts(options), why=(why, *lines))
    why = f"auto picked {method.capabilities.name}, where a text repeats itself: {why}"
    given = options.num_draft_tokens or AUTO
    chosen = dataclasses.replace(options, num_draft_tokens=given)
    return AutoChoice(method=method, options=chosen, why=(why, *lines))


def _without_drafts(options: CompileOptions) -> CompileOptions:
    return dataclasses.replace(options, num_draft_tokens=None)


def _trial_options(target: Target, options: CompileOptions) -> CompileOptions:
    limits = (options.max_seq_len, target.max_seq_len, TRIAL_SEQ_LEN)
    length = min(limit for limit in limits if limit is not None)
    return dataclasses.replace(
        options, backend="eager", max_batch_size=1, max_seq_len=length, kv_cache_tokens=None,
        buckets=None,
    )  # fmt: skip


def _prompts(target: Target, vocab_size: int) -> list[list[int]]:
    """Texts where there is a tokenizer; else random ids, from which the model continues."""
    if target.tokenizer is not None:
        return [list(target.tokenizer.encode(text)) for text in TEXTS]
    seeded = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (8,), generator=seeded).tolist() for _ in TEXTS]


def _device(program: SpecProgram) -> Device:
    config = program.config
    return find_device("h200" if traits_of(config.device).is_cuda else "cpu", config.dtype)


def _emitted_per_step(
    program: SpecProgram, target: Target, prompts: Sequence[list[int]]
) -> list[int]:
    largest = (program.graphs[phase] for phase in PHASES)  # the same K in every step
    program = dataclasses.replace(program, graphs=ByStep(largest))
    runner = StepRunner(lower(program, backend="eager"))
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(runner) as engine:
        outputs = engine.generate(list(prompts), params)
    return [count for output in outputs for count in output.emitted_per_step[:-1]] or [1]


def _decode_cost(program: SpecProgram, device: Device) -> tuple[StepCost, dict[Expr, int]]:
    report = estimate(program, device=device, context_length=TRIAL_SEQ_LEN // 2)
    decode = report.graphs["decode"]
    return decode, dict(report.sizes)


def _step_ms(cost: tuple[StepCost, dict[Expr, int]], device: Device, count: int) -> float:
    """Roofline time of a step with `count` drafts: each stage by its nearer limit."""
    decode, sizes = cost
    total = 0.0
    for row in decode.stages:
        amounts: Any = row.cost.at({**sizes, K: count})
        memory_s = float(amounts.num_bytes) / device.bytes_per_s
        total += max(memory_s, float(amounts.flops) / device.flops_per_s) * 1e3
    return total
