"""Per-pass verification: the graph before and after every pass, on the same random calls."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from compilespec.errors import EngineClosed, InvalidOption, NotSupported
from compilespec.inspect.call_pairs import call_pairs
from compilespec.inspect.compare import compare, error_of, rounding_bound
from compilespec.inspect.interpret import Decisions, Stage
from compilespec.inspect.random_inputs import random_cases
from compilespec.inspect.stages import PassStages, context_of, pass_stages, with_graphs
from compilespec.inspect.verify_report import Check, Mismatch, VerifyReport
from compilespec.passes.context import PassContext
from compilespec.passes.references import Case, Values
from compilespec.passes.splice.absorb_latents import absorb_latents
from compilespec.passes.splice.evidence import without_confidence
from compilespec.program import (
    ByStep,
    Lowered,
    LoweredPhase,
    PhaseGraph,
    SpecProgram,
    StepKey,
)
from compilespec.runtime.engine import Engine
from compilespec.runtime.step_runner import StepRunner

LOWERED = "lower"  # the name under which the lowered callable is compared with its graph
GREEDY = "greedy_step"  # the name under which the greedy step is compared with the full one


def verify(
    program: SpecProgram | Engine,
    *,
    phases: Collection[StepKey | str] | None = None,
    passes: Collection[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    fail_fast: bool = False,
) -> VerifyReport:
    """Run every pass's graph before and after on the same random calls and compare the results:
    outputs, nodes that passes named, and every buffer.

    A pass that changes the interface is compared to its reference instead of the graph before.
    Exact passes must agree bit for bit; "rounding" passes within `compare.rounding_bound`, where
    both follow the same argmaxes and may part from one only at a near tie.  The spare state row,
    which padded rows write, is not compared.  A greedy step is compared to the full one as well, on
    calls whose requests all ask for the argmax (pass name "greedy_step").

    Args:
        program: from `trace`, or an engine; of an engine that compiled its graphs, the compiled
            calls are compared to the interpreted ones as well (pass name "lower").
        phases: which graphs to verify, as keys or by `ByStep.name` ("prefill", "decode",
            "decode.2.greedy"); None means every graph that can run.
        passes: which to verify; None means all.
        batch_sizes: rows (decode) or prompts (prefill) of the calls; None takes 1, 2 and the
            largest.
        fail_fast: stop at the first pass that does not agree.
    Raises: InvalidOption for an unknown phase or pass; SpecError on meta tensors.
    """
    graphs, lowered = parts_of(program)
    checks: list[Check] = []
    known = {LOWERED, GREEDY}
    for key in _chosen(graphs, phases):
        graph = graphs[key]
        found = check_phase(graph, passes=passes, batch_sizes=batch_sizes, seed=seed, known=known)
        full = full_step_of(graphs, key)
        if full is not None and (passes is None or GREEDY in passes):
            found = itertools.chain(found, check_greedy(graph, full, batch_sizes, seed))
        if key in lowered and (passes is None or LOWERED in passes):
            whole = check_lowered(graph, lowered[key], batch_sizes, seed)
            found = itertools.chain(found, whole)
        for check in found:
            checks.append(check)
            if fail_fast and not check.ok:
                return _report(graphs, checks)
    if passes is not None and not set(passes) <= known:
        unknown = ", ".join(sorted(set(passes) - known))
        raise InvalidOption(f"unknown pass {unknown}; the program ran {', '.join(sorted(known))}")
    return _report(graphs, checks)


def _chosen(
    graphs: ByStep[PhaseGraph], phases: Collection[StepKey | str] | None
) -> tuple[StepKey, ...]:
    """The keys that were asked for.  Raises: InvalidOption for a key without a graph."""
    chosen = [key for key in graphs if phases is None or {key, graphs.name(key)} & set(phases)]
    if not chosen or len(chosen) < len(set(phases or ())):
        names = ", ".join(map(graphs.name, graphs))
        asked = ", ".join(map(str, phases or ())) or "none"
        raise InvalidOption(f"phases must be among {names}; got {asked}")
    return tuple(chosen)


def _report(graphs: ByStep[PhaseGraph], checks: Sequence[Check]) -> VerifyReport:
    ctx = context_of(next(iter(graphs.values())))
    return VerifyReport(method=ctx.capabilities.name, dtype=ctx.config.dtype, checks=tuple(checks))


def parts_of(
    program: SpecProgram | Engine,
) -> tuple[ByStep[PhaseGraph], Mapping[StepKey, LoweredPhase]]:
    """The graphs of a program or engine, and their lowered forms."""
    graphs = ByStep(with_graphs(graph) for graph in program.graphs.values())
    if isinstance(program, SpecProgram):
        return graphs, {}
    lowered = lowered_of(program)
    return graphs, {} if lowered.backend == "eager" else lowered.graphs


def lowered_of(engine: Engine) -> Lowered:
    """The lowered program of an engine.  Raises: EngineClosed."""
    runner = engine.executor
    assert isinstance(runner, StepRunner), "an engine that was compiled"
    if runner.lowered is None:
        raise EngineClosed("the engine is closed; compile a new one")
    return runner.lowered


# --- one graph, one pass ---


def check_phase(
    graph: PhaseGraph,
    *,
    passes: Collection[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    known: set[str] | None = None,
) -> Iterator[Check]:
    """Every pass of a graph on every case, in the order of the pipeline."""
    cases: list[Case] = []
    for stages in pass_stages(graph):
        if not cases:  # the first pass starts from the target alone
            cases = make_cases(context_of(graph), stages.before, batch_sizes=batch_sizes, seed=seed)
        if known is not None:
            known.add(stages.record.name)
        if passes is None or stages.record.name in passes:
            yield from (check_pass(context_of(graph), stages, case) for case in cases)
            if stages.record.name == absorb_latents.__name__:
                yield from check_calls(context_of(graph), stages.record.name, seed)


def check_calls(ctx: PassContext, name: str, seed: int) -> Iterator[Check]:
    """Check the drafter's calls over latents against their captures."""
    bound = rounding_bound(ctx)
    for call, batch_size, got, want in call_pairs(ctx, seed):
        pairs = [(f"output {i}", *pair) for i, pair in enumerate(zip(got, want, strict=True))]
        yield Check(
            key=ctx.key, pass_name=name, case=f"the drafter's {call}", batch_size=batch_size,
            against="the call before", numerics="rounding", bound=bound, num_values=len(pairs),
            error=max((error_of(g, w) for _, g, w in pairs), default=0.0),
            mismatches=tuple(m for m in (_mismatch(*p, bound=bound) for p in pairs) if m),
        )  # fmt: skip


