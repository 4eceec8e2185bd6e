"""The limits of a device: memory bandwidth and arithmetic, published or measured once."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.ops._build import cache_directory

_COPY_BYTES = 2**28  # far more than caches hold
_MATMUL_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """The two limits of a roofline."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bytes_per_s / 1e9:.4g} GB/s, {self.flops_per_s / 1e12:.4g} TFLOP/s"
        )


# NVIDIA's data sheet: 4.8 TB/s; dense tensor-core rates, float32 without tensor cores.
_H200_FLOPS = {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12}
DEVICES = ("h200", "cpu")


def find_device(
    name: str,
    dtype: torch.dtype,
    *,
    bytes_per_s: float | None = None,
    flops_per_s: float | None = None,
) -> Device:
    """A device by name; either limit may be given instead.  Given limits are not measured.

    Raises: InvalidOption for an unknown device, or a dtype that it has no figure for.
    """
    if name not in DEVICES:
        raise not_one_of("roofline", name, DEVICES)
    if bytes_per_s is None or flops_per_s is None:
        known = _measured_cpu(dtype) if name == "cpu" else _h200(dtype)
        bytes_per_s, flops_per_s = bytes_per_s or known[0], flops_per_s or known[1]
    return Device(name=name, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)


def _h200(dtype: torch.dtype) -> tuple[float, float]:
    if dtype not in _H200_FLOPS:
        raise InvalidOption(f"no rate is known for {dtype} on an H200; give --flops")
    return 4.8e12, _H200_FLOPS[dtype]


def _measured_cpu(dtype: torch.dtype) -> tuple[float, float]:
    """This machine's limits, measured once: `cpu.json` of the cache directory keeps them."""
    path = cache_directory() / "cpu.json"
    capability = torch.backends.cpu.get_cpu_capability()
    key = f"{platform.processor()} {capability} {torch.get_num_threads()} {dtype}"
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = measure_cpu(dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1))
    bandwidth, flops = known[key]
    return bandwidth, flops


def measure_cpu(dtype: torch.dtype) -> tuple[float, float]:
    """(bytes/s of a copy, bytes read and written counted; FLOP/s of a square product)."""
    source = torch.zeros(_COPY_BYTES // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    copy_s = _best_of(5, lambda: target.copy_(source))
    product_s = _best_of(5, lambda: left @ left)
    return 2 * _COPY_BYTES / copy_s, 2 * _MATMUL_SIZE**3 / product_s


def _best_of(count: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest of `count` calls, after one that is not timed."""
    call()
    best = float("inf")
    for _ in range(count):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
