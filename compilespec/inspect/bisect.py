"""From "the tokens are wrong" to the pass, the node and the batch size at which they go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.errors import InvalidOption
from compilespec.inspect.interpret import Stage
from compilespec.inspect.locate import NodeReport, first_parting_node
from compilespec.inspect.random_inputs import with_target_inputs
from compilespec.inspect.stages import PassStages, context_of, pass_stages
from compilespec.inspect.verify import (
    LOWERED,
    check_greedy,
    check_lowered_call,
    check_pass,
    final_stage,
    full_step_of,
    lowered_of,
    make_cases,
    parts_of,
)
from compilespec.inspect.verify_report import Check
from compilespec.lowering import lower
from compilespec.passes.references import Case
from compilespec.program import (
    LONG_ROPE,
    ROPE_OFFSETS,
    ROPE_ROWS,
    ByStep,
    Lowered,
    PhaseGraph,
    SpecProgram,
    StepKey,
)
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.runtime.step_runner import StepRunner


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """The place where the tokens of a prompt part from those of the model."""

    prompt: int
    position: int  # number of the output token
    expected: int | None  # None: the output is too long
    got: int | None  # None: it is too short

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}: output token {self.position} is {self.got}, the model says "
            f"{self.expected}"
        )


@dataclass(frozen=True, kw_only=True)
class BisectReport:
    """The comparisons that ran, and the first one that failed; `found` is None where every pass
    agrees.
    """

    tokens: TokenReport | None  # None: all equal, or no prompts were run
    num_prompts: int
    found: Check | None
    steps: tuple[StepKey, ...]  # the graphs whose passes were checked
    node: NodeReport | None = None
    wrong_batch_sizes: tuple[int, ...] = ()
    right_batch_sizes: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.tokens is None and self.found is None

    @property
    def pass_name(self) -> str | None:
        return self.found.pass_name if self.found else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "tokens": vars(self.tokens) if self.tokens else None,
            "num_prompts": self.num_prompts,
            "steps": [str(key) for key in self.steps],
            "found": self.found.to_dict() if self.found else None,
            "node": vars(self.node) if self.node else None,
            "wrong_batch_sizes": self.wrong_batch_sizes,
            "right_batch_sizes": self.right_batch_sizes,
        }

    def __str__(self) -> str:
        lines = []
        if self.num_prompts:
            same = f"tokens of {self.num_prompts} prompts equal the model's"
            lines.append(f"tokens  {self.tokens or same}")
        if self.found is None:
            lines.append(f"graphs  {'; '.join(map(str, self.steps))}")
            return "\n".join([*lines, "pass    every pass computes what it must"])
        lines.append(f"pass    {self.found.pass_name} ({self.found.key}), at {self.found.case}")
        lines += [f"        {m.value}: {m.text}" for m in self.found.mismatches[:3]]
        lines.append(f"node    {self.node or 'not known'}")
        wrong, right = (
            ", ".join(map(str, sizes)) or "none"
            for sizes in (self.wrong_batch_sizes, self.right_batch_sizes)
        )
        lines.append(f"bucket  parts at batch sizes {wrong}; agrees at {right}")
        return "\n".join(lines)


def bisect(
    program: SpecProgram | Engine,
    prompts: Sequence[Sequence[int]] = (),
    *,
    expected: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 16,
    seed: int = 0,
) -> BisectReport:
    """Find the first pass, then the first node, then the batch sizes at which a step goes wrong.

    The prompts are served and their tokens compared to the model's own.  Then every pass is
    checked, in the order of the pipeline, on the calls that were made while serving (those up to
    the one that gave the first wrong token), and on random ones.  A fault that the tokens do not
    show, such as a drafter that lost acceptance, is found too.

    Args:
        program: from `trace`, whose graphs are interpreted, or an engine (its compiled calls count
            as the last pass, "lower").
        prompts: token ids; none goes straight to the passes.
        expected: the model's tokens for each prompt; None asks the captured target, greedily and
            without a cache.
    Raises: InvalidOption when `expected` and `prompts` differ in number.
    """
    if expected is not None and len(expected) != len(prompts):
        raise InvalidOption(f"{len(prompts)} prompts need as many expected outputs")
    graphs, lowered_phases = parts_of(program)
    served = _Served(calls=[], tokens=None)
    if prompts:
        if expected is None:
            start = next(pass_stages(graphs["prefill"])).before
            expected = [_greedy(start, prompt, max_new_tokens) for prompt in prompts]
        served = _serve(_lowered(program), prompts, expected)
    found = None
    steps: list[StepKey] = []
    for key, graph in graphs.items():
        steps.append(key)
        found = _first_wrong(graph, graphs, served.calls, lowered_phases.get(key), seed)
        if found is not None:
            break
    made = BisectReport(
        tokens=served.tokens, num_prompts=len(prompts), found=None, steps=tuple(steps)
    )
    if found is None:
        return made
    check, stages, case = found
    sizes = {size: _is_right(graph, stages, size, seed) for size in _batch_sizes(graph)}
    sizes[check.batch_size] = False
    return dataclasses.replace(
        made,
        found=check,
        node=first_parting_node(context_of(graph), stages, case) if stages else None,
        wrong_batch_sizes=tuple(sorted(size for size, right in sizes.items() if not right)),
        right_batch_sizes=tuple(sorted(size for size, right in sizes.items() if right)),
    )


# --- the tokens ---


@dataclass(frozen=True, kw_only=True)
class _Served:
    """The calls made up to the first wrong token, and that token."""

    calls: list[Case]
    tokens: TokenReport | None


def _lowered(program: SpecProgram | Engine) -> Lowered:
    if isinstance(program, SpecProgram):
        return lower(program, backend="eager")
    return lowered_of(program)


def _greedy(start: Stage, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The target's own tokens, recomputed from the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        ids = torch.tensor([tokens], dtype=torch.int32, device=start.device)
        positions = torch.arange(len(tokens), dtype=torch.int32, device=start.device).unsqueeze(0)
        own = {"input_ids": ids, "position_ids": positions}
        own[ROPE_OFFSETS] = positions.new_zeros((ROPE_ROWS, *positions.shape))
        own[LONG_ROPE] = positions.new_zeros(positions.shape, dtype=torch.bool)
        logits = start(own).outputs["logits"]
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _serve(
    lowered: Lowered, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> _Served:
    """Serve all prompts until one has a wrong token."""
    runner = _RecordingRunner(lowered)
    with Engine(runner) as engine:
        requests = [
            engine.submit(list(prompt), SamplingParams(max_new_tokens=len(tokens), ignore_eos=True))
            for prompt, tokens in zip(prompts, expected, strict=True)
        ]
        while engine.has_work:
            engine.step()
            for index, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
                report = _first_wrong_token(index, request.output_token_ids, tokens)
                if report is not None:
                    return _Served(calls=runner.cases, tokens=report)
        return _Served(calls=runner.cases, tokens=None)


def _first_wrong_token(
    prompt: int, got: Sequence[int], expected: Sequence[int]
) -> TokenReport | None:
    for position, token in enumerate(got):
        wanted = expected[position] if position < len(expected) else None
        if token != wanted:
            return TokenReport(prompt=prompt, position=position, expected=wanted, got=token)
    return None


class _RecordingRunner(StepRunner):
    """Keeps the inputs of every call as they were before it; caches start as NaN."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(lowered)
        self.cases: list[Case] = []
        for spec in lowered.program.buffers:
            if spec.kind == "cache":
                self.buffers[spec.name].fill_(float("nan"))
        self.calls = ByStep(self._recording(key, call) for key, call in self.calls.items())

    def _recording(self, key: StepKey, call: Any) -> Any:
        runner = self

        class Recording:
            num_recompiles = 0

            @property
            def key(self) -> StepKey:
                return key

            def __call__(self, batch: Mapping[str, Sequence[int]]) -> Any:
                inputs = {name: buffer.clone() for name, buffer in runner.buffers.items()}
                inputs |= {
                    name: torch.tensor(values, dtype=torch.int32) for name, values in batch.items()
                }
                size = len(batch["row_B" if key.phase == "decode" else "last_R"])
                name = f"call {len(runner.cases)} ({size} rows)"
                case = Case(name=name, key=key, batch_size=size, inputs=inputs)
                runner.cases.append(case)
                return call(batch)

        return Recording()


