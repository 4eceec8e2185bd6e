"""Lets a test say when the toy program goes on."""

from __future__ import annotations

import threading


class Gate:
    """Lets the program make as many calls as the test allows; the next one waits."""

    def __init__(self, calls: int = 0) -> None:
        self._allowed = threading.Semaphore(calls)
        self.waits = threading.Event()  # the engine's thread stands here

    def __call__(self, phase: str) -> None:
        if not self._allowed.acquire(blocking=False):
            self.waits.set()
            assert self._allowed.acquire(timeout=20), "the test allows no call"

    def allow(self, calls: int = 10_000) -> None:
        self._allowed.release(calls)
