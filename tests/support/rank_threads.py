"""Ranks as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from compilespec.ops.collectives import acting
from compilespec.ops.collectives.group import ThreadGroup


def by_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """What each rank's call gives."""
    found: list[Any] = [None] * size

    def run(group: ThreadGroup) -> None:
        with acting(group):
            found[group.rank] = function(group.rank)

    threads = [threading.Thread(target=run, args=(group,)) for group in ThreadGroup.make(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
