"""How many processors a container's quota leaves, on made-up files of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from compilespec.cli import generate
from compilespec.ops import _cpus
from compilespec.ops._cpus import num_cpus

GROUPS: dict[str, tuple[str, dict[str, str], int]] = {
    "v2, a container": ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
    "v2, a whole number": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    "v2, less than one": ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
    "v2, no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
    "v2, more than there are": ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
    "v2, a group above": (
        "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4,
    ),
    "v2, the least": (
        "0::/a/b\n", {"a/b/cpu.max": "700000 100000", "a/cpu.max": "900000 100000"}, 7,
    ),
    "v1": (
        "12:cpuset:/x\n4:cpu,cpuacct:/docker/id\n",
        {"cpu,cpuacct/docker/id/cpu.cfs_quota_us": "150000\n",
         "cpu,cpuacct/docker/id/cpu.cfs_period_us": "100000\n"}, 2,
    ),
    "v1, seen from within": (
        "4:cpu,cpuacct:/docker/id\n",
        {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3,
    ),
    "v1, no quota": (
        "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16,
    ),
    "both": (
        "4:cpu:/\n0::/y\n",
        {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000",
         "unified/y/cpu.max": "max 100000"}, 5,
    ),
    "another's group": ("0::/a\n", {"b/cpu.max": "100000 100000"}, 16),
    "nonsense": ("0::/\n4:cpu\n\n", {"cpu.max": "0 0\n"}, 16),
    "half a file": ("0::/\n", {"cpu.max": "100000"}, 16),
    "none": ("", {}, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_the_quota_is_rounded_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, files, expected = GROUPS[name]
    for path, text in (
        ("proc/self/cgroup", groups),
        *((f"sys/fs/cgroup/{p}", t) for p, t in files.items()),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert num_cpus(tmp_path) == expected


def test_without_affinity_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_cpus(tmp_path) == 5


def test_commands_take_no_more_threads_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(_cpus, "num_cpus", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    generate.set_threads(None)
    generate.set_threads(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    generate.set_threads(None)
    assert chosen == [3, 8]
