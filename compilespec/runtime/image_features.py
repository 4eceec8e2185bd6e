"""The rows of images or sounds: the target's tower, and a cache of its results."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidRequest, NotSupported, SpecError
from compilespec.runtime.compiled_tower import BATCH_SIZES, CompiledTower
from compilespec.tracing.images import media_rows
from compilespec.tracing.media import IMAGES, Medium

CACHE_BYTES = 256 * 1024 * 1024
BATCH = 16  # images of one call of the tower, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """One image as the tower takes it, or one window of a sound."""

    inputs: Mapping[str, Tensor]  # by argument of the tower, along the first dimension
    key: bytes  # of its content

    @property
    def form(self) -> tuple[Any, ...]:
        """The form of an image; images of one form can be encoded together."""
        return tuple((name, value.dtype, value.shape[1:]) for name, value in self.inputs.items())


def split_images(given: Mapping[str, Any], medium: Medium = IMAGES) -> tuple[Image, ...]:
    """A processor's output, cut into its images or windows of sound.

    Pixels have a row an image, or, beside a grid of patches for each image (`image_grid_thw`), a
    row a patch.
    Raises: InvalidRequest (no tensors, NaN, or sizes that do not belong together).
    """
    tensors = {name: _tensor(name, value) for name, value in given.items()}
    if medium.main not in tensors:
        raise InvalidRequest(
            f"the prompt has {', '.join(tensors) or f'no {medium.one}'} and no {medium.main}: "
            "expected all that the model's processor returned"
        )
    pixels, grid = tensors[medium.main], tensors.get("image_grid_thw")
    count = len(pixels) if grid is None else len(grid)
    sizes = [1] * count if grid is None else [int(one) for one in grid.prod(-1)]
    for name, value in tensors.items():
        wanted = sum(sizes) if value is pixels else count
        if len(value) != wanted or not count:
            raise InvalidRequest(
                f"{name} has {len(value)} rows: expected {wanted}, for {count} {medium.one}s; give "
                "all that the model's processor returned for this prompt alone"
            )
    parts = {name: value.split(sizes if value is pixels else 1) for name, value in tensors.items()}
    return tuple(
        _image({name: part[index] for name, part in parts.items()}) for index in range(count)
    )


def _tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name} is a {type(value).__name__} and no tensor: call the processor with "
            'return_tensors="pt"'
        ) from error
    if tensor.dim() == 0:
        raise InvalidRequest(f"{name}: expected a row for each image, got one number")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise InvalidRequest(f"{name} holds NaN or infinity: expected finite numbers")
    return tensor.detach().cpu()


def _image(inputs: Mapping[str, Tensor]) -> Image:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return Image(inputs=inputs, key=digest.digest())


class ImageTower:
    """Encodes images with the target's tower, and remembers the newest rows.  Works from any
    thread, one call at a time.

    Args:
        compiled: encodes images of its size; all others, in eager mode, the model.
    """

    def __init__(
        self,
        model: nn.Module,
        medium: Medium = IMAGES,
        compiled: CompiledTower | None = None,
        max_bytes: int = CACHE_BYTES,
    ) -> None:
        self._model, self._medium, self._compiled = model, medium, compiled
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._most = BATCH  # images of a call; 1 where the tower does not separate their rows

    def features(self, images: Sequence[Image]) -> list[Tensor]:
        """The rows of each image, [n, D], on the CPU.

        Raises: InvalidRequest where the tower does not take them, NotSupported where it gives other
            features than rows among the embeddings.
        """
        with self._lock:
            found = {image.key: self._find(image) for image in images}
            missing = [image for image in _distinct(images) if found[image.key] is None]
            for batch in self._batches(missing):
                found |= self._encode(batch)
            return [rows for image in images if (rows := found[image.key]) is not None]

    def encode(self, images: Sequence[Image]) -> None:
        """Encode and remember images of many prompts in as few calls as their forms allow; after a
        failed call, `features` tries again.
        """
        with self._lock:
            missing = [image for image in _distinct(images) if image.key not in self._known]
            for batch in self._batches(missing):
                try:
                    self._encode(batch)
                except (InvalidRequest, NotSupported):
                    continue

    def _batches(self, images: Sequence[Image]) -> Iterator[list[Image]]:
        """Images of one form together, up to the size of a call."""
        by_form: dict[tuple[Any, ...], list[Image]] = {}
        for image in images:
            by_form.setdefault(image.form, []).append(image)
        for group in by_form.values():
            is_compiled = self._compiled is not None and self._compiled.takes(group[0].inputs)
            while group:
                sizes = BATCH_SIZES if is_compiled else range(self._most, 0, -1)
                size = next(size for size in sizes if size <= len(group))
                yield group[:size]
                group = group[size:]

    def _find(self, image: Image) -> Tensor | None:
        if image.key in self._known:
            self._known.move_to_end(image.key)
        return self._known.get(image.key)

    def _encode(self, batch: Sequence[Image]) -> dict[bytes, Tensor]:
        rows = [one.to("cpu", copy=True).contiguous() for one in self._run(batch)]
        made = {image.key: one for image, one in zip(batch, rows, strict=True)}
        self._known |= made
        while sum(one.nbytes for one in self._known.values()) > self._max_bytes:
            self._known.popitem(last=False)
        return made

    @torch.no_grad()
    def _run(self, batch: Sequence[Image]) -> list[Tensor]:
        parameter = next(self._model.parameters())
        inputs = {}
        for name in batch[0].inputs:
            value = torch.cat([image.inputs[name] for image in batch]).to(parameter.device)
            inputs[name] = value.to(parameter.dtype) if value.is_floating_point() else value
        name = f"{type(self._model).__name__}.{self._medium.features}"
        try:
            if self._compiled is not None and self._compiled.takes(batch[0].inputs):
                found = self._compiled.rows(inputs[self._medium.main])
            else:
                found = media_rows(self._model, self._medium, inputs)
        except SpecError:
            raise
        except Exception as error:  # models raise any error for sizes that they refuse
            why = (str(error).splitlines() or ["no message"])[0]
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in inputs.items())
            raise InvalidRequest(
                f"{name} refuses {shapes} ({type(error).__name__}: {why}); give "
                "what the model's own processor returns"
            ) from error
        if not all(torch.isfinite(one).all() for one in found):
            raise InvalidRequest(
                f"{name} gave NaN or infinity: expected finite rows; check what it was given, or "
                "take a wider dtype"
            )
        if len(batch) == 1:  # which may be several tiles
            return [torch.cat(found)]
        if len(found) != len(batch):  # their images are unknown
            self._most = 1
            return [rows for image in batch for rows in self._run([image])]
        return found


def _distinct(images: Iterable[Image]) -> list[Image]:
    return list({image.key: image for image in images}.values())
