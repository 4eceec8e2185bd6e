"""What of a tensor is in memory (Linux)."""

from __future__ import annotations

from pathlib import Path

import torch


def resident(tensor: torch.Tensor) -> int:
    """KiB in memory of the mapping that a tensor lies in."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside = False
    for line in lines:
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) <= tensor.data_ptr() < int(end, 16)
        elif inside and first == "Rss:":
            return int(line.split()[1])
    raise AssertionError("the tensor is in no mapping")
