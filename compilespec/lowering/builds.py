"""The compilations of one start: compilers work in the background while more code is generated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import fx

from compilespec.lowering.artifacts import ArtifactCache, ArtifactKey, Interface
from compilespec.lowering.constants import Compiled, begin_compiling
from compilespec.progress import Reporter

logger = logging.getLogger("compilespec")


class Builds:
    """The graphs that a start compiles, by key: a piece that several steps share is there once.
    When a start is stopped, builds that have begun are still finished and kept.

    Where starting stops, what was begun by then is still compiled and kept.
    """

    def __init__(self, cache: ArtifactCache) -> None:
        self.cache = cache
        self._begun: dict[str, tuple[ArtifactKey, Callable[[], Compiled], Interface]] = {}
        self._done: dict[str, Compiled] = {}

    def begin(
        self,
        key: ArtifactKey,
        gm: fx.GraphModule,
        fakes: Sequence[Any],
        options: dict[str, Any],
        interface: Interface,
    ) -> None:
        """Generate the code of an ATen graph; its compiler works in the background."""
        self._begun[key.name] = (key, begin_compiling(gm, fakes, options), interface)

    def __contains__(self, key: ArtifactKey) -> bool:
        return key.name in self._begun or key.name in self._done

    def __getitem__(self, key: ArtifactKey) -> Compiled:
        """The compiled graph, when its compiler is done; then it is in the cache, too."""
        if key.name not in self._done:
            _, finish, interface = self._begun.pop(key.name)
            self._done[key.name] = compiled = finish()
            self.cache.save(key, compiled, interface)
        return self._done[key.name]

    def finish(self, progress: Reporter) -> None:
        """Wait for all compilers."""
        if not self._begun:
            return
        with progress.step("compile", "machine code") as step:
            keys = [key for key, *_ in self._begun.values()]
            for number, key in enumerate(keys, 1):
                step.tell(detail=f"graph {number} of {len(keys)}")
                _ = self[key]

    def __enter__(self) -> Builds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for key, *_ in list(self._begun.values()):
            try:
                _ = self[key]
            except Exception as fault:  # an error of the compiler; the first one is raised
                logger.debug("artifact %s was not compiled: %s", key, fault)
