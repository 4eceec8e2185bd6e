"""The fastest layout of a weight for 1 to 48 rows, by shape: the basis of `prepack_linears`.

    python -m tools.bench.layouts              written to results/layouts.json

Every layout of `compilespec.ops.quantized_linear.LAYOUTS` that may hold a kind of weight, on the
shapes of a model of width 768: microseconds of one product, by turns, over more copies of the
weight than fit in a cache.  Outputs are compared with the float32 product first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec.ops.quantized_linear import LAYOUTS
from tools.bench import report

SHAPES = ((2304, 768), (768, 768), (6144, 768), (768, 3072), (32000, 768))  # N, K
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 48)
GROUP = 128  # input features that share a scale in int4
BASE = "bfloat16 panels"
FEW_ROWS = 6  # rows of one request, the main criterion for a layout


@dataclass(frozen=True, kw_only=True)
class Way:
    """One layout of one kind of weight."""

    name: str
    kind: str  # weights of one kind hold the same numbers
    call: Callable[[Tensor, int], Tensor]  # x, which copy
    weight: Tensor  # [N, K], in float32
    num_bytes: int
    tolerance: float = 1e-2  # of bfloat16 results; activations of 8 bits are coarser


def ways(shape: tuple[int, int], total_bytes: int) -> Iterator[Way]:
    """Each layout, with as many copies of a weight as fill `total_bytes`."""
    ops = torch.ops.compilespec
    outputs, depth = shape
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(shape, generator=generator) / depth**0.5

    def copies(packed: Tensor) -> list[Tensor]:
        return [packed.clone() for _ in range(max(1, total_bytes // packed.nbytes))]

    def quantized(name: str, ints: Tensor, scale_NG: Tensor, layout: str) -> Way:
        packed, scale = copies(LAYOUTS[layout](ints)), LAYOUTS["scale"](scale_NG)
        spread = scale_NG.repeat_interleave(depth // scale_NG.shape[1], 1)
        is_dynamic = layout == "quads"
        op = ops.packed_dynamic_int8_linear if is_dynamic else ops.packed_quantized_linear
        return Way(
            name=f"{name} {layout}", kind=name, weight=ints.float() * spread,
            call=lambda x, i: op(x, packed[i % len(packed)], scale, None, outputs),
            num_bytes=packed[0].nbytes, tolerance=5e-2 if is_dynamic else 1e-2,
        )  # fmt: skip

    def floating(dtype: torch.dtype) -> Way:
        panels = copies(LAYOUTS["panels"](plain.to(dtype)))
        name = str(dtype).removeprefix("torch.")
        return Way(
            name=f"{name} panels", kind=name, weight=plain.to(dtype).float(),
            call=lambda x, i: ops.packed_linear(
                x.to(dtype), panels[i % len(panels)], None, outputs
            ),
            num_bytes=panels[0].nbytes,
        )  # fmt: skip

    yield floating(torch.bfloat16)
    yield floating(torch.float32)
    largest = plain.abs().amax(1, keepdim=True)
    eight = (plain / largest * 127).round().to(torch.int8)
    yield quantized("int8", eight, largest / 127, "bytes")
    yield quantized("int8 dynamic", eight, largest / 127, "quads")
    yield quantized("float8", (plain / largest * 448).to(torch.float8_e4m3fn), largest / 448,
                    "bytes")  # fmt: skip
    groups = plain.view(outputs, depth // GROUP, GROUP).abs().amax(2)
    four = (plain / groups.repeat_interleave(GROUP, 1) * 7).round().to(torch.int8)
    for layout in ("int4", "bytes"):
        yield quantized("int4", four, groups / 7, layout)


def check(way: Way, x: Tensor) -> None:
    """Raises: AssertionError if the product is wrong; then no time is reported."""
    want = x.float() @ way.weight.T
    error = float((way.call(x, 0).float() - want).abs().max() / want.abs().max())
    assert error < way.tolerance, f"{way.name}: off by {error:.1e} of the largest output"


def measure(shape: tuple[int, int], rounds: int, total_bytes: int) -> list[dict[str, Any]]:
    """Microseconds of a product in every layout, by number of rows."""
    found = list(ways(shape, total_bytes))
    results = []
    for count in ROWS:
        x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        times: dict[str, list[float]] = {way.name: [] for way in found}
        for way in found:
            check(way, x)
        number = max(1, total_bytes // found[0].num_bytes)
        for turn in range(rounds):
            for way in found[turn % len(found) :] + found[: turn % len(found)]:
                start = time.perf_counter()
                for copy in range(number):
                    way.call(x, copy)
                times[way.name].append((time.perf_counter() - start) / number * 1e6)
        for way in found:
            ratios = [b / o for b, o in zip(times[BASE], times[way.name], strict=True)]
            results.append(
                {
                    "layout": way.name, "kind": way.kind, "outputs": shape[0], "inputs": shape[1],
                    "rows": count, "us": statistics.median(times[way.name]),
                    "weight_bytes": way.num_bytes, "ratio_to_bf16": statistics.median(ratios),
                }
            )  # fmt: skip
    return results


def print_table(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table(title="one product: times as fast as bfloat16 panels (paired medians)")
    for column in ("layout", "N x K", *(f"{count} rows" for count in ROWS)):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for name in dict.fromkeys(row["layout"] for row in results):
        for outputs, inputs in SHAPES:
            own = [
                f"{row['ratio_to_bf16']:.2f}"
                for row in results
                if (row["layout"], row["outputs"], row["inputs"]) == (name, outputs, inputs)
            ]
            if own:
                table.add_row(name, f"{outputs} x {inputs}", *own)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if int4 in bytes is faster than packed int4 at few rows, for most shapes."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.layouts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=96, help="size of the copies of a weight")
    parser.add_argument("--name", default="layouts", help="results/NAME.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = []
    for shape in SHAPES:
        results += measure(shape, options.rounds, options.megabytes << 20)
    print_table(console, results)
    content = {
        "benchmark": "layouts", **report.environment(), "options": vars(options),
        "products": results,
    }  # fmt: skip
    console.print(f"written to {report.write_json(options.name, content)}")
    by_layout = {
        (row["layout"], row["outputs"], row["inputs"], row["rows"]): row["us"] for row in results
    }
    lost = [
        shape
        for shape in SHAPES
        for count in ROWS
        if count <= FEW_ROWS
        and by_layout["int4 bytes", *shape, count] < by_layout["int4 int4", *shape, count]
    ]
    return int(2 * len(lost) > len(SHAPES) * sum(count <= FEW_ROWS for count in ROWS))


if __name__ == "__main__":
    sys.exit(main())
