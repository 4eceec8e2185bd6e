"""`compilespec dump`: the graph after every pass, printed, checked, bounded or priced.

Nothing is compiled.  Exit codes: 0 done, 1 a check that was asked for failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from compilespec.cli import report
from compilespec.cli.flags import add_engine_options, compile_keywords
from compilespec.cli.generate import DEMO, set_threads, spec_of
from compilespec.errors import InvalidOption

if TYPE_CHECKING:
    from compilespec.inspect.graphs import GraphStage, PhaseStages
    from compilespec.program import PhaseGraph, SpecProgram

FORMATS = ("text", "json", "python", "dot", "html")
STEPS = "prefill, decode, decode.K, decode.K.greedy, replay"
STEP = re.compile(r"prefill|decode(\.\d+(\.greedy)?)?|replay")
FAILED = 1
UNUSED = ("backend", "max_adapters", "max_adapter_rank")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "dump",
        help="look inside: the graph after every pass, checked, bounded and priced",
        description="Print the graph of a phase after any pass.  Nothing is compiled.",
    )
    add = parser.add_argument
    add_engine_options(parser, default=DEMO, without=UNUSED)
    add(
        "--meta",
        action="store_true",
        help="build the model from config.json alone, without weights or memory",
    )
    add(
        "--phase",
        metavar="PHASE",
        help=f"a step (default: decode): {STEPS}; or captured graphs before any pass: target, "
        "draft, draft.NAME",
    )
    stage = parser.add_argument_group("stages (default: the last)").add_mutually_exclusive_group()
    stage.add_argument("--after", metavar="PASS", help="the graph that this pass left")
    stage.add_argument("--before", metavar="PASS", help="the graph that this pass was given")
    stage.add_argument("--all", action="store_true", help="every stage in turn")
    stage.add_argument("--diff", metavar="PASS", help="what this pass changed")
    what = parser.add_argument_group("instead of the graph").add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="the passes: matches, nodes, time")
    what.add_argument("--ops", action="store_true", help="counts of operators per stage")
    what.add_argument(
        "--verify", action="store_true", help="check every pass against its reference"
    )
    what.add_argument(
        "--bisect", action="store_true", help="find the pass and node at which values go wrong"
    )
    what.add_argument(
        "--bounds", action="store_true", help="claims about indices, proved or guarded"
    )
    what.add_argument("--cost", action="store_true", help="FLOPs, bytes and roofline time")
    add(
        "--where",
        metavar="PATTERN",
        help="only rows whose name, target, role or module contains this or matches this glob or "
        "/regular expression/",
    )
    add("--format", choices=FORMATS, default="text", help="default: %(default)s")
    add("--json", action="store_const", const="json", dest="format", help="same as --format json")
    add("-o", "--output", metavar="FILE", help="write to a file")
    checks = parser.add_argument_group("with --verify and --bisect")
    checks.add_argument(
        "--backend", choices=("inductor", "eager"), help="also check compiled calls"
    )
    checks.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="with --bisect: serve this prompt and compare",
    )
    cost = parser.add_argument_group("with --cost")
    cost.add_argument("--roofline", metavar="NAME", help="device: h200, or cpu (measured once)")
    cost.add_argument("--bandwidth", type=float, metavar="GB/s", help="instead of the device's")
    cost.add_argument("--flops", type=float, metavar="TFLOP/s", help="instead of the device's")
    cost.add_argument("--batch-size", type=int, default=1, metavar="B", help="default: 1")
    cost.add_argument("--context-length", type=int, default=1024, metavar="C", help="default: 1024")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.inspect.table import row_filter

    row_filter(args.where)  # report a bad pattern before seconds of tracing
    _check_combination(args)
    set_threads(args.threads)
    if args.bisect or (args.verify and args.backend):
        return _check_engine(args)
    with report.status(f"tracing {args.model} (spec={spec_of(args)})"):
        program = _trace(args)
        parts = None if _is_report(args) else _parts(args, program)
    if parts is None:
        return _report(args, program)
    with _output(args) as out:
        _write(args, out, parts)
    return 0


def _check_combination(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other.  Raises: InvalidOption."""
    asked = args.phase or "decode"
    is_step = STEP.fullmatch(asked) is not None
    if not is_step and asked.split(".")[0] not in ("target", "draft"):
        raise InvalidOption(f"--phase must be {STEPS}, target, draft or draft.NAME; got {asked!r}")
    staged = next((name for name in ("after", "before", "all", "diff") if vars(args)[name]), None)
    if not is_step and (staged or args.list):
        raise InvalidOption(
            f"--phase {asked} is captured before any pass; --{staged or 'list'} needs a step"
        )
    is_table = not (args.list or args.ops or _is_report(args))
    if args.format in ("python", "dot", "html") and not is_table:
        raise InvalidOption(f"--format {args.format} prints graphs; use text or json here")
    if args.format in ("python", "dot") and (args.all or args.diff):
        raise InvalidOption(f"--format {args.format} prints one graph; choose it with --after")
    if args.prompt and not args.bisect:
        raise InvalidOption("--prompt is served by --bisect alone: give both, or leave it out")
    for name, size in (("batch-size", args.batch_size), ("context-length", args.context_length)):
        if size < 1:
            raise InvalidOption(f"--{name} must be a positive integer; got {size}")


