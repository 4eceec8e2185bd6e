"""Which of the target's hidden states an EAGLE-3 head reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption

AuxIdsAre = Literal["auto", "hs", "output"]
IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def resolve_aux_layers(
    raw: Mapping[str, Any],
    num_target_layers: int,
    num_aux: int,
    *,
    aux_ids_are: AuxIdsAre = "auto",
    aux_layers: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], str]:
    """Turn the ids of a config into ascending hs indices, and say how.

    `eagle_aux_hidden_state_layer_ids` has two meanings in published checkpoints.  Automatic rule:
    at the top level the ids are hs indices; inside `eagle_config` they are layers whose output is
    tapped (hs index + 1 further), unless the largest id is n or the smallest is 2, which only hs
    indices can be.  No ids: hs 2, n//2, n-3.

    Raises:
        InvalidOption: aux_ids_are or aux_layers is invalid.
        CheckpointError: the ids are not a list of distinct integers, or not as many as fc takes.
        DraftMismatch: an index lies outside the target, or the default indices coincide.
    """
    if aux_ids_are not in ("auto", "hs", "output"):
        raise InvalidOption(f"aux_ids_are: expected 'auto', 'hs' or 'output', got {aux_ids_are!r}")
    if aux_layers is not None and aux_ids_are != "auto":
        raise InvalidOption("give aux_layers (hs indices) or aux_ids_are, not both")
    at_top, nested = raw.get(IDS_KEY), (raw.get("eagle_config") or {}).get(IDS_KEY)
    if aux_layers is not None:
        indices, source = _distinct(aux_layers, "aux_layers", InvalidOption), "option"
    elif at_top or nested:
        indices, source = _read_ids(at_top, nested, num_target_layers, aux_ids_are)
    else:
        indices, source = _default_layers(num_target_layers), "default"
    _check_indices(indices, source, num_target_layers, num_aux)
    return indices, source


def _read_ids(at_top: Any, nested: Any, n: int, aux_ids_are: str) -> tuple[tuple[int, ...], str]:
    ids = _distinct(at_top or nested, IDS_KEY, CheckpointError)
    are_hs = aux_ids_are == "hs"
    if aux_ids_are == "auto":
        are_hs = bool(at_top) or ids[-1] == n or ids[0] == 2
    where = "config" if at_top else "eagle_config"
    source = f"{where} ids {list(ids)} read as {'hs indices' if are_hs else 'layer outputs'}"
    return (ids if are_hs else tuple(index + 1 for index in ids)), source


def _default_layers(n: int) -> tuple[int, ...]:
    if not 2 < n // 2 < n - 3:
        raise DraftMismatch(
            "the draft names no aux layers, and the default (2, n//2, n-3) needs 7 target layers "
            f"or more, the target has {n}; give aux_layers=(hs indices)"
        )
    return (2, n // 2, n - 3)


def _check_indices(indices: tuple[int, ...], source: str, n: int, num_aux: int) -> None:
    if len(indices) != num_aux:
        raise CheckpointError(
            f"fc takes {num_aux} aux hidden states, but {len(indices)} layers are named: "
            f"hs{list(indices)} ({source})"
        )
    if indices[0] < 0 or indices[-1] > n:
        raise DraftMismatch(
            f"aux hidden states hs{list(indices)} ({source}) lie outside the target, which has "
            f"hs[0] to hs[{n}]; is this the draft of another target, or should aux_ids_are= be "
            "the other meaning?"
        )


def _distinct(values: Any, key: str, error: type[Exception]) -> tuple[int, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not is_list or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise error(f"{key}: expected a list of layer indices, got {values!r}")
    if len(set(values)) != len(values):
        raise error(f"{key}: the indices must be distinct, got {list(values)}")
    return tuple(sorted(values))