# --- the passes ---


def _first_wrong(
    graph: PhaseGraph,
    graphs: ByStep[PhaseGraph],
    calls: Sequence[Case],
    lowered: Any,
    seed: int,
) -> tuple[Check, PassStages | None, Case] | None:
    """The first pass of a graph that computes something wrong, on served or random calls."""
    ctx = context_of(graph)
    mine = [with_target_inputs(ctx, case) for case in calls if case.key == graph.key]
    # the first calls cover what every call does, the last ones gave the wrong token
    served = mine if len(mine) <= 3 else [mine[0], *mine[-2:]]
    cases: list[Case] = []
    for stages in pass_stages(graph):
        cases = cases or [*served, *make_cases(ctx, stages.before, seed=seed)]
        for case in cases:
            check = check_pass(ctx, stages, case)
            if check.mismatches:
                return check, stages, case
    if (full := full_step_of(graphs, graph.key)) is not None:
        for check in check_greedy(graph, full, None, seed):
            if check.mismatches:
                return check, None, cases[0]
    if lowered is not None:
        final = final_stage(graph)
        whole = make_cases(ctx, next(pass_stages(graph)).before, seed=seed, whole_caches=True)
        for case in [*served, *whole]:
            check = check_lowered_call(ctx, final, lowered, case)
            if check.mismatches:
                return check, None, case
    return None


def _batch_sizes(graph: PhaseGraph) -> Iterator[int]:
    yield from range(1, min(8, context_of(graph).config.max_batch_size) + 1)


def _is_right(graph: PhaseGraph, stages: PassStages | None, size: int, seed: int) -> bool:
    """True where the pass agrees on a random call of this size."""
    ctx = context_of(graph)
    start = next(pass_stages(graph)).before
    (case,) = make_cases(ctx, start, batch_sizes=(size,), seed=seed)
    return stages is None or check_pass(ctx, stages, case).ok


__all__ = ["LOWERED", "BisectReport", "TokenReport", "bisect"]
