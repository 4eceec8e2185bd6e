"""The training loop: lessons, updates, measurements, and saved states."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.errors import CheckpointError, InvalidOption, TrainingDiverged
from compilespec.ops.device import traits_of
from compilespec.tracing.load import Target
from compilespec.tracing.weight_marks import KEY
from compilespec.training.batches import (
    digest_samples,
    epoch_batches,
    make_batch,
    make_lesson,
)
from compilespec.training.data import Loader, Sample, split_held_out
from compilespec.training.files import Journal, read_records, writing
from compilespec.training.measure import MeasuredAcceptance, folder_beside, measure
from compilespec.training.method import TrainingMethod
from compilespec.training.optim import MuonAdamW
from compilespec.training.options import TrainOptions
from compilespec.training.report import Facts, Record, write_reports
from compilespec.training.state import FILE_NAME as STATE
from compilespec.training.state import RunState, load_state, restore, save_state
from compilespec.training.stored_states import StateStore
from compilespec.training.teacher import Teacher

LOG, FINISH = "log.jsonl", "finish"


class Trainer:
    """One run in one folder: the best head, and `training/` with its state, log and plots."""

    def __init__(
        self,
        target: Target,
        teacher: Teacher,
        method: TrainingMethod,
        loader: Loader,
        output: Path,
        options: TrainOptions,
        on_record: Callable[[Record, RunState], object] = lambda record, run: None,
        store: StateStore | None = None,
    ) -> None:
        self.target, self.teacher, self.method = target, teacher, method
        self.loader, self.output, self.options = loader, output, options
        self.on_record, self.store = on_record, store
        self.folder = output / "training"
        self.learned, self.judged = self._split(None)
        counts = count_tokens(self.learned, teacher.info.vocab_size)
        self.drafter = method.create(teacher.info, counts, options)
        if options.start_from is not None:
            method.start_from(self.drafter, options.start_from, teacher.info)
        self.optimizer = MuonAdamW(
            self.drafter.named_parameters(), adam_names=method.slow_parameters(self.drafter)
        )
        aux_layers = method.aux_layers(self.drafter)
        teacher.tap(aux_layers, compiled=options.compiled)
        if store is not None:
            store.open(teacher, aux_layers)
        if options.compiled:
            method.compile_steps()
        self.run = RunState()
        self._stop = False

    def resume(self) -> None:
        """Go to where the run in the folder stopped; the log is cut there."""
        content = load_state(self.folder / STATE)
        self.run = restore(content, self.options, self.drafter, self.optimizer)
        kept = [r for _, r in read_records(self.folder / LOG) if r["step"] < self.run.step]
        (self.folder / LOG).unlink()
        with Journal(self.folder / LOG) as journal:
            journal.extend(kept)
        self._begin_epoch(resumed=True)

    def train(self) -> Record | None:
        """Train to the end, or to an interrupt, with the state saved; returns the last record.

        Raises: TrainingDiverged, CheckpointError; the last state that was saved stays.
        """
        last: Record | None = None
        if self.run.step == 0:
            self._begin_epoch(resumed=False)
        with Journal(self.folder / LOG) as journal, self._interruptible():
            batches = self._batches()
            while not self._is_over():
                last = self._one_step(next(batches))
                if self._is_due(self.options.eval_every):
                    last.acceptance = self._measure()
                journal.append(last.as_json())
                if self._is_due(self.options.save_every):
                    self._save()
                self.on_record(last, self.run)
        self._save()
        return last

    @property
    def interrupted(self) -> bool:
        """True if `train` was told to end before the end of the run."""
        return self._stop

    def _one_step(self, samples: Sequence[Sample]) -> Record:
        run, options, started = self.run, self.options, time.monotonic()
        run.schedule.update(run.step, run.seconds, options, finish=self._finish())
        rate = options.learning_rate * run.schedule.factor(run.step, options.warmup_steps)
        batch = make_batch(samples, learn_prompts=options.learn_prompts)
        batch = batch.to(self.teacher.info.device)
        ids = self.method.draft_ids(self.drafter)
        states = self.store.of(samples) if self.store is not None else None
        lesson = make_lesson(self.teacher, batch, ids, options.depth, states)
        with self._precision():
            result = self.method.losses(self.drafter, lesson, options.depth)
        steps = torch.arange(len(result.losses), device=result.losses.device)
        weights = options.step_decay**steps
        loss = (result.losses * weights).sum() / weights.sum()
        if not bool(torch.isfinite(loss)):
            raise TrainingDiverged(
                f"the loss of step {run.step} is {float(loss.detach()):g}; the last saved state is "
                f"kept: start anew with a lower learning_rate than {options.learning_rate:g}"
            )
        loss.backward()
        with self._precision():
            norm = self.optimizer.step(rate)
        run.seconds += time.monotonic() - started
        run.num_tokens += batch.num_tokens
        record = Record(
            step=run.step,
            loss=float(loss.detach()),
            losses=result.losses.detach().tolist(),
            right=result.right.tolist(),
            learning_rate=rate,
            norm=norm,
            num_tokens=run.num_tokens,
            seconds=run.seconds,
        )
        run.step += 1
        run.place.batch += 1
        return record

    def _precision(self) -> torch.autocast:
        """The context for products in lower precision; everything else stays float32."""
        kind = traits_of(self.teacher.info.device).kind
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.mixed_precision)

    def _batches(self) -> Iterator[list[Sample]]:
        place, options = self.run.place, self.options
        while True:
            batches = epoch_batches(
                self.learned, seed=options.seed, epoch=place.epoch,
                batch_tokens=options.batch_tokens,
            )  # fmt: skip
            for number, samples in enumerate(batches):
                if number >= place.batch:
                    yield samples
            place.epoch, place.batch = place.epoch + 1, 0
            self._begin_epoch(resumed=False)

    def _begin_epoch(self, *, resumed: bool) -> None:
        """Take the samples present now, or those that the epoch began with."""
        place = self.run.place
        self.learned, self.judged = self._split(place.num_samples if resumed else None)
        found = digest_samples(self.learned)
        if resumed and found != place.digest:
            raise InvalidOption(
                "the data is not that which the run to resume began with: give the same file "
                "(lines may have been added at its end), or another output folder"
            )
        place.num_samples, place.digest = len(self.learned) + len(self.judged), found

    def _split(self, count: int | None) -> tuple[list[Sample], list[Sample]]:
        """Raises: InvalidOption if no sample is left to learn from."""
        samples = self.loader.samples()[:count]
        learned, judged = split_held_out(samples, self.options.held_out_one_in)
        if not learned:
            raise InvalidOption(
                f"the data has {len(samples)} sequences, and all are held out: give more"
            )
        return learned, judged

    def _is_over(self) -> bool:
        end = self.run.schedule.end
        if self.options.steps is not None:
            end = min(self.options.steps, end or self.options.steps)
        return self._stop or (end is not None and self.run.step >= end)

    def _is_due(self, every: int) -> bool:
        """True if the last step is one of every `every`, or the last of all."""
        if self._stop:
            return False
        return self.run.step % every == 0 or self._is_over()

    def _finish(self) -> bool:
        """True if a user asked for the end, or nothing gets better."""
        wish = self.folder / FINISH
        asked = wish.exists()
        wish.unlink(missing_ok=True)
        return asked or self.run.num_worse >= self.options.patience

    def _measure(self) -> MeasuredAcceptance | None:
        """Measure the head, and keep it if it is the best so far."""
        run = self.run
        if not self.judged:
            self._keep_head(None)
            return None
        with folder_beside(self.output) as parts, torch.random.fork_rng(devices=[]):
            self._save_head(parts)
            found = measure(self.target, self.method.spec, parts, self.judged, self.options)
            if found.overall >= run.best:
                run.best, run.num_worse = found.overall, 0
                self._keep_head(parts)
            else:
                run.num_worse += 1
        return found

    def _keep_head(self, parts: Path | None) -> None:
        """Put a saved head in place of the one before, file by file."""
        if parts is None:
            with folder_beside(self.output) as parts:
                self._save_head(parts)
                return self._keep_head(parts)
        with writing(self.output):
            for file in sorted(parts.iterdir()):
                file.replace(self.output / file.name)
        return None

    def _save_head(self, directory: Path) -> None:
        with writing(directory):
            try:
                self.method.save(self.drafter, directory, self.target.dtype, self.options.layout)
                note_target(directory, self.teacher.fingerprint)
            except CheckpointError:
                raise
            except Exception as error:  # safetensors has its own error for a full disk
                raise OSError(str(error)) from error

    def _save(self) -> None:
        save_state(self.folder / STATE, self.run, self.options, self.drafter, self.optimizer)
        records = [record for _, record in read_records(self.folder / LOG)]
        write_reports(self.output, records, self._facts())

    def _facts(self) -> Facts:
        domains = Counter(one.domain or "text" for one in self.learned)
        return Facts(
            spec=self.method.spec,
            model=self.target.name,
            num_trained=num_trained(self.drafter),
            num_samples=len(self.learned),
            num_held_out=len(self.judged),
            domains=dict(domains),
            options=self.options,
            finished=self._is_over() and not self._stop,
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step, with its state saved; a second signal ends
        it at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def count_tokens(samples: Sequence[Sample], vocab_size: int) -> torch.Tensor:
    """The occurrences of each token in the written parts: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for one in samples:
        counts += torch.bincount(torch.tensor(one.token_ids[one.start :]), minlength=vocab_size)
    return counts


def num_trained(drafter: nn.Module) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def note_target(directory: Path, known: str | None) -> None:
    """Write the digest of the target's weights into a saved drafter's config.json."""
    file = directory / "config.json"
    if known is not None and file.is_file():
        raw = json.loads(file.read_text(encoding="utf-8")) | {KEY: known}
        file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
