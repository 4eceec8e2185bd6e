"""The mask token of drafters that propose several tokens at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compilespec.errors import CheckpointError


def read_mask_token(
    places: Sequence[Mapping[str, Any]], keys: Sequence[str], vocab_size: int
) -> int:
    """The id under the first of `keys` that one of `places` has.

    Raises: CheckpointError: there is none, or it is no id of the target.
    """
    given = (place[key] for place in places for key in keys if place.get(key) is not None)
    token = next(given, None)
    if token is None:
        raise CheckpointError(
            f"config.json of the draft has no {keys[0]}, the token that its later rows hold: add "
            f"the one that it was trained with"
        )
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise CheckpointError(
            f"config.json of the draft: {keys[0]} must be a token id below {vocab_size}, got "
            f"{token!r}"
        )
    return token
