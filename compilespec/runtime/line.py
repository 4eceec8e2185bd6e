"""The line: all open requests of an engine, in the order in which it serves them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from compilespec.runtime.request import Request

PATIENCE = 32  # later requests that may be admitted before one because their priority is higher


class Line:
    """The requests that wait, run, and leave.

    `waiting` and `running` are in order, by priority, then first come, first served; `leaving` have
    ended, but a launch still names them.

    An interrupt may come at any place, and recovery handles only requests in a list.  So a request
    enters its next list before it leaves the last one: it may be in two lists for a moment, and is
    always in one.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self._arrivals = itertools.count()

    def join(self, request: Request) -> None:
        """Add a new request to those that wait."""
        request.arrival = next(self._arrivals)
        bisect.insort(self.waiting, request, key=_rank)

    def run(self, request: Request) -> None:
        """Move a request from waiting to running."""
        bisect.insort(self.running, request, key=_rank)
        self.waiting.remove(request)
        self._note_passed(request)

    def wait_again(self, request: Request) -> None:
        """Move a request from running to waiting."""
        bisect.insort(self.waiting, request, key=_rank)
        self.running.remove(request)

    def leave(self, request: Request) -> None:
        """Remove a request that has ended; while it holds a row, move it to `leaving`."""
        if request.row >= 0:
            self.leaving.append(request)
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)

    def everyone(self) -> list[Request]:
        """All requests, each once."""
        return list(dict.fromkeys([*self.leaving, *self.running, *self.waiting]))

    def start_over(self, known: Iterable[Request]) -> None:
        """Stop all running requests; the unfinished ones of these wait."""
        self.waiting[:] = sorted((r for r in known if not r.finished), key=_rank)
        self.running.clear()
        self.leaving.clear()

    def _note_passed(self, request: Request) -> None:
        """Count the overtaking for each earlier request that still waits; a request that was passed
        often enough becomes the first.
        """
        if not self.waiting or self.waiting[-1].priority >= request.priority:
            return
        for other in self.waiting:
            other.num_passed += other.arrival < request.arrival
        self.waiting.sort(key=_rank)


def _rank(request: Request) -> tuple[bool, int, int]:
    """The rank in line: smaller is earlier."""
    return request.num_passed < PATIENCE, -request.priority, request.arrival
