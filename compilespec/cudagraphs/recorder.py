"""Captures buckets into one memory pool, within a budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compilespec.cudagraphs.drivers import CaptureFailed, Driver, make_driver
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.cudagraphs.recording import Recording
from compilespec.cudagraphs.report import CaptureRecord, CaptureReport, GraphKey
from compilespec.lowering.stitching import OpStep, PieceStep, Stitched
from compilespec.program import LoweredPhase, StepKey

logger = logging.getLogger("compilespec")

_MIB = 2**20
Step = Callable[[], None]


def make_recorder(options: GraphOptions, device: torch.device) -> GraphRecorder | None:
    """Make the recorder of graphs on a device; None where the options ask for no graphs."""
    if not options.kinds_on(device):
        return None
    return GraphRecorder(make_driver(device), options, mode=options.mode_on(device))


class GraphRecorder:
    """All graphs of a program: one pool, one budget, one report.

    Capturing runs with padded rows only, so that it changes no state.
    """

    def __init__(self, driver: Driver, options: GraphOptions, *, mode: str) -> None:
        self.report = CaptureReport(mode=mode, driver=driver.name)
        self.is_emulated = driver.name == "emulated"
        self._driver = driver
        self._max_seconds = options.max_seconds
        free = driver.free_bytes()
        share = None if free is None else free / 4 / _MIB
        self._max_mib = share if options.max_mib is None else options.max_mib
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._outputs: dict[StepKey, list[Tensor]] = {}
        self._failed: dict[StepKey, str] = {}  # why nothing more of a step is captured

    def prepare(self) -> None:
        """Called once, before many buckets are captured."""
        self._driver.prepare()

    def refuses(self, phase: LoweredPhase) -> bool:
        """True where a phase is known to be impossible to capture; says so once."""
        if phase.waits_for_host:
            self.report.refused[phase.key] = phase.waits_for_host
            logger.warning(
                "no graphs for %s, which runs uncaptured: the host waits in its middle (%s)",
                phase.key,
                phase.waits_for_host,
            )
        return bool(phase.waits_for_host)

    def capture(
        self, key: GraphKey, phase: LoweredPhase, inputs: Sequence[Tensor]
    ) -> Recording | None:
        """Capture one bucket; None, with a warning, if that fails or the budget is spent.  After a
        failed capture no other bucket of that step is tried.

        Args:
            inputs: the phase's inputs, at the addresses that replays will read, every row padded.
        """
        if reason := self._failed.get(key.step) or self._over_budget():
            self._drop(key, reason)
            return None
        started = time.perf_counter()
        try:
            with torch.no_grad():
                outputs = self._warm_up(key, phase, inputs)
                self._driver.make_room()
                before = self._driver.reserved_bytes()
                with self._driver.recording():
                    recording = self._record(key, phase, inputs, outputs)
        except torch.OutOfMemoryError as error:
            self._drop(key, f"out of memory ({str(error).splitlines()[0]})")
            return None
        except CaptureFailed as error:
            self._drop(key, f"it cannot be captured ({error})")
            self._failed[key.step] = f"capturing {key} failed"
            return None
        self.report.captured.append(
            CaptureRecord(
                key=key,
                num_graphs=recording.num_graphs,
                seconds=time.perf_counter() - started,
                mib=(self._driver.reserved_bytes() - before) / _MIB,
            )
        )
        return recording

    def close(self) -> None:
        self._scratch.clear()
        self._outputs.clear()

    def _over_budget(self) -> str:
        report = self.report
        if report.seconds >= self._max_seconds:
            return f"capturing took {report.seconds:.0f} s (max_seconds)"
        if self._max_mib is not None and report.mib >= self._max_mib:
            return f"graphs take {report.mib:.0f} MiB (max_mib)"
        return ""

    def _drop(self, key: GraphKey, reason: str) -> None:
        self.report.dropped[key] = reason
        logger.warning(
            "no graph for %s: %s; such batches run in a larger bucket, or uncaptured", key, reason
        )

    def _warm_up(
        self, key: GraphKey, phase: LoweredPhase, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Make the first call, which sets things up; returns the places of the outputs.

        It runs on another stream than the captures: the workspace that a library has for each
        stream is then of the graphs' pool, where nobody else gets it when somebody clears it.
        """
        return self._output_views(key, phase.call(*inputs))

    def _record(
        self,
        key: GraphKey,
        phase: LoweredPhase,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Recording:
        if key.kind == "full":
            steps = self._record_whole(phase, inputs, outputs)
            num_graphs = 1
        else:
            assert phase.stitched is not None, "piecewise graphs need a phase lowered in pieces"
            steps = self._record_pieces(phase.stitched, inputs, outputs)
            num_graphs = len(phase.stitched.plan.piece_steps)
        return Recording(
            key=key,
            steps=steps,
            num_graphs=num_graphs,
            outputs=outputs,
            names=[spec.name for spec in phase.inputs],
            inputs=inputs,
        )

    def _record_whole(
        self, phase: LoweredPhase, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Step]:
        def run() -> Sequence[Tensor]:
            _copy_all(outputs, phase.call(*inputs))
            return ()

        graph, _ = self._driver.capture(run)
        return [graph.replay]

    def _record_pieces(
        self, stitched: Stitched, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Step]:
        """One graph per piece; operators between pieces run uncaptured, into memory that is kept.

        A value is kept alive until its last reader has been captured, so that the pool reuses its
        memory exactly where an uncaptured run would; the steps hold only weak views of it.
        """
        plan = stitched.plan
        values: dict[int, Tensor] = dict(enumerate(inputs))
        steps: list[Step] = []
        for index, step in enumerate(plan.steps):
            if isinstance(step, OpStep):
                is_brief = plan.dies_next(index)
                steps.append(self._run_operator(step, values, len(inputs), is_brief=is_brief))
            else:
                finals = outputs if step is plan.piece_steps[-1] else None
                steps.append(self._capture_piece(stitched, step, values, finals))
            for number in plan.dies_after[index]:
                expiry = self._driver.expiry(values.pop(number))
                steps += [expiry] if expiry is not None else []
        return steps

    def _capture_piece(
        self,
        stitched: Stitched,
        step: PieceStep,
        values: dict[int, Tensor],
        finals: Sequence[Tensor] | None,
    ) -> Step:
        """Capture a piece; the last one also copies the outputs to their addresses."""
        piece, given = stitched.pieces[step.piece], [values[number] for number in step.inputs]
        numbers = stitched.plan.outputs if finals is not None else ()
        known = {number: values[number] for number in numbers if number in values}

        def run() -> Sequence[Tensor]:
            made: Sequence[Tensor] = piece(*given)
            if finals is not None:
                latest = {**known, **dict(zip(step.outputs, made, strict=True))}
                _copy_all(finals, [latest[number] for number in numbers])
            return made

        graph, made = self._driver.capture(run)
        values.update(zip(step.outputs, made, strict=True))
        return graph.replay

    def _run_operator(
        self, step: OpStep, values: dict[int, Tensor], num_inputs: int, *, is_brief: bool
    ) -> Step:
        """Run an operator; returns a function that runs it again on the same addresses."""
        held = {
            number: values[number] if number < num_inputs else self._driver.weak(values[number])
            for number in step.inputs
        }
        operator, args = step.operator, step.bind(held)
        made = operator(*args)
        result = self._place_for(made, is_brief=is_brief)
        result.copy_(made)
        values[step.output] = result
        return lambda: _copy_all([result], [operator(*args)])

    def _place_for(self, like: Tensor, *, is_brief: bool) -> Tensor:
        """Memory for an operator's result, shared by results that only the next piece reads."""
        if not is_brief:
            return torch.empty_like(like)
        flat = self._scratch.get(like.dtype)
        if flat is None or flat.numel() < like.numel():
            flat = self._scratch[like.dtype] = like.new_empty(like.numel())
        return flat[: like.numel()].view(like.shape)

    def _output_views(self, key: GraphKey, results: Sequence[Tensor]) -> list[Tensor]:
        """The buffers of a graph's outputs, shared by all its buckets."""
        flats = self._outputs.get(key.step)
        if flats is None or any(f.numel() < r.numel() for f, r in zip(flats, results, strict=True)):
            flats = self._outputs[key.step] = [
                result.new_empty(result.numel()) for result in results
            ]
        return [f[: r.numel()].view(r.shape) for f, r in zip(flats, results, strict=True)]


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
