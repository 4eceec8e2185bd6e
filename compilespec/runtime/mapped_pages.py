"""Pages of files that tensors were mapped from, given back to the system once they were read.

A checkpoint is mapped, not read: its pages enter memory as a weight is packed, and would stay
beside the packed copy as long as nobody else wants them.  They hold what the file holds, so the
system can drop them at no cost and reads them again when somebody asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

MADV_PAGEOUT = 21  # Linux 5.4


class MappedPages:
    """Of this process, as they are now; none where /proc/self/maps does not tell."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # of private mappings of files, in rising order
        self._advise: Any = None
        with contextlib.suppress(OSError, AttributeError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, permissions, _, _, inode, *_ = line.split()
                if inode != "0" and permissions.startswith("rw") and permissions[3] == "p":
                    first, _, end = addresses.partition("-")
                    self._ranges.append((int(first, 16), int(end, 16)))
            self._advise = ctypes.CDLL(None).madvise

    def give_back(self, tensors: Iterable[Tensor]) -> int:
        """Let go of the whole pages of those that lie in a file's mapping; values stay the same.

        Returns: bytes that the system was told of.
        """
        return sum(self._give_back(tensor) for tensor in tensors)

    def _give_back(self, tensor: Tensor) -> int:
        is_plain = tensor.device.type == "cpu" and not hasattr(tensor, "__tensor_flatten__")
        if self._advise is None or not is_plain:
            return 0
        first, num_bytes = tensor.data_ptr(), tensor.nbytes
        place = bisect_right(self._ranges, (first, 2**64)) - 1
        if place < 0 or not tensor.is_contiguous() or first + num_bytes > self._ranges[place][1]:
            return 0
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size <= 0 or self._advise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(MADV_PAGEOUT)
        ):
            return 0
        return size