# --- graphs ---


def _parts(args: argparse.Namespace, program: SpecProgram) -> Any:
    """The requested output: JSON data, or a list of tables and strings."""
    if STEP.fullmatch(args.phase or "decode"):
        return _step_parts(args, program)
    from compilespec.inspect.graphs import captured_stages

    which = args.phase.split(".")[0]
    stages = captured_stages(program, which)
    if args.phase != which:
        names = ", ".join(stage.name for stage in stages)
        stages = [stage for stage in stages if stage.name == args.phase]
        if not stages:
            raise InvalidOption(f"no captured graph {args.phase!r}; there are {names}")
    return _render(args, stages)


def _step_parts(args: argparse.Namespace, program: SpecProgram) -> Any:
    from compilespec.inspect import text
    from compilespec.inspect.graphs import PhaseStages
    from compilespec.inspect.table import difference, row_filter, rows_of

    phase = _step(args, program)
    stages = PhaseStages(phase, with_shapes=not args.ops)  # shapes of a large model take seconds
    name = program.graphs.name(phase.key)
    title = f"{program.method}, {name}"
    if args.list:
        if args.format == "json":
            return {"phase": name, "passes": _pass_dicts(phase.records)}
        return [text.pass_table(title, phase.records)]
    if args.diff and args.format != "html":
        position = _position(stages, args.diff)
        wanted = row_filter(args.where)
        old, new = (rows_of(stages[index]) for index in (position - 1, position))
        changes = [
            change
            for change in difference(old, new)
            if change.sign != " " and any(row and wanted(row) for row in (change.old, change.new))
        ]
        if args.format == "json":
            return {
                "phase": name,
                "pass": args.diff,
                "changes": [
                    {
                        "sign": change.sign,
                        "old": change.old.to_dict() if change.old else None,
                        "new": change.new.to_dict() if change.new else None,
                    }
                    for change in changes
                ],
            }
        return [text.change_table(f"{title}: what {args.diff} changed", changes)]
    return _render(args, _chosen(args, stages))


def _step(args: argparse.Namespace, program: SpecProgram) -> PhaseGraph:
    """The graph that `--phase` names.  Raises: InvalidOption where the program has none such."""
    asked = args.phase or "decode"
    graphs = {program.graphs.name(key): graph for key, graph in program.graphs.items()}
    if asked not in graphs:
        raise InvalidOption(
            f"the program has no step {asked!r}; it has {', '.join(graphs)} "
            f"(--num-draft-tokens and --greedy-step make more)"
        )
    return graphs[asked]


def _chosen(args: argparse.Namespace, stages: PhaseStages) -> Sequence[GraphStage]:
    """The stages that the options name; the last if they name none."""
    if args.after:
        return [stages[_position(stages, args.after, allow_start=True)]]
    if args.before:
        return [stages[_position(stages, args.before) - 1]]
    if args.all or args.format == "html" or (args.ops and args.format == "json"):
        if args.diff:
            _position(stages, args.diff)
        return list(stages)
    if args.ops:
        num_splices = len(stages.phase.splice_records)
        return [stages[index] for index in (0, num_splices, num_splices + 1, -1)]
    return [stages[-1]]


def _position(stages: PhaseStages, name: str, *, allow_start: bool = False) -> int:
    from compilespec.inspect.graphs import unknown_pass

    position = stages.position(name)
    if position == 0 and not allow_start:
        raise unknown_pass(name, stages.names[1:], stages.phase.phase)
    return position


def _render(args: argparse.Namespace, stages: Sequence[GraphStage]) -> Any:
    """Tables, operator counts or a page for these stages."""
    from compilespec.inspect import text
    from compilespec.inspect.table import count_operators, row_filter, rows_of

    wanted = row_filter(args.where)
    phase = args.phase or "decode"
    listed = [(stage, [row for row in rows_of(stage) if wanted(row)]) for stage in stages]
    model = f"{os.path.basename(os.path.normpath(args.model))}, spec={spec_of(args)}"
    title = f"{model}, {phase}"
    if args.ops:
        counts = {stage.name: count_operators(rows) for stage, rows in listed}
        if args.format == "json":
            return {"phase": phase, "operators": counts}
        return [text.operator_table(f"{title}: operators per stage", counts)]
    if args.format == "json":
        return {
            "phase": phase,
            "stages": [
                {"name": stage.name, "rows": [row.to_dict() for row in rows]}
                for stage, rows in listed
            ],
        }
    if args.format == "html":
        from compilespec.inspect.page import render_page

        return [render_page(listed, title, show=args.diff or args.after)]
    if args.format in ("python", "dot"):
        if len(listed) != 1:
            names = ", ".join(stage.name for stage, _ in listed)
            raise InvalidOption(f"--format {args.format} prints one graph; --phase one of {names}")
        ((stage, rows),) = listed
        name = f"{model}, {text.stage_title(stage, phase)}"
        if args.format == "dot":
            from compilespec.inspect.dot import render_dot

            return [render_dot(stage, rows, name)]
        from compilespec.inspect.source import render_python

        return [render_python(stage, name)]
    return [
        text.node_table(f"{text.stage_title(stage, phase)}: {len(rows)} nodes", rows)
        for stage, rows in listed
    ]


