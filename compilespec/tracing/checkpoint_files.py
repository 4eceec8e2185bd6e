"""Reads the files of a checkpoint directory: config.json, safetensors or pytorch_model.bin.

Pickles are read as mappings of names to tensors; nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from compilespec.errors import CheckpointError

# Files in the order of the search, which is transformers' own: (file, is an index of shards).
WEIGHT_FILES = (
    ("model.safetensors", False),
    ("model.safetensors.index.json", True),
    ("pytorch_model.bin", False),
    ("pytorch_model.bin.index.json", True),
)

# Tensors that training libraries leave in a checkpoint and that no forward pass reads.
TRAINING_ONLY = re.compile(
    r"(^|\.)(verifier_lm_head\.|verifier_norm\.|rotary_emb\.)|(^|\.)inv_freq$"
)

# Tensor names of a decoder layer, and of MTP modules with their own prefix.
LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)$")
MTP_LAYER = re.compile(r"^(?:model\.)?mtp_layers\.(\d+)\.(.+)$")
MTP = re.compile(r"^(?:model\.)?(?:language_model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)$")

ERNIE_MTP = re.compile(r"^(?:model\.)?mtp_(emb_norm|hidden_norm|linear_proj|block)\.(\d+)\.(.+)$")

LFS_POINTER = b"version https://git-lfs."
MAX_LISTED = 8  # names of one kind in a message


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory.

    Raises:
        CheckpointError: the directory or file is missing, or holds no JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.parent.is_dir():
        raise CheckpointError(f"draft checkpoint: expected a directory, got {str(directory)!r}")
    return read_json(path)


def read_tensors(
    directory: str | Path, only: Container[str] | None = None, *, own_files: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint directory to the CPU, without training-only ones.

    Args:
        only: names to read, such as a drafter's inside the checkpoint of its target; None for all.
        own_files: names of weight files that come before those that all models have.
    Returns:
        name -> tensor, in the dtype of the file, each from the shard that the index names.
    Raises:
        CheckpointError: there is no weight file, a shard is missing or unreadable, or an index does
            not match.
    """
    path, is_index = _weight_file(Path(directory), own_files)
    tensors = _read_shards(path, only) if is_index else _read_file(path, only)
    return drop_training_only(tensors)


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, without training-only ones.

    Raises: CheckpointError: it is missing, unreadable, or of another kind.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        raise CheckpointError(f"{path}: expected a directory or a .safetensors file that exists")
    return drop_training_only(_read_file(path))


def tensor_names(directory: str | Path, *, own_files: Sequence[str] = ()) -> list[str]:
    """The names of all tensors of a checkpoint directory, without reading any from safetensors.

    Args:
        own_files: weight files to look for before the usual ones.
    Raises:
        CheckpointError: no weight file, or one that is unreadable.
    """
    path, is_index = _weight_file(Path(directory), own_files)
    return list(_weight_map(path) if is_index else _read_dtypes(path))


def integer_tensors(directory: str | Path) -> dict[str, str]:
    """The tensors of a checkpoint directory that hold no floating-point numbers: name -> dtype.

    Raises:
        CheckpointError: no weight file, a shard that is missing or unreadable.
    """
    path, is_index = _weight_file(Path(directory))
    shards = _shards(path) if is_index else {path: None}
    return {
        name: dtype
        for shard, names in shards.items()
        for name, dtype in _read_dtypes(shard).items()
        if (names is None or name in names) and not dtype.startswith(("f", "bf"))
    }


def check_shards(directory: str | Path) -> None:
    """Refuse shards that hold other tensors than the index assigns to them.  A reader of whole
    shards, such as transformers, takes the last copy of a tensor, which may be stale.

    Raises:
        CheckpointError: a shard is missing or unreadable, lacks a tensor, or holds one that the
            index does not name, or a copy of one of another shard that differs from it.
    """
    index, is_index = _weight_file(Path(directory))
    if not is_index:
        return
    shards, owners = _shards(index), _weight_map(index)
    held = {shard: _read_dtypes(shard).keys() for shard in shards}
    for shard, names in shards.items():
        _check_held(index, shard, names, held[shard])
    for shard, names in shards.items():
        for name in sorted(n for n in held[shard] - names if not TRAINING_ONLY.search(n)):
            owner = owners.get(name)
            if owner is None or not _is_copy(name, shard, index.parent / owner):
                says = "names no shard for it" if owner is None else f"says that it is in {owner}"
                raise CheckpointError(
                    f"{shard} holds {name}, but {index.name} {says}, and which one is meant cannot "
                    "be known: copy the checkpoint again, into an empty directory"
                )


