"""GPUs that are not there: what torch, Inductor and Triton ask of a device before they compile."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """An architecture, and the sizes that bound a kernel on it."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    most_shared: int
    """Bytes of shared memory that a program may ask for."""
    l2_bytes: int
    memory_bytes: int
    most_threads: int = 2048
    """Threads of a multiprocessor."""

    @property
    def target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    @property
    def properties(self) -> Any:
        """What `torch.cuda.get_device_properties` gives."""
        major, minor = self.capability
        return types.SimpleNamespace(
            name=self.name, major=major, minor=minor, warp_size=32,
            multi_processor_count=self.num_multiprocessors, regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=self.most_threads, max_threads_per_block=1024,
            total_memory=self.memory_bytes, shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=self.most_shared,
            shared_memory_per_multiprocessor=self.most_shared + 1024,
            L2_cache_size=self.l2_bytes, gcnArchName="", is_integrated=0, uuid="GPU-0",
            clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
        )  # fmt: skip


GPUS = {
    "sm_90": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        num_multiprocessors=132,
        most_shared=227 * 1024,
        l2_bytes=50 << 20,
        memory_bytes=80 << 30,
    ),
    "sm_80": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        num_multiprocessors=108,
        most_shared=163 * 1024,
        l2_bytes=40 << 20,
        memory_bytes=80 << 30,
    ),
    "sm_86": Gpu(
        name="NVIDIA GeForce RTX 3090",
        capability=(8, 6),
        num_multiprocessors=82,
        most_shared=99 * 1024,
        l2_bytes=6 << 20,
        memory_bytes=24 << 30,
        most_threads=1536,
    ),
    "sm_89": Gpu(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        num_multiprocessors=128,
        most_shared=99 * 1024,
        l2_bytes=72 << 20,
        memory_bytes=24 << 30,
        most_threads=1536,
    ),
    "sm_100": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        num_multiprocessors=148,
        most_shared=227 * 1024,
        l2_bytes=126 << 20,
        memory_bytes=180 << 30,
    ),
    "sm_120": Gpu(
        name="NVIDIA GeForce RTX 5090",
        capability=(12, 0),
        num_multiprocessors=170,
        most_shared=99 * 1024,
        l2_bytes=96 << 20,
        memory_bytes=32 << 30,
        most_threads=1536,
    ),
}


class Driver:
    """The part of a Triton driver that compiling asks for."""

    binary_ext = "cubin"

    def __init__(self, gpu: Gpu, device: str = "cuda:0") -> None:
        self._gpu, self._device = gpu, torch.device(device)

    def get_current_target(self) -> GPUTarget:
        return self._gpu.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return self._device

    def get_device_interface(self) -> Any:
        return torch.cuda
