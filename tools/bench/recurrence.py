"""The time of cached_recurrence by rows of a step: `python -m tools.bench.recurrence`.

A step of S rows first takes again the drafts that the step before accepted.  The layers' states
take turns, as in a model, so that each call finds its own outside the caches where they are many.
Times are the process's CPU time, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compilespec.ops import cached_recurrence
from tools.bench.measure import quantiles

NUM_CALLS, NUM_WARM = 120, 12


@dataclass(frozen=True)
class Shape:
    """A gated delta rule's heads, and how many layers a model has of it."""

    name: str
    heads: int
    key_heads: int
    dim: int
    num_layers: int


SHAPES = (Shape("Qwen3-Next", 32, 16, 128, 36), Shape("small", 8, 8, 64, 9))
STEPS = ((1, 0), (4, 0), (4, 1), (4, 3))  # rows, and accepted drafts of the step before


def make_call(shape: Shape, batch: int, rows: int, accepted: int) -> Callable[[], object]:
    """A step of a batch as a function; every call is that of the next layer."""
    size, dim = (batch, rows), shape.dim
    query, key = (
        F.normalize(torch.randn(*size, shape.key_heads, dim), dim=-1).bfloat16() for _ in "qk"
    )
    value = torch.randn(*size, shape.heads, dim).bfloat16()
    decay = -0.01 * torch.rand(*size, shape.heads)  # slow: nothing may become denormal
    beta = torch.rand(*size, shape.heads).bfloat16()
    width = shape.key_heads * dim + shape.heads * (dim + 2)
    # No more layers than 600 MB of states.
    num_layers = min(shape.num_layers, 600_000_000 // (4 * batch * shape.heads * dim**2))
    layers = itertools.cycle([
        (torch.randn(batch, shape.heads, dim, dim), -0.01 * torch.rand(batch, 3, width))
        for _ in range(num_layers)
    ])  # fmt: skip
    row = torch.arange(batch, dtype=torch.int32)[:, None].expand(size)
    position = 100 + torch.arange(rows, dtype=torch.int32).expand(size)
    absorbed = (position[:, :1] - accepted).expand(size)
    commits = torch.arange(rows).expand(size) == 0

    def call() -> object:
        state, recent = next(layers)
        return cached_recurrence(
            query, key, value, decay, beta, state, recent, row, position, absorbed, commits, "",
        )  # fmt: skip

    return call


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of CPU time a call."""
    samples = []
    for i in range(NUM_WARM + NUM_CALLS):
        begin = time.process_time_ns()
        call()
        if i >= NUM_WARM:
            samples.append((time.process_time_ns() - begin) / 1e3)
    return quantiles(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in SHAPES:
        for batch in options.batch:
            for rows, accepted in STEPS:
                us = measure(make_call(shape, batch, rows, accepted))
                print(
                    f"{shape.name}, batch {batch}, {rows} rows after {accepted} accepted drafts: "
                    f"p20 {us['p20']:.0f} us, p50 {us['p50']:.0f} us"
                )


if __name__ == "__main__":
    main()
