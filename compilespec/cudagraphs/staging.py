"""Host memory on its way to the device: copies that the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NUM_STAGES = 2  # copies that may be on their way at once


class Staging:
    """Host memory that one asynchronous copy sends to a device buffer.

    On CUDA the host fills pinned memory, a stage a copy in turn, and waits only if the stage's last
    copy has not run yet.  On the CPU it fills the buffer itself.
    """

    def __init__(self, buffer: Tensor) -> None:
        """Args: buffer: one dimension."""
        self.buffer = buffer
        self._stages = [_Stage(buffer) for _ in range(_NUM_STAGES if buffer.is_cuda else 1)]

    def open(self) -> Any:
        """The memory to fill, as an array of the buffer's size; it holds old values."""
        self._stages.append(self._stages.pop(0))
        return self._stages[-1].open()

    def send(self, count: int | None = None) -> None:
        """Copy what was filled, or its first `count` elements, on the current stream."""
        self._stages[-1].send(count)


class _Stage:
    """Host memory for `target`; on the CPU the target's own."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned, self._sent = target, None
        if target.is_cuda:
            self._pinned = pinned_like(target).zero_()
            self._sent = torch.cuda.Event()
        self._host = self._pinned.numpy()

    def open(self) -> Any:
        """The memory as an array, once its last copy has run."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host

    def send(self, count: int | None) -> None:
        if self._sent is not None:
            self._target[:count].copy_(self._pinned[:count], non_blocking=True)
            # the current device need not be the target's
            self._sent.record(torch.cuda.current_stream(self._target.device))


def pinned_like(tensor: Tensor) -> Tensor:
    """Pinned host memory for copies to or from a tensor on a CUDA device.

    It is asked for on that device: torch would else open a context on the current one.
    """
    with torch.cuda.device(tensor.device):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
