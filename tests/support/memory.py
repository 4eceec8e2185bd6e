"""What of a tensor is in memory (Linux)."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch


def resident(tensor: torch.Tensor) -> int:
    """KiB in memory of the pages that a tensor without gaps lies in.

    Pages are asked one by one, not as a mapping: Linux makes one mapping of neighbours, so its size
    says nothing about a tensor. Bit 63 of a page's 8 bytes in pagemap means that it is present.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * begin)
        entries = np.frombuffer(pages.read(8 * (end - begin)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE // 1024
