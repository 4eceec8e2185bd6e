"""The vector instruction sets that Inductor can build for, remembered across processes.  Inductor
starts a process for each instruction set to load a library: 1.2 s of every start.

In every process, Inductor starts another one for each instruction set, to load a library: 1.2 s in
which nothing else happens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress

from compilespec import _torch_compat
from compilespec.ops._build import cache_directory, toolchain


@functools.cache
def remember_vector_isas() -> None:
    """Have the probes of this process answered from the cache directory, once."""
    _torch_compat.replace_isa_probe(_remembered)


def _remembered(probe: Callable[[], bool], name: str) -> bool:
    """Only success is remembered: a failure may come from a full disk."""
    digest = hashlib.sha256("\0".join((name, *toolchain())).encode()).hexdigest()[:20]
    mark = cache_directory() / "vector-isas" / digest
    with suppress(OSError):
        if mark.exists():
            return True
    works = probe()
    if works:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return works
