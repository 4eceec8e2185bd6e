"""Times of single steps on the device and the host, and what the device reaches at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tools.bench.measure import quantiles

NUM_WARM = 3
_MOST_KERNELS = 24
_CYCLES_PER_S = 2e9  # of a GPU's clock, at most


def copy_bytes_per_s(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """Bytes read and written per second by a large copy: the best that memory achieves."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = [device_ms(lambda: target.copy_(source), device) for _ in range(repeats + NUM_WARM)]
    return 2 * num_bytes / (quantiles(times[NUM_WARM:])["p50"] / 1e3)


def mm_tflop_per_s(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 10) -> float:
    """10^12 operations per second of a product of two square matrices."""
    a_DD, b_DD = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = [device_ms(lambda: a_DD @ b_DD, device) for _ in range(repeats + NUM_WARM)]
    return 2 * size**3 / (quantiles(times[NUM_WARM:])["p50"] / 1e3) / 1e12


def device_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that a call keeps the device busy; wall time on the CPU.

    The device is busy with other work until the host has launched all: it does not wait for the
    host between the two events.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()  # the host takes as long for the next one
    host_s = time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * host_s * _CYCLES_PER_S))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def time_steps(
    launch: Callable[[], Any], collect: Callable[[Any], Any], device: torch.device, count: int
) -> dict[str, Any]:
    """Times of `count` steps, each launched before the previous one is read, as in the engine.

    Returns: wall ms per step (quantiles), device ms per step, host microseconds per launch, and the
    share of the time in which the device waits.
    """
    for _ in range(NUM_WARM):
        collect(launch())
    busy = [device_ms(launch, device) for _ in range(count)]
    host_us, wall_ms = [], []
    pending = launch()
    mark = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        following = launch()
        host_us.append((time.perf_counter() - start) * 1e6)
        collect(pending)
        pending = following
        now = time.perf_counter()
        wall_ms.append((now - mark) * 1e3)
        mark = now
    collect(pending)
    device_p50, wall_p50 = quantiles(busy)["p50"], quantiles(wall_ms)["p50"]
    return {
        "step_ms": quantiles(wall_ms),
        "device_ms": quantiles(busy),
        "host_us": quantiles(host_us),
        "idle_share": max(0.0, 1 - device_p50 / wall_p50),
    }


def one_launch(launch: Callable[[], Any], device: torch.device) -> dict[str, Any] | None:
    """A step by the profiler; None on the CPU.

    Returns: driver calls that submit work, by name; the kernels that took longest, with how often
    they ran and their microseconds on the device, together; and the microseconds of all.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        launch()
        torch.cuda.synchronize(device)
    events = trace.key_averages()
    wanted = ("Launch", "cudaMemcpy", "cuMemcpy")
    on_device = sorted(
        ((e.key, e.count, e.self_device_time_total) for e in events if e.self_device_time_total),
        key=lambda event: -event[2],
    )
    return {
        "launches": {e.key: e.count for e in events if any(w in e.key for w in wanted)},
        "kernels": [(name[:90], count, us) for name, count, us in on_device[:_MOST_KERNELS]],
        "all_us": sum(us for *_, us in on_device),
    }