def make_cases(
    ctx: PassContext,
    start: Stage,
    *,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    whole_caches: bool = False,
    plain: bool = False,
) -> list[Case]:
    """Random cases, with the ids and positions that the graph reads before `read_state` ran."""

    return random_cases(
        ctx, ctx.config.vocab_size, start, batch_sizes=batch_sizes, seed=seed,
        whole_caches=whole_caches, plain=plain,
    )  # fmt: skip


def check_pass(ctx: PassContext, stages: PassStages, case: Case) -> Check:
    """One pass on one case."""
    record = stages.record
    bound = rounding_bound(ctx) if record.numerics == "rounding" else None
    make = functools.partial(
        Check,
        key=case.key,
        pass_name=record.name,
        case=case.name,
        batch_size=case.batch_size,
        against="its reference" if stages.reference else "the graph before",
        numerics=record.numerics,
        bound=bound,
    )
    decided = Decisions()
    try:
        want = wanted_values(ctx, stages, case, decided)
    except NotSupported as error:
        return make(num_values=0, error=0.0, skipped=str(error))
    following = Decisions(bound=bound or 0.0)
    if bound is not None and not stages.reference:
        following.followed = iter(decided.winners)
    try:
        got = stages.after(case.inputs, decisions=following)
    except (RuntimeError, IndexError, TypeError) as error:
        text = str(error).strip().splitlines()[0]
        mismatch = Mismatch(value="the graph after", text=f"does not run: {text}")
        return make(num_values=0, error=float("inf"), mismatches=(mismatch,))
    pairs = list(value_pairs(ctx, case, got, want, with_roles=record.level == "torch"))
    mismatches = [
        Mismatch(value=f"node {name}", text="another winner than before, beyond the bound")
        for name in following.parted
    ]
    mismatches += [
        m
        for m in (_mismatch(*pair, bound=bound_of(ctx, pair[0], want, bound)) for pair in pairs)
        if m is not None
    ]
    largest = max((error_of(g, w) for _, g, w in pairs if g is not None), default=0.0)
    return make(
        num_values=len(pairs), error=largest, num_ties=following.num_ties,
        mismatches=tuple(mismatches),
    )  # fmt: skip


