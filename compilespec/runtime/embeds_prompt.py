"""Prompts as embeddings, in place of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.errors import InvalidRequest
from compilespec.runtime.executor import Geometry

PLACEHOLDER = 0  # the id of a position without one


@dataclass(frozen=True, kw_only=False, eq=False)
class EmbedsPrompt:
    """A prompt of embeddings: the target's own embeddings of tokens, or other rows of that width,
    such as an image's.
    """

    embeds_TD: Tensor
    """One row a position, floats, as transformers' `inputs_embeds`."""

    token_ids: Sequence[int] | None = None
    """The ids at these positions for drafters, penalties and the output's `prompt_token_ids`; None:
    id 0 everywhere.
    """


def read_embeds(prompt: EmbedsPrompt, geometry: Geometry) -> Tensor:
    """The rows of a prompt, checked: a copy on the CPU.

    Raises: InvalidRequest (an engine without them, no matrix of floats, another width, no rows, NaN
        or infinity).
    """
    width, embeds = geometry.embeds_width, prompt.embeds_TD
    if width is None:
        raise InvalidRequest(
            "EmbedsPrompt needs an engine that was compiled with prompt_embeds=True"
        )
    is_matrix = isinstance(embeds, Tensor) and embeds.dim() == 2 and embeds.is_floating_point()
    if not is_matrix or embeds.shape[1] != width or not len(embeds):
        got = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, Tensor) else embeds
        raise InvalidRequest(
            f"embeds_TD: expected floats [T, {width}], a row for each of at least one position; "
            f"got {got}"
        )
    if not torch.isfinite(embeds).all():
        raise InvalidRequest("embeds_TD holds NaN or infinity: expected finite numbers")
    return embeds.detach().to("cpu", copy=True).contiguous()


def placeholder_ids(prompt: EmbedsPrompt, geometry: Geometry) -> Sequence[int]:
    """The ids that stand for its rows.  Raises: InvalidRequest."""
    count = len(read_embeds(prompt, geometry))
    if prompt.token_ids is None:
        return (PLACEHOLDER,) * count
    ids = tuple(prompt.token_ids)
    if len(ids) != count:
        raise InvalidRequest(
            f"token_ids: expected an id for each of the {count} rows of embeds_TD, got {len(ids)}"
        )
    return ids


def content_ids(embeds_TD: Tensor, token_ids: Sequence[int]) -> tuple[int, ...]:
    """A negative number for each row that stands for its content where ids stand for tokens."""
    rows, kind = embeds_TD.view(torch.uint8).numpy(), str(embeds_TD.dtype).encode()
    digests = (
        hashlib.blake2b(kind + row.tobytes() + token.to_bytes(8, "little"), digest_size=8).digest()
        for row, token in zip(rows, token_ids, strict=True)
    )
    return tuple(-1 - (int.from_bytes(digest, "little") >> 1) for digest in digests)
