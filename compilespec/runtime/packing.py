"""The prompt chunks of a prefill call as one packed batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from compilespec.passes.splice.read_rope_offsets import OFFSETS_T
from compilespec.passes.splice.sights import AHEAD
from compilespec.program import PAD
from compilespec.runtime.executor import PrefillChunk

GIVEN = "given_T"  # rows of the host's embeddings that replace the model's
BESIDE_IDS = (GIVEN, AHEAD, *OFFSETS_T)  # of prompts that are more than token ids


def pack_chunks(
    chunks: Sequence[PrefillChunk], beside_ids: Collection[str] = BESIDE_IDS
) -> Mapping[str, list[int]]:
    """The packed prefill batch as the graph's batch inputs: T tokens of R chunks.

    Args:
        beside_ids: those of `BESIDE_IDS` that the graph reads.
    """
    packed: dict[str, list[int]] = {
        name: []
        for name in (
            "ids_T", "next_T", "position_T", "row_T", "owner_T", "last_R", "commit_row_R",
            *beside_ids,
        )
    }  # fmt: skip
    for index, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        if beside_ids:
            _add_beside_ids(packed, chunk, len(packed["ids_T"]), beside_ids)
        packed["ids_T"] += chunk.tokens
        packed["next_T"] += [
            *chunk.tokens[1:],
            PAD if chunk.next_token is None else chunk.next_token,
        ]
        packed["position_T"] += range(chunk.start, chunk.start + count)
        packed["row_T"] += [chunk.row] * count
        packed["owner_T"] += [index] * count
        packed["last_R"].append(len(packed["ids_T"]) - 1)
        packed["commit_row_R"].append(chunk.row if chunk.finished else PAD)
    return packed


def _add_beside_ids(
    packed: Mapping[str, list[int]], chunk: PrefillChunk, start: int, names: Collection[str]
) -> None:
    """The inputs beside ids of a chunk that begins at token `start` of the call."""
    count = len(chunk.tokens)
    given = [PAD] * count
    for place in () if chunk.given is None else chunk.given.places:
        given[place] = start + place
    rope = chunk.rope or [[0] * count] * len(OFFSETS_T)
    values = {GIVEN: given, AHEAD: chunk.ahead or [0] * count}
    values |= zip(OFFSETS_T, rope, strict=True)
    for name in names:
        packed[name].extend(values[name])