def _pass_dicts(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in vars(record).items() if name not in ("before", "after")}
        for record in records
    ]


# --- reports ---


def _is_report(args: argparse.Namespace) -> bool:
    return bool(args.verify or args.bisect or args.bounds or args.cost)


def _report(args: argparse.Namespace, program: SpecProgram) -> int:
    """Verify, prove or price a program."""
    if args.verify:
        from compilespec.inspect.verify import verify

        with report.status("verifying"):
            made: Any = verify(program, phases=_phases(args), passes=_passes(args))
        ok = made.ok
    elif args.bounds:
        from compilespec.inspect.bounds import prove

        made = prove(program)
        ok = made.num_open == 0
    else:
        from compilespec.inspect.cost import estimate

        made = estimate(
            program,
            device=_device(args, program),
            batch_size=args.batch_size,
            context_length=args.context_length,
        )
        ok = True
    return _print_report(args, made, ok)


def _check_engine(args: argparse.Namespace) -> int:
    """Verify or bisect a program, or an engine if compiled calls or prompts are checked too."""
    import compilespec
    from compilespec.inspect.bisect import bisect
    from compilespec.inspect.verify import verify

    with contextlib.ExitStack() as stack:
        if args.backend is None and not args.prompt:
            stack.enter_context(report.status("checking every pass"))
            made: Any = bisect(_trace(args))
            return _print_report(args, made, made.ok)
        model, options = _model_and_options(args)
        options = {"backend": "eager", **options}
        with report.starting(f"{args.model} (spec={spec_of(args)})") as progress:
            engine = stack.enter_context(
                compilespec.compile(model, spec_of(args), progress=progress, **options)
            )
        stack.enter_context(report.status("checking every pass"))
        if args.verify:
            made = verify(engine, phases=_phases(args), passes=_passes(args))
        else:
            made = bisect(engine, [engine.encode(prompt) for prompt in args.prompt or ()])
    return _print_report(args, made, made.ok)


def _phases(args: argparse.Namespace) -> Any:
    return [args.phase] if args.phase else None


def _passes(args: argparse.Namespace) -> list[str] | None:
    return [args.after] if args.after else None


def _device(args: argparse.Namespace, program: SpecProgram) -> Any:
    """The device of `--cost`.  Raises: InvalidOption if only half of one is given."""
    from compilespec.inspect.devices import Device, find_device

    bandwidth = args.bandwidth * 1e9 if args.bandwidth else None
    flops = args.flops * 1e12 if args.flops else None
    if args.roofline:
        return find_device(
            args.roofline, program.config.dtype, bytes_per_s=bandwidth, flops_per_s=flops
        )
    if bandwidth and flops:
        return Device(name="given", bytes_per_s=bandwidth, flops_per_s=flops)
    if bandwidth or flops:
        raise InvalidOption("--bandwidth and --flops go together, or with --roofline")
    return None


def _print_report(args: argparse.Namespace, made: Any, ok: bool) -> int:
    with _output(args) as out:
        _write(args, out, made.to_dict() if args.format == "json" else [made])
    return 0 if ok else FAILED


# --- in and out ---


def _trace(args: argparse.Namespace) -> SpecProgram:
    import compilespec

    model, options = _model_and_options(args)
    program: SpecProgram = compilespec.trace(model, spec_of(args), keep_graphs=True, **options)
    return program


def _model_and_options(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, and the keywords of `compilespec.compile` and `trace` that were given."""
    spec = spec_of(args)
    options = compile_keywords(args, spec)
    if not args.meta:
        return args.model, options
    from compilespec.inspect.meta import meta_draft, meta_target

    if args.draft is not None or args.device is not None:
        raise InvalidOption(
            "--meta makes a random drafter, without memory; leave out --draft and --device"
        )
    model = meta_target(args.model, options.pop("dtype", None))
    if (draft := meta_draft(model, spec)) is not None:
        options["draft"] = draft
    return model, options


@contextlib.contextmanager
def _output(args: argparse.Namespace) -> Iterator[TextIO]:
    """The requested file, else stdout.  A reader that closes the pipe early is not an error."""
    if args.output:
        try:
            file = open(args.output, "w", encoding="utf-8")  # noqa: SIM115  (closed below)
        except OSError as error:
            raise InvalidOption(f"--output {args.output}: {error.strerror}") from error
        with file:
            yield file
        return
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(args: argparse.Namespace, out: TextIO, parts: Any) -> None:
    from compilespec.inspect import text

    if args.format == "json":
        text.write_json(out, parts)
    elif args.format == "text":
        text.write(out, parts)
    else:
        out.writelines(parts)
