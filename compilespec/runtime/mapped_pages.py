"""Pages of files that tensors were mapped from, given back to the system after reading.

A checkpoint is mapped, not read: its pages enter memory as a weight is packed, and would stay
beside the packed copy.  They hold the file's contents, so the process can drop them and read them
again later from the system's cache of files, which the next start of a program reads too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from compilespec.ops.device import traits_of

MADV_DONTNEED = 4  # the process drops its pages, and loses its changes in them
MADV_PAGEOUT = 21  # Linux 5.4: the system keeps changes, but its cache loses the file


class MappedPages:
    """This process's mappings now; none where /proc/self/maps does not tell."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # of private mappings of files, in rising order
        with contextlib.suppress(OSError, AttributeError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, permissions, _, _, inode, *_ = line.split()
                if inode != "0" and permissions.startswith("rw") and permissions[3] == "p":
                    first, _, end = addresses.partition("-")
                    self._ranges.append((int(first, 16), int(end, 16)))

    def give_back(self, tensors: Iterable[Tensor]) -> int:
        """Drop the whole pages of the tensors that lie in a file's mapping; values stay the same,
        unless somebody writes them meanwhile.

        Returns: bytes that the system was told of.
        """
        return sum(self._give_back(tensor) for tensor in tensors)

    def _give_back(self, tensor: Tensor) -> int:
        is_plain = traits_of(tensor.device).is_cpu and not hasattr(tensor, "__tensor_flatten__")
        if not is_plain:
            return 0
        first, num_bytes = tensor.data_ptr(), tensor.nbytes
        place = bisect_right(self._ranges, (first, 2**64)) - 1
        if place < 0 or not tensor.is_contiguous() or first + num_bytes > self._ranges[place][1]:
            return 0
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size <= 0:
            return 0
        states = _page_states(start, size)
        if states is not None and not states.any():
            return 0
        is_unchanged = states is not None and bool(((states == 0) | (states & 1 == 1)).all())
        advice = MADV_DONTNEED if is_unchanged else MADV_PAGEOUT
        return size if advise(start, size, advice) else 0


def advise(start: int, size: int, advice: int) -> bool:
    """Tell the system what becomes of this process's pages; false where it does not follow."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        place, length = ctypes.c_void_p(start), ctypes.c_size_t(size)
        return not ctypes.CDLL(None).madvise(place, length, ctypes.c_int(advice))
    return False


def _page_states(start: int, size: int) -> np.ndarray | None:
    """A number for each page of this process there: 4 if it is present, 2 if it is swapped out,
    plus 1 if it is a page of a file (or of shared memory); a changed page of a private mapping is
    the process's own.  None where /proc/self/pagemap does not tell.
    """
    num_pages = size // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(8 * (start // mmap.PAGESIZE))
            entries = np.frombuffer(pages.read(8 * num_pages), dtype=np.uint64)
    except OSError:
        return None
    return entries >> np.uint64(61) if len(entries) == num_pages else None
