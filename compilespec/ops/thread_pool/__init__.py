"""The threads of the C++ kernels: OpenMP's, as for torch's kernels, or our own pool.

OpenMP ends a loop when all of its threads have been there; in the pool, the calling thread takes
over what the others have not begun.  See `_threads.h`.
"""

from __future__ import annotations

import threading

import torch

from compilespec.ops._build import load_kernels
from compilespec.ops._library import NAMESPACE

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("use_thread_pool(bool wanted) -> ()")  # of the C++ library alone
_lock = threading.Lock()
_is_used = False


def use_thread_pool(wanted: bool) -> None:
    """Run the kernels of this process on the pool from now on, or on OpenMP's threads again.

    Use it for programs that run no OpenMP loops in between: OpenMP's threads spin for milliseconds
    on the pool's cores.  The OpenMP threads of the calling thread end here.  If OpenMP pins its
    threads to cores, the kernels stay on them.
    """
    global _is_used
    with _lock:
        if wanted != _is_used and load_kernels():
            torch.ops.compilespec.use_thread_pool(wanted)
            _is_used = wanted
