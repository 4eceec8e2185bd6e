"""The number of processors that this process may keep busy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_cpus(root: Path = Path("/")) -> int:
    """The number of processors that the process may run on, or the CPU quota of its container,
    rounded up, if that is less.

    Args: root: where proc and sys are mounted.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    return min([count, *(max(1, math.ceil(quota)) for quota in _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in processors, of the control groups that this process is in.

    Source: the kernel's cgroup-v2.rst (cpu.max) and sched-bwc.rst (cpu.cfs_quota_us).
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            tops = [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [mounts / controllers, mounts / "cpu"]
        else:
            continue
        for top in tops:
            inner = top / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(top):  # a container may not see where its own group is
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    told = _read(folder / "cpu.max").split() or [
        *_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()
    ]  # fmt: skip
    if len(told) == 2 and all(one.isdecimal() and int(one) for one in told):  # "max", -1: no quota
        yield int(told[0]) / int(told[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
