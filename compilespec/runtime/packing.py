"""The prompt chunks of a prefill call as one packed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compilespec.passes.read_rope_offsets import OFFSETS_T
from compilespec.passes.sights import AHEAD
from compilespec.program import PAD
from compilespec.runtime.executor import PrefillChunk


def pack_chunks(chunks: Sequence[PrefillChunk]) -> Mapping[str, list[int]]:
    """The packed prefill batch as the graph's batch inputs: T tokens of R chunks."""
    packed: dict[str, list[int]] = {
        name: []
        for name in (
            "ids_T", "next_T", "position_T", "row_T", "owner_T", "given_T", "last_R",
            "commit_row_R", AHEAD, *OFFSETS_T,
        )
    }  # fmt: skip
    for index, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        packed["ids_T"] += chunk.tokens
        packed["next_T"] += [
            *chunk.tokens[1:],
            PAD if chunk.next_token is None else chunk.next_token,
        ]
        packed["position_T"] += range(chunk.start, chunk.start + count)
        packed["row_T"] += [chunk.row] * count
        packed["owner_T"] += [index] * count
        start = len(packed["given_T"])
        packed["given_T"] += [PAD] * count
        for place in () if chunk.given is None else chunk.given.places:
            packed["given_T"][start + place] = start + place
        packed[AHEAD] += chunk.ahead or [0] * count
        for name, offsets in zip(OFFSETS_T, chunk.rope or [[0] * count] * 3, strict=True):
            packed[name] += offsets
        packed["last_R"].append(len(packed["ids_T"]) - 1)
        packed["commit_row_R"].append(chunk.row if chunk.finished else PAD)
    return packed
