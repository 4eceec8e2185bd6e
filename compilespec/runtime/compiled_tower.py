"""An image tower compiled for images of one size, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from compilespec import _torch_compat
from compilespec.errors import NotSupported
from compilespec.lowering.calls import compile_call
from compilespec.progress import Reporter, Step
from compilespec.tracing.capture import trace_call
from compilespec.tracing.images import image_shape, media_rows
from compilespec.tracing.media import IMAGES

BATCH_SIZES = (4, 1)  # images of one call: a graph each, so that no call is padded

Call = Callable[[Tensor], Tensor]


class CompiledTower:
    """Makes rows of images [n, *shape], n one of `BATCH_SIZES`; compiles nothing more.

    Args:
        calls: by n.
    """

    def __init__(self, shape: tuple[int, int, int], calls: Mapping[int, Call]) -> None:
        self._shape, self._calls = shape, dict(calls)
        self.num_recompiles = 0  # graphs compiled since; above 0 it is a fault

    def takes(self, inputs: Mapping[str, Tensor]) -> bool:
        """True where these are images of its size, and pixels alone."""
        shapes = {name: tuple(value.shape[1:]) for name, value in inputs.items()}
        return shapes == {IMAGES.main: self._shape}

    def rows(self, pixels: Tensor) -> list[Tensor]:
        """[n, D] of each image."""
        before = _torch_compat.count_compilations()
        rows = self._calls[len(pixels)](pixels)
        self.num_recompiles += _torch_compat.count_compilations() - before
        return list(rows)

    def describe(self) -> str:
        sizes = " x ".join(map(str, self._shape))
        counts = " or ".join(map(str, sorted(self._calls)))
        return f"compiled for images of {sizes}, {counts} at a time; others run in eager mode"


@torch.no_grad()
def compile_tower(model: nn.Module, progress: Reporter) -> CompiledTower:
    """Compile the tower for images whose number of rows follows from the model's config.

    Raises: NotSupported (images of many sizes, or other inputs than pixels), TraceError.
    """
    shape = image_shape(model)
    if shape is None:
        raise NotSupported("its inputs have no one size: a graph for each would have no end")
    calls = {}
    for number, size in enumerate(BATCH_SIZES, 1):
        what = f"image tower, {size} at a time"
        with progress.step("compile", what, index=number, total=len(BATCH_SIZES)) as step:
            calls[size] = _compile(model, (size, *shape), step)
    return CompiledTower(shape, calls)


def _compile(model: nn.Module, shape: tuple[int, ...], step: Step) -> Call:
    parameter = next(model.parameters())
    example = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

    def rows_of(pixel_values: Tensor) -> Tensor:
        return torch.stack(media_rows(model, IMAGES, {IMAGES.main: pixel_values}))

    try:
        count = len(rows_of(example))  # a first call also installs the model's own hooks
    except Exception as error:  # models raise any error
        why = (str(error).splitlines() or ["no message"])[0]
        raise NotSupported(f"it takes more than pixels ({why})") from error
    if count != shape[0]:
        raise NotSupported(f"{shape[0]} images give the rows of {count}")
    traced = trace_call(model, rows_of, {"pixel_values": (example, ())}, name="tower")
    call = compile_call(traced, {"pixel_values": example}, step)

    def run(pixels: Tensor) -> Tensor:
        (rows,) = call(*traced.bind(pixel_values=pixels))
        return rows

    return run
