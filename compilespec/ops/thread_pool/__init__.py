"""Which threads the C++ kernels run on: OpenMP's, as torch's do, or a pool of their own.

OpenMP ends a loop when all of its threads have been there; in the pool, the calling thread takes
over what the others have not begun.  See `_threads.h`.
"""

from __future__ import annotations

import torch

from compilespec.ops._build import load_kernels

_is_used = False


def use_thread_pool(wanted: bool) -> None:
    """Run the kernels of this process on the pool from now on, or on OpenMP's threads again.

    It is for programs that run no OpenMP loops in between: their threads spin for milliseconds, on
    the cores of the pool's.
    """
    global _is_used
    if wanted != _is_used and load_kernels():
        _is_used = wanted
        torch.ops.compilespec.use_thread_pool(wanted)
