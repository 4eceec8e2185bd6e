"""Memory of a program's persistent buffers."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from compilespec.program import BufferSpec

MAPPED = 2**20  # bytes: from this size on, zeros on the CPU are the system's untouched pages


def allocate(spec: BufferSpec, device: torch.device) -> Tensor:
    """A buffer of the spec's shape, dtype and strides, filled as it says.

    Large buffers of zeros on the CPU take no memory until they are written, page by page: a KV
    cache is resident as far as requests have filled it, and a start does not wait for its zeros.
    The pages are small wherever the system lets one say so: a request's first tokens touch two for
    each head of each layer, which may be gigabytes in huge ones.
    """
    if device.type == "cpu" and spec.fill == 0 and spec.num_bytes >= MAPPED:
        pages = mmap.mmap(-1, spec.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # of Linux, where it has huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        flat = torch.frombuffer(pages, dtype=torch.uint8).view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides)
    return spec.empty(device).fill_(spec.fill)
