"""Data-parallel training on the cores of one machine.

One thread in each of two processes beats two threads in one: threads meet at every operator, so a
core that is shared with other work stalls both; processes meet twice a step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn


def start(processes: int, threads: int, work: Callable[[], None]) -> None:
    """Run `work` (picklable) in every process; ranks meet through a file."""
    if processes == 1:
        torch.set_num_threads(threads)
        work()
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        spawn(_join, (processes, threads, meeting, work), nprocs=processes)


def _join(rank: int, processes: int, threads: int, meeting: str, work: Callable[[], None]) -> None:
    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes
    )
    work()
    dist.destroy_process_group()


def rank() -> int:
    """Return this process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    """Let every process arrive here."""
    if count() > 1:
        dist.barrier()


def mine(ids: Tensor) -> Tensor:
    """Return this process's rows of a batch."""
    return ids[rank() :: count()]


def add_up(tensors: list[Tensor], *, scale: float = 1.0) -> None:
    """Replace each tensor by its sum over the processes times `scale`."""
    if count() == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat.mul_(scale)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))
