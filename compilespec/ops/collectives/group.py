"""The ranks of a step: processes of `torch.distributed`, or threads of one process."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from compilespec.errors import NotSupported, RankLost


class Group(Protocol):
    """The ranks that run a step together, all in the same order of operators."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor of this call, in rank order; all have one shape and dtype."""


class _Acting(threading.local):
    group: Group | None = None


_acting = _Acting()
_process: list[Group] = []  # the group of all threads without one


@contextlib.contextmanager
def acting(group: Group | None) -> Iterator[None]:
    """Makes steps of this thread, inside, those of a rank of `group`."""
    before, _acting.group = _acting.group, group
    try:
        yield
    finally:
        _acting.group = before


def current(size: int) -> Group:
    """The group of this thread.  Raises: NotSupported where none of that size runs here."""
    group = _acting.group or (_process[-1] if _process else None)
    if group is None or group.size != size:
        raise NotSupported(
            f"a step for {size} ranks of tensor parallelism runs in a job of that many processes "
            f"alone: start them with torchrun --nproc-per-node {size}"
        )
    return group


class ProcessGroup:
    """The processes of a `torch.distributed` group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gather as bytes, so that every dtype goes through unchanged."""
        flat = x.detach().contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        try:
            torch.distributed.all_gather(parts, flat, group=self._group)
        except RuntimeError as error:
            raise lost_rank(self.rank, "inside a step", error) from error
        return [part.view(x.dtype).view(x.shape) for part in parts]


def lost_rank(rank: int, when: str, error: RuntimeError) -> RankLost:
    """The error of a rank whose call failed, with gloo's message, without its place and advice."""
    said = str(error).splitlines()[0].partition(". This is typically")[0]
    said = re.sub(r"^\[\S+:\d+\] ", "", said)
    return RankLost(f"rank {rank} lost another rank of the job, which ended, {when}: {said}")


class _Meeting:
    """The meeting place where threads leave their tensors and take those of the others."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size


class ThreadGroup:
    """A rank among threads of this process: tries a job's steps without its processes."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.left), meeting

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        """Make one group for each rank."""
        meeting = _Meeting(size)
        return [cls(rank, meeting) for rank in range(size)]

    def gather(self, x: Tensor) -> list[Tensor]:
        self._meeting.left[self.rank] = x.detach().clone()
        self._meeting.barrier.wait()
        parts = list(self._meeting.left)
        self._meeting.barrier.wait()
        return parts

    def leave(self) -> None:
        """Wake the others, which fail: this rank will not come to the next meeting."""
        self._meeting.barrier.abort()


def serve_process(group: Group) -> None:
    """Let all steps of this process be those of a rank of `group`."""
    _process[:] = [group]


def this_rank() -> int:
    """The rank of this thread's group, or the process's; 0 without a group."""
    group = _acting.group or (_process[-1] if _process else None)
    return 0 if group is None else group.rank
