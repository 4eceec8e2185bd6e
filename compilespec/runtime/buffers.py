"""Memory of a program's persistent buffers."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from compilespec.ops.device import traits_of
from compilespec.program import BufferSpec
from compilespec.runtime.mapped_pages import MADV_DONTNEED, advise

MAPPED = 2**20  # bytes: zero buffers of this size and more are mapped lazily


def allocate(spec: BufferSpec, device: torch.device) -> Tensor:
    """A buffer of the spec's shape, dtype and strides, filled as it says.

    Large zero buffers on the CPU are mapped lazily, so the KV cache uses memory only as it fills,
    and a start does not wait for its zeros.  The pages are small where the system allows that
    choice: a request's first tokens touch two pages for each head of each layer, which may be
    gigabytes of huge pages.
    """
    if traits_of(device).is_cpu and spec.fill == 0 and spec.num_bytes >= MAPPED:
        pages = mmap.mmap(-1, spec.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # Linux with huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        flat = torch.frombuffer(pages, dtype=torch.uint8).view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides)
    return spec.empty(device).fill_(spec.fill)


def release(buffer: Tensor, fill: int = 0) -> int:
    """Fill a buffer of the CPU anew.  The pages of one that `allocate` mapped go back to the
    system instead, which gives zeros where they are read again; its address stays.

    Returns: the bytes that went back.
    """
    storage = buffer.untyped_storage()
    size = storage.nbytes()
    if size >= MAPPED and fill == 0 and advise(storage.data_ptr(), size, MADV_DONTNEED):
        return size
    buffer.fill_(fill)
    return 0
