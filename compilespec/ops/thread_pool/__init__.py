"""Which threads the C++ kernels run on: OpenMP's, as torch's do, or a pool of their own.

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

    It is for programs that run no OpenMP loops in between: their threads spin for milliseconds, on
    the cores of the pool's.  Those that the calling thread has had until now end.  Where OpenMP
    pins its threads to cores, they are used all the same.
    """
    global _is_used
    with _lock:
        if wanted != _is_used and load_kernels():
            torch.ops.compilespec.use_thread_pool(wanted)
            _is_used = wanted