def drop_training_only(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the tensors that only training reads."""
    return {name: tensor for name, tensor in tensors.items() if not TRAINING_ONLY.search(name)}


def mtp_layers(names: Iterable[str]) -> list[int]:
    """The indices of MTP modules numbered after a target's layers, recognised by their enorm."""
    return sorted({int(m[1]) for m in map(LAYER.match, names) if m and m[2] == "enorm.weight"})


def drop_mtp(names: Iterable[str]) -> list[str]:
    """Leave out the names of MTP modules, which a target's own checkpoint may hold."""
    names = list(names)
    layers = mtp_layers(names)
    return [
        name
        for name in names
        if not (MTP.match(name) or MTP_LAYER.match(name) or ERNIE_MTP.match(name))
        and not ((match := LAYER.match(name)) and int(match[1]) in layers)
    ]


def listed(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    names = list(names)
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def reason(error: BaseException) -> str:
    """A library's error in one line, without its advice to execute pickles."""
    if isinstance(error, UnpicklingError):
        return "not a plain pickle of tensors; save it as safetensors"
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def refuse_pointer(path: Path) -> None:
    """Raises: CheckpointError where Git LFS left a pointer in the place of a file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file itself: run 'git lfs pull' in "
                f"{path.parent}, or download the file"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.  Raises: CheckpointError (missing, unreadable, not an object)."""
    refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({reason(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _weight_file(directory: Path, own_files: Sequence[str] = ()) -> tuple[Path, bool]:
    """The weight file of a directory, and whether it is an index of shards."""
    files = (*((name, False) for name in own_files), *WEIGHT_FILES)
    for name, is_index in files:
        if (directory / name).is_file():
            return directory / name, is_index
    expected = ", ".join(name for name, _ in files)
    raise CheckpointError(f"{directory}: no weights; expected one of {expected}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names")
    return weight_map


def _shards(index: Path) -> dict[Path, set[str]]:
    """The shards, each with the tensors that the index assigns to it."""
    shards: dict[Path, set[str]] = {}
    for name, file_name in _weight_map(index).items():
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: shard {file_name!r} lies outside the checkpoint directory"
            )
        shards.setdefault(index.parent / file_name, set()).add(name)
    return shards


def _read_shards(index: Path, only: Container[str] | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, names in _shards(index).items():
        wanted = {name for name in names if only is None or name in only}
        if not wanted:
            continue
        read = _read_file(path, wanted)
        _check_held(index, path, wanted, read.keys())
        tensors.update(read)
    return tensors


def _check_held(index: Path, shard: Path, names: Set[str], held: Set[str]) -> None:
    """Refuse a shard that lacks tensors which the index assigns to it."""
    if lost := sorted(names - held):
        raise CheckpointError(f"{index}: the shards lack {listed(lost)} ({shard.name})")


def _is_copy(name: str, *shards: Path) -> bool:
    """True where a tensor is equal, bit for bit, in two shards."""
    one, other = (_read_file(shard, {name}).get(name) for shard in shards)
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


def _read_file(path: Path, only: Container[str] | None = None) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        content = _read_pickle(path, "cpu")
        return {name: tensor for name, tensor in content.items() if only is None or name in only}
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise _unreadable(path, error) from error


def _read_dtypes(path: Path) -> dict[str, str]:
    """Name -> dtype, such as "bf16" or "int64"."""
    if path.suffix != ".safetensors":
        content = _read_pickle(path, "meta")
        return {name: str(tensor.dtype).split(".")[-1] for name, tensor in content.items()}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype().lower() for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise _unreadable(path, error) from error


def _read_pickle(path: Path, device: str) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file raises KeyError, IndexError and more
        raise _unreadable(path, error) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(f"{path}: expected a mapping of names to tensors")
    return content


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path.parent}: the shard {path.name} is missing")
    refuse_pointer(path)
    return CheckpointError(f"{path}: not readable ({reason(error)}); copy it again")
