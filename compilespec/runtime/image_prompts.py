"""Prompts with images or sound: token ids in which rows stand for placeholders."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidRequest, NotSupported, SpecError
from compilespec.runtime.compiled_tower import CompiledTower
from compilespec.runtime.executor import Geometry
from compilespec.runtime.given_rows import GivenRows, RopeOffsets
from compilespec.runtime.image_features import Image, ImageTower, split_images
from compilespec.runtime.image_inputs import belongs, process
from compilespec.runtime.prompts import read_prompt
from compilespec.tracing.images import (
    has_own_masks,
    has_prefixes,
    masks_agree,
    rope_module,
    tokens_ahead,
)
from compilespec.tracing.media import Medium


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPrompt:
    """The parts of a request, for a prompt of any form."""

    ids: tuple[int, ...]
    rows: GivenRows | None = None
    content_ids: tuple[int, ...] = ()  # the content at each position; empty: the ids
    ahead: tuple[int, ...] = ()  # the number of later tokens that each sees; empty: none
    rope: RopeOffsets | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePrompt:
    """A prompt with images, processed and checked; the images are not encoded yet."""

    ids: tuple[int, ...]
    inputs: Mapping[str, Any]  # the processor's output, by name
    images: tuple[Image, ...]


class ImageReader:
    """Reads the prompts with images of one model.  Works from any thread.

    Args:
        model: the target.
        medium: the medium of its prompts.
        processor: transformers' processor of it; None: prompts are outputs of one.
        compiled: its tower, for images of one size; None: the tower runs in eager mode.
    """

    def __init__(
        self,
        model: nn.Module,
        medium: Medium,
        processor: Any,
        geometry: Geometry,
        compiled: CompiledTower | None = None,
    ) -> None:
        self._name, self._processor, self._geometry = type(model).__name__, processor, geometry
        self._medium, self._placeholder = medium, medium.token_id(model)
        self._rope = rope_module(model)
        self._masked = model if has_own_masks(model) else None
        self._by_types = self._masked is not None and has_prefixes(model)
        self._is_clear = self._masked is None or masks_agree(model)
        self._tower, self._compiled = ImageTower(model, medium, compiled), compiled

    @property
    def num_recompiles(self) -> int:
        """Graphs that the compiled tower compiled while serving; always 0."""
        return 0 if self._compiled is None else self._compiled.num_recompiles

    def prepare(self, prompt: Any) -> ImagePrompt:
        """Process and check a prompt.

        Raises: InvalidRequest (no processor, input that it refuses, several rows, no images, NaN,
            and the errors of other prompts), NotSupported (videos).
        """
        if isinstance(prompt, ImagePrompt):
            return prompt
        inputs = process(prompt, self._processor, self._medium)
        ids = read_prompt(
            {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs},
            None,
            self._geometry,
        )
        given = {name: value for name, value in inputs.items() if belongs(name, self._medium)}
        return ImagePrompt(ids=ids, inputs=inputs, images=split_images(given, self._medium))

    def encode(self, prompts: Sequence[ImagePrompt]) -> None:
        """Encode the images of several prompts together; those that cannot be are left to `read`,
        which says why.
        """
        self._tower.encode([image for prompt in prompts for image in prompt.images])

    def read(self, prompt: Any) -> ReadPrompt:
        """Encode a prompt's images and put their rows where their placeholders stand.

        Raises: as `prepare`; InvalidRequest (more or fewer rows than placeholders, of another
            width, or images that the tower cannot take), NotSupported (features of several layers).
        """
        ready = self.prepare(prompt)
        rows = self._tower.features(ready.images)
        places = [place for place, token in enumerate(ready.ids) if token == self._placeholder]
        counts = [len(one) for one in rows]
        self._check(rows, len(places), sum(counts))
        contents = [
            _content(image.key, number)
            for image, count in zip(ready.images, counts, strict=True)
            for number in range(count)
        ]
        content_ids = list(ready.ids)
        for place, content in zip(places, contents, strict=True):
            content_ids[place] = content
        ahead = self._ahead(ready)
        for place, count in enumerate(ahead):  # the tokens seen ahead are part of a token's content
            if count:
                seen = content_ids[place : place + count + 1]
                content_ids[place] = _content(array("q", seen).tobytes(), 0)
        return ReadPrompt(
            ids=ready.ids,
            rows=GivenRows(places=places, rows=torch.cat(rows)),
            content_ids=tuple(content_ids),
            ahead=ahead,
            rope=self._offsets(ready),
        )

    def _check(self, rows: Sequence[Tensor], num_places: int, num_rows: int) -> None:
        width = (self._geometry.embeds_width or 0) + self._geometry.deep_width
        if bad := next((one for one in rows if one.shape[-1] != width), None):
            raise InvalidRequest(
                f"{self._name} makes rows of width {bad.shape[-1]}: expected {width}, the "
                "target's; the checkpoint's projector belongs to another model"
            )
        if num_rows != num_places:
            one = self._medium.one
            images = f"{one} has" if len(rows) == 1 else f"{one}s have"
            raise InvalidRequest(
                f"the prompt's {len(rows)} {images} {num_rows} rows and it has {num_places} "
                f"placeholders (id {self._placeholder}): expected one for each row; name every "
                f"{one} once in the prompt, and let the model's processor write the placeholders"
            )

    def _ahead(self, prompt: ImagePrompt) -> tuple[int, ...]:
        if self._masked is None:
            return ()
        if not self._is_clear:
            raise NotSupported(
                f"{self._name}: its forward and its create_masks_for_generate differ in what "
                "tokens of an image see: expected the same masks; give text alone, or a version "
                "of transformers where they agree"
            )
        types = prompt.inputs.get("token_type_ids")
        own = None if self._by_types else self._types(prompt)
        if types is not None:
            own = torch.as_tensor(types).flatten().tolist()
        with self._placed_by("create_masks_for_generate"):
            ahead = tokens_ahead(self._masked, own, len(prompt.ids))
        sizes = self._geometry
        room = sizes.config.max_prefill_tokens - sizes.reach.num_repeated_tokens
        if max(ahead) >= room:
            raise InvalidRequest(
                f"tokens of the prompt see each other, {max(ahead) + 1} of them: expected at "
                f"most {room}, for a call; compile with a larger max_prefill_tokens"
            )
        return tuple(ahead)

    @contextlib.contextmanager
    def _placed_by(self, function: str) -> Iterator[None]:
        try:
            yield
        except SpecError:
            raise
        except Exception as error:  # models raise any error for images that do not fit
            why = (str(error).splitlines() or ["no message"])[0]
            raise InvalidRequest(
                f"{self._name}.{function} refuses the prompt ({type(error).__name__}: {why}): "
                "expected text between any two images, as the model's processor writes it"
            ) from error

    def _types(self, prompt: ImagePrompt) -> list[int]:
        return [int(token == self._placeholder) for token in prompt.ids]

    def _offsets(self, prompt: ImagePrompt) -> RopeOffsets | None:
        """Source: transformers' `get_rope_index`, whose positions count from 0 for each axis."""
        if self._rope is None:
            return None
        ids = torch.tensor([prompt.ids])
        types = torch.tensor([self._types(prompt)])
        grids = {name: value for name, value in prompt.inputs.items() if name.endswith("_thw")}
        with self._placed_by("get_rope_index"):
            positions, delta = self._rope.get_rope_index(ids, mm_token_type_ids=types, **grids)
        own = torch.arange(len(prompt.ids))
        return RopeOffsets(of_prompt=(positions[:, 0] - own).tolist(), after=int(delta.item()))


def _content(key: bytes, number: int) -> int:
    """A negative number for a row of an image."""
    digest = hashlib.blake2b(key + number.to_bytes(8, "little"), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "little") >> 1)
