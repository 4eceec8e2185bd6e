"""Chooses the graph for a batch: the smallest bucket that holds it, padded, or no graph at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compilespec import _torch_compat
from compilespec.cudagraphs.buckets import BUCKET_DIMS, Bucket, smallest
from compilespec.cudagraphs.drivers import poison
from compilespec.cudagraphs.inputs import BatchInputs
from compilespec.cudagraphs.modes import GraphKind
from compilespec.cudagraphs.recorder import GraphRecorder
from compilespec.cudagraphs.recording import Recording
from compilespec.cudagraphs.report import GraphKey
from compilespec.program import LoweredPhase, ProgramConfig, StepKey
from compilespec.progress import Reporter

logger = logging.getLogger("compilespec")


class Dispatcher:
    """Runs one phase on batches of any size.

    A batch is padded to the smallest bucket that holds it.  If the phase has graphs, that bucket is
    captured when it is first needed, unless it was captured at start.  If the bucket has no graph,
    the next larger bucket with one is used; if there is none, the phase runs uncaptured and
    unpadded.
    Source: requirements A7, E4.
    """

    def __init__(
        self,
        phase: LoweredPhase,
        fixed: Mapping[str, Tensor],
        config: ProgramConfig,
        *,
        buckets: Sequence[Bucket] = (),
        kind: GraphKind | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Bind a phase to its inputs.

        Args:
            fixed: weights, state and caches, by input name.
            buckets: sizes that batches are padded to; if empty, or if no graph can hold the phase,
                batches run unpadded.
            kind: kind of the graphs that `recorder` captures, where the phase can have it; None if
                the phase has none.
        """
        self.num_recompiles = 0
        self._phase, self._config = phase, config
        self._kind = kind = kind_for(phase, kind)
        is_refused = kind is not None and recorder is not None and recorder.refuses(phase)
        self.buckets = () if is_refused else tuple(buckets)
        self._recorder = recorder if kind is not None and not is_refused else None
        self._dims = BUCKET_DIMS[phase.phase]
        self._recordings: dict[Bucket, Recording] = {}
        self._is_dropped: set[Bucket] = set()
        self._bound: dict[Bucket, list[Any]] = {}  # a bucket's inputs are always the same tensors
        self._smallest: dict[Bucket, Bucket | None] = {}  # by the sizes of a batch
        limits = {
            "B": config.max_batch_size,
            "R": config.max_batch_size,
            "T": config.max_prefill_tokens,
        }
        for bucket in buckets:
            limits |= {d: max(limits[d], n) for d, n in zip(self._dims, bucket, strict=True)}
        names = [spec.name for spec in phase.inputs if spec.kind == "batch"]
        self._batch = BatchInputs(names, limits, config.device)
        self._fixed = [None if s.kind == "batch" else fixed[s.name] for s in phase.inputs]
        self._places = {s.name: i for i, s in enumerate(phase.inputs) if s.kind == "batch"}

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> Sequence[Tensor]:
        """Run a batch: the phase's outputs, of the bucket's sizes, valid until the next call.

        Args:
            batch: entries of the live rows and tokens by input name; inputs that the phase does not
                read are ignored.
        """
        sizes = tuple(len(batch[name]) for name in self._size_names(batch))
        bucket, recording = self._choose(sizes)
        padding = self._poison_values(bucket) if recording and self._is_emulated else None
        inputs = self._inputs(bucket, batch, padding)
        compiled_before = _torch_compat.count_compilations()
        if recording is None:
            results: Sequence[Tensor] = self._phase.call(*inputs)
        else:
            results = self._replay(recording, inputs, sizes)
        self.num_recompiles += _torch_compat.count_compilations() - compiled_before
        return results

    @property
    def key(self) -> StepKey:
        """The graph that a bucket runs."""
        return self._phase.key

    @property
    def keys(self) -> list[GraphKey]:
        """Keys of the buckets that may have graphs."""
        return [self._key(bucket) for bucket in self.buckets] if self._recorder else []

    @property
    def captured_sizes(self) -> list[dict[str, int]]:
        """By letter: the sizes of each bucket that may have a graph."""
        return [dict(zip(self._dims, key.bucket, strict=True)) for key in self.keys]

    def prepare(self) -> None:
        """Called once, before all buckets are captured."""
        if self._recorder is not None:
            self._recorder.prepare()

    def capture(self, bucket: Bucket) -> Recording | None:
        """Capture a bucket if it may have a graph and does not have one yet."""
        if self._recorder is None or bucket in self._is_dropped:
            return None
        if bucket not in self._recordings:
            inputs = self._inputs(bucket, {}, None)
            compiled_before = _torch_compat.count_compilations()
            recording = self._recorder.capture(self._key(bucket), self._phase, inputs)
            self.num_recompiles += _torch_compat.count_compilations() - compiled_before
            if recording is None:
                self._is_dropped.add(bucket)
                return None
            self._recordings[bucket] = recording
        return self._recordings[bucket]

    def _choose(self, sizes: Bucket) -> tuple[Bucket, Recording | None]:
        """Choose the bucket to run, and its graph; the batch's own sizes where no graph serves
        it.
        """
        if sizes not in self._smallest:
            self._smallest[sizes] = smallest(self.buckets, sizes)
        bucket = self._smallest[sizes]
        if self._recorder is None:
            return bucket or sizes, None
        recording = self.capture(bucket) if bucket is not None else None
        if recording is None:
            bucket = smallest(self._recordings, sizes)
            recording = self._recordings.get(bucket) if bucket is not None else None
        if recording is None:
            self._recorder.report.num_uncaptured += 1
            return sizes, None
        self._recorder.report.num_replays += 1
        return recording.key.bucket, recording

    def _replay(
        self, recording: Recording, inputs: Sequence[Tensor], sizes: Bucket
    ) -> Sequence[Tensor]:
        if not self._is_emulated:
            return recording.replay(inputs)
        for output in recording.outputs:
            poison(output)
        results = recording.replay(inputs)
        for output in results:
            self._poison_padded(output, recording.key.bucket, sizes)
        return results

    def _inputs(
        self, bucket: Bucket, batch: Mapping[str, Sequence[int]], padding: Mapping[str, int] | None
    ) -> list[Tensor]:
        """The phase's inputs, with a batch written into its bucket."""
        sizes = dict(zip(self._dims, bucket, strict=True))
        self._batch.write(batch, sizes, padding)
        if bucket in self._bound:
            return self._bound[bucket]
        inputs: list[Any] = list(self._fixed)
        for name, view in self._batch.views(sizes).items():
            inputs[self._places[name]] = view
        if bucket in self.buckets:  # a closed set
            self._bound[bucket] = inputs
        return inputs

    def _key(self, bucket: Bucket) -> GraphKey:
        assert self._kind is not None
        return GraphKey(self.key, bucket, self._kind)

    def _size_names(self, batch: Mapping[str, Sequence[int]]) -> list[str]:
        """The first input with each dimension, (B,) or (R, T)."""
        return [next(name for name in batch if name[-1] == dim) for dim in self._dims]

    # --- emulation: poison the values that nothing may read ---

    @property
    def _is_emulated(self) -> bool:
        return self._recorder is not None and self._recorder.is_emulated

    def _poison_values(self, bucket: Bucket) -> dict[str, int]:
        """Legal values that do the most harm if a padded entry is not masked."""
        sizes = dict(zip(self._dims, bucket, strict=True))
        return {
            "ids_T": 1,
            "next_T": 1,
            "position_T": self._config.max_seq_len - 1,
            "owner_T": sizes.get("R", 1) - 1,
            "last_R": sizes.get("T", 1) - 1,
        }

    def _poison_padded(self, output: Tensor, bucket: Bucket, sizes: Bucket) -> None:
        """Outputs are [B, ...] or [R, ...]; per-token ones of prefill are [1, T, ...]."""
        is_by_token = len(bucket) == 2 and output.dim() == 3
        poison(output[:, sizes[1] :] if is_by_token else output[sizes[0] :])


def kind_for(phase: LoweredPhase, wanted: GraphKind | None) -> GraphKind | None:
    """The wanted kind; "full", with a warning, for pieces of a phase that could not be cut."""
    if wanted != "piecewise" or phase.stitched is not None:
        return wanted
    logger.warning("%s is not in pieces: each of its buckets is one graph", phase.key)
    return "full"


def capture_all(
    dispatchers: Sequence[Dispatcher],
    *,
    startup_seconds: float,
    progress: Reporter | None = None,
) -> None:
    """Capture at start until the time is spent.  Decode steps come first, because capturing one in
    traffic holds up every request; the largest come first, because the others reuse their memory.
    """
    work = [(key, d) for d in dispatchers for key in d.keys]
    work.sort(
        key=lambda item: (item[0].step.phase != "decode", [-size for size in item[0].bucket[::-1]])
    )
    if not work or startup_seconds <= 0:
        return
    work[0][1].prepare()
    deadline = time.perf_counter() + startup_seconds
    progress = progress or Reporter()
    for index, (key, dispatcher) in enumerate(work, 1):
        if time.perf_counter() >= deadline:
            return
        with progress.step("capture", str(key), index=index, total=len(work)):
            dispatcher.capture(key.bucket)
