"""Reports what a start does while it does it: small records for a callable, lines for the log."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compilespec.errors import InvalidOption

logger = logging.getLogger("compilespec")

Stage = Literal["load", "trace", "rewrite", "compile", "capture", "ready"]
IN_WORDS = {
    "load": "loading", "trace": "tracing", "rewrite": "rewriting", "compile": "compiling",
    "capture": "capturing", "ready": "ready",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A record of one step of a start: it begins, reports progress, or is done."""

    stage: Stage
    """The last record of a start has stage "ready"."""

    what: str
    """"target", "decode, K=3", "C++ kernels", ..."""

    index: int | None = None
    """The number of the step within the stage, from 1; None where the number of steps is
    unknown.
    """

    total: int | None = None
    """The number of steps of the stage."""

    detail: str = ""
    """The progress within the step: "part 2 of 5"."""

    from_cache: bool | None = None
    """True where the result was found on disk; None where nothing is kept on disk, or not known
    yet.
    """

    why: str = ""
    """The reason why it is compiled again."""

    done: bool = False
    """True in the last record of the step."""

    elapsed_ms: float = 0.0
    """Milliseconds since the step began."""

    seconds: Mapping[Stage, float] = dataclasses.field(default_factory=dict)
    """Of the last record: the times by stage.  A nested step counts for its own stage alone."""

    def __str__(self) -> str:
        place = "" if self.total is None else f" {self.index} of {self.total}"
        detail = f", {self.detail}" if self.detail else ""
        line = f"{IN_WORDS[self.stage]}{place}: {self.what}{detail}"
        if self.from_cache is not None:
            line += ", from the cache" if self.from_cache else f" ({self.why})"
        if self.done:
            line += f", {_in_words(self.elapsed_ms)}"
        parts = (f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
        return f"{line} ({', '.join(parts)})" if self.seconds else line


QUIET_S = 5.0  # seconds of a start before it prints to stderr


class _SlowStart:
    """Prints a line per step to stderr once a start has taken long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._record: Progress | None = None
        self._is_long, self._said = False, ("", "")
        self._timer = threading.Timer(QUIET_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, record: Progress) -> None:
        with self._lock:
            self._record = record
            if self._is_long:
                self._say(record)

    def _begin(self) -> None:
        with self._lock:
            self._is_long = True
            if self._record is not None:
                self._say(self._record)

    def _say(self, record: Progress) -> None:
        """Print when a step begins, once more than its name is known, and when it ends."""
        is_known = record.stage != "compile" or record.detail or record.from_cache is not None
        name = (record.stage, record.what)
        if self._said != name and is_known and (not record.done or record.stage == "ready"):
            self._said = name
            print(f"compilespec: {record}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print nothing more."""
        self._timer.cancel()
        self._timer.join()


@contextlib.contextmanager
def reporting(tell: Callable[[Progress], object] | Literal[False] | None) -> Iterator[Reporter]:
    """Reports a start inside the `with` block.  None: a long start prints to stderr, unless the
    log, or another rank of the job, shows it; False: silent.

    Raises: InvalidOption, for what cannot be called.
    """
    is_told = logger.isEnabledFor(logging.INFO) or os.environ.get("RANK", "0") != "0"
    if tell is not None or is_told:
        yield Reporter(None if tell is False else tell)
        return
    slow = _SlowStart()
    try:
        yield Reporter(slow)
    finally:
        slow.close()


class Reporter:
    """Reports one start: the stages open a `step` for each thing that takes time.

    An exception of the callable is raised where it was called, so that starting stops there: what
    has been compiled by then is in the cache.

    Raises: InvalidOption, for what cannot be called.
    """

    def __init__(self, tell: Callable[[Progress], object] | None = None) -> None:
        if tell is not None and not callable(tell):
            raise InvalidOption(
                f"progress must be a function of one `Progress` record; got {tell!r}; "
                f"progress=print prints it, progress=False says nothing"
            )
        self._tell = tell
        self._started = time.perf_counter()
        self._seconds: dict[Stage, float] = {}

    @contextlib.contextmanager
    def step(
        self, stage: Stage, what: str, *, index: int | None = None, total: int | None = None
    ) -> Iterator[Step]:
        """Report one thing that takes time; if it raises, no last record comes."""
        started, told_before = time.perf_counter(), sum(self._seconds.values())
        step = Step(self, Progress(stage=stage, what=what, index=index, total=total), started)
        step.tell()
        yield step
        elapsed = time.perf_counter() - started
        inside = sum(self._seconds.values()) - told_before
        self._seconds[stage] = self._seconds.get(stage, 0.0) + elapsed - inside
        step.tell(done=True, detail="")

    def ready(self) -> None:
        """Tell the last record."""
        elapsed_ms = (time.perf_counter() - self._started) * 1e3
        self.emit(
            Progress(
                stage="ready",
                what="all",
                done=True,
                elapsed_ms=elapsed_ms,
                seconds=dict(self._seconds),
            )
        )

    def emit(self, record: Progress) -> None:
        logger.info("%s", record)
        if self._tell is not None:
            self._tell(record)


class Step:
    """One step, as its stage sees it."""

    def __init__(self, reporter: Reporter, record: Progress, started: float) -> None:
        self._reporter, self._record, self._started = reporter, record, started

    def note(self, **changes: Any) -> None:
        """Change the fields of later records."""
        self._record = dataclasses.replace(self._record, **changes)

    def tell(self, **changes: Any) -> None:
        """Change the fields and report at once."""
        elapsed_ms = (time.perf_counter() - self._started) * 1e3
        self.note(elapsed_ms=elapsed_ms, **changes)
        self._reporter.emit(self._record)

    def inside(self, stage: Stage, detail: str) -> contextlib.AbstractContextManager[Step]:
        """A step of another stage that runs inside this one."""
        record = self._record
        return self._reporter.step(
            stage, f"{record.what}, {detail}", index=record.index, total=record.total
        )


def _in_words(elapsed_ms: float) -> str:
    return f"{elapsed_ms:.0f} ms" if elapsed_ms < 1000 else f"{elapsed_ms / 1e3:.1f} s"


# Python 3.12 itself freezes some hundred objects; a program that freezes has thousands.
_OWN_FROZEN = 1000 if sys.version_info[:2] == (3, 12) else 0
_RARELY = (1_000_000, 10, 10)  # new objects for a collection, collections for one of the next kind
_GROWTH = 1.25  # share of new objects that starts a full collection
_counting = threading.Lock()
_num_starting, _usual = 0, gc.get_threshold()
_num_kept = 0  # objects behind the first start, or the last full collection


@contextlib.contextmanager
def rare_collections(*, only_imports: bool = False) -> Iterator[None]:
    """Collect garbage rarely in this process while a program starts.

    Imports and graphs are some million objects that stay; each usual collection walks through them
    again, a sixth of a warm start.  Afterwards all objects count as old without a walk, unless
    earlier programs may have left much garbage.
    """
    global _num_starting, _usual
    with _counting:
        if not _num_starting:
            _usual = gc.get_threshold()
            gc.set_threshold(*_RARELY)
        _num_starting += 1
    is_done = False
    try:
        yield
        is_done = True
    finally:
        with _counting:
            _num_starting -= 1
            if not _num_starting:
                if is_done and gc.get_freeze_count() <= _OWN_FROZEN:  # else those of others thaw
                    _count_as_old(may_collect=not only_imports)
                gc.set_threshold(*_usual)


def _count_as_old(*, may_collect: bool) -> None:
    global _num_kept
    num_objects = _all_to_oldest(counts=may_collect)
    if num_objects > _GROWTH * _num_kept:
        if _num_kept:
            gc.collect()
            num_objects = _all_to_oldest(counts=True)
        _num_kept = num_objects


def _all_to_oldest(*, counts: bool) -> int:
    """Move all objects to the oldest generation."""
    gc.freeze()
    num_objects = gc.get_freeze_count() if counts else 0
    gc.unfreeze()
    return num_objects