def wanted_values(
    ctx: PassContext, stages: PassStages, case: Case, decisions: Decisions | None = None
) -> Values:
    """The values that the graph after a pass must give."""
    if stages.reference is not None:
        return stages.reference(stages.before, ctx, case)
    return stages.before(case.inputs, decisions=decisions)


def value_pairs(
    ctx: PassContext, case: Case, got: Values, want: Values, *, with_roles: bool
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """(what, got, wanted) of every output, role and buffer; got is None where there is none."""
    for name in dict.fromkeys((*want.outputs, *got.outputs)):
        if name not in want.outputs:
            yield f"output {name}", None, got.outputs[name]
        else:
            yield f"output {name}", got.outputs.get(name), want.outputs[name]
    if with_roles:
        for name, value in want.roles.items():
            yield f"role {name}", got.roles.get(name), value
    for call in want.calls:
        same = [c for c in got.calls if c.cache == call.cache]
        number = [c for c in want.calls if c.cache == call.cache].index(call)
        if number < len(same):
            for part in ("slot", "row", "position"):
                what = f"call {same[number].node} {part}"
                yield what, getattr(same[number].tokens, part), getattr(call.tokens, part)
            if call.key is not None:
                yield f"call {same[number].node} key", same[number].key, call.key
        else:
            yield f"call {number} over {call.cache}", None, call.tokens.slot
    spare = ctx.config.max_batch_size
    for name in dict.fromkeys((*want.buffers, *got.buffers)):
        # a graph that does not know a buffer leaves it unchanged
        one, other = (values.buffers.get(name, case.inputs[name]) for values in (got, want))
        if ctx.buffers[name].kind == "state":
            one, other = one[:spare], other[:spare]
        yield f"buffer {name}", one, other


def bound_of(ctx: PassContext, what: str, want: Values, bound: float | None) -> float | None:
    """The bound of a value that `value_pairs` names, `bound` unless its reference rounds it."""
    is_rounded = what.removeprefix("buffer ") in want.rounded
    return rounding_bound(ctx) if is_rounded and bound is None else bound


def _mismatch(
    what: str, got: Tensor | None, want: Tensor, *, bound: float | None
) -> Mismatch | None:
    if got is None:
        return Mismatch(value=what, text="missing on one side")
    difference = compare(got, want, bound=bound)
    if difference is None:
        return None
    return Mismatch(value=what, text=difference.text, error=difference.error)


# --- whole steps: the greedy one, the lowered ones ---


def full_step_of(graphs: ByStep[PhaseGraph], key: StepKey) -> PhaseGraph | None:
    """The step that a greedy one stands for; None of other steps, and where there is none."""
    if key.kind != "greedy":
        return None
    return graphs.get(StepKey(key.phase, key.num_draft_tokens))


def check_greedy(
    greedy: PhaseGraph, full: PhaseGraph, batch_sizes: Sequence[int] | None, seed: int
) -> Iterator[Check]:
    """The greedy step against the full one of its K, where all requests ask for the argmax."""
    ctx, own = context_of(full), context_of(greedy).buffers
    start = next(pass_stages(full)).before
    cases = make_cases(ctx, start, batch_sizes=batch_sizes, seed=seed, plain=True)
    stages = final_stage(full), final_stage(greedy)
    for case in cases:
        decided = Decisions()
        want, got = stages[0](case.inputs, decisions=decided), stages[1](case.inputs)
        kept = {name: buffer for name, buffer in want.buffers.items() if name in own}
        want = dataclasses.replace(want, buffers=kept, calls=())  # the rest is of other requests
        mine = dataclasses.replace(case, key=greedy.key)
        yield _step_check(
            ctx, mine, GREEDY, "the full step", _not_how_sure(got), _not_how_sure(want), decided
        )


def _not_how_sure(values: Values) -> Values:
    """A greedy step does not write the logits that say how sure its drafts are."""
    outputs = dict(values.outputs)
    if "outcome_B" in outputs:
        outputs["outcome_B"] = without_confidence(outputs["outcome_B"])
    return dataclasses.replace(values, outputs=outputs)


def check_lowered(
    graph: PhaseGraph, lowered: LoweredPhase, batch_sizes: Sequence[int] | None, seed: int
) -> Iterator[Check]:
    """The compiled call of a graph against the graph, run operator by operator."""
    ctx = context_of(graph)
    start = next(pass_stages(graph)).before
    cases = make_cases(ctx, start, batch_sizes=batch_sizes, seed=seed, whole_caches=True)
    final = final_stage(graph)
    yield from (check_lowered_call(ctx, final, lowered, case) for case in cases)


def final_stage(graph: PhaseGraph) -> Stage:
    """The graph that is lowered."""
    ctx = context_of(graph)
    module = graph.graph_module
    module.graph.output_node().meta["names"] = graph.outputs
    return Stage(module.graph, module, ctx, ctx.declared, {})


def check_lowered_call(ctx: PassContext, final: Stage, lowered: LoweredPhase, case: Case) -> Check:
    """A compiled call on one case."""
    decided = Decisions()
    want = dataclasses.replace(final(case.inputs, decisions=decided), calls=())  # not seen inside
    feeds = {
        name: tensor.clone() if name in ctx.buffers else tensor
        for name, tensor in case.inputs.items()
    }
    inputs = [
        final.weight(spec) if spec.kind == "weight" else feeds[spec.name] for spec in lowered.inputs
    ]
    outputs = dict(zip(lowered.outputs, lowered.call(*inputs), strict=True))
    got = Values(outputs=outputs, buffers={name: feeds[name] for name in ctx.buffers})
    return _step_check(ctx, case, LOWERED, "the interpreted graph", got, want, decided)


def _step_check(
    ctx: PassContext,
    case: Case,
    name: str,
    against: str,
    got: Values,
    want: Values,
    decided: Decisions,
) -> Check:
    """The check of a whole step.  Where two logits are nearer than rounding, the tokens are not
    compared.
    """
    bound = rounding_bound(ctx)
    pairs = list(value_pairs(ctx, case, got, want, with_roles=False))
    found = [m for m in (_mismatch(*pair, bound=bound) for pair in pairs) if m is not None]
    tie = min(decided.margins, default=1.0) < bound
    return Check(
        key=case.key, pass_name=name, case=case.name, batch_size=case.batch_size,
        against=against, numerics="rounding", bound=bound, num_values=len(pairs),
        error=max((error_of(g, w) for _, g, w in pairs if g is not None), default=0.0),
        num_ties=int(bool(found) and tie), mismatches=() if tie else tuple(found),
        skipped="two logits are nearer than the bound, and the calls part" if found and tie else "",
    )  # fmt: skip
