"""The line: every request that an engine is not done with, in the order in which it serves them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from compilespec.runtime.request import Request

PATIENCE = 32  # later requests that may be admitted before one because their priority is higher


class Line:
    """Who waits, who runs, and who leaves.

    `waiting` and `running` are in order, by priority, then first come, first served; `leaving` have
    ended, but a launch still names them.

    An interrupt may come at any place, and only those in a list are looked after then.  So a
    request enters the list that it goes to before it leaves the one where it was: it may be in two
    for a moment, and is never in none.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self._arrivals = itertools.count()

    def join(self, request: Request) -> None:
        """A new request waits."""
        request.arrival = next(self._arrivals)
        bisect.insort(self.waiting, request, key=_rank)

    def run(self, request: Request) -> None:
        """One that waits runs."""
        bisect.insort(self.running, request, key=_rank)
        self.waiting.remove(request)
        self._note_passed(request)

    def wait_again(self, request: Request) -> None:
        """One that runs waits."""
        bisect.insort(self.waiting, request, key=_rank)
        self.running.remove(request)

    def leave(self, request: Request) -> None:
        """One that has ended goes; while it holds a row, to `leaving`."""
        if request.row >= 0:
            self.leaving.append(request)
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)

    def everyone(self) -> list[Request]:
        """All of them, each once."""
        return list(dict.fromkeys([*self.leaving, *self.running, *self.waiting]))

    def start_over(self, known: Iterable[Request]) -> None:
        """Nobody runs any more; of these, the unfinished wait."""
        self.waiting[:] = sorted((r for r in known if not r.finished), key=_rank)
        self.running.clear()
        self.leaving.clear()

    def _note_passed(self, request: Request) -> None:
        """Count it for each earlier request that still waits; one that was passed often enough
        becomes the first.
        """
        if not self.waiting or self.waiting[-1].priority >= request.priority:
            return
        for other in self.waiting:
            other.num_passed += other.arrival < request.arrival
        self.waiting.sort(key=_rank)


def _rank(request: Request) -> tuple[bool, int, int]:
    """The place in line: less is earlier."""
    return request.num_passed < PATIENCE, -request.priority, request.arrival
