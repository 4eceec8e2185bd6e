"""Reading drafter checkpoints: config.json, safetensors or pytorch_model.bin, and strict loading.

A wrong loader only lowers acceptance, the output stays right.  So nothing is loaded halfway here: a
tensor that is missing, unexpected or misshapen is an error that lists it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from compilespec.errors import CheckpointError

# Files in the order they are looked for: (file, is an index of shards).
WEIGHT_FILES = (
    ("model.safetensors.index.json", True),
    ("model.safetensors", False),
    ("pytorch_model.bin.index.json", True),
    ("pytorch_model.bin", False),
)

# Tensors that training libraries leave in a checkpoint and that no forward pass reads.
TRAINING_ONLY = re.compile(
    r"(^|\.)(verifier_lm_head\.|verifier_norm\.|rotary_emb\.)|(^|\.)inv_freq$"
)

MAX_LISTED = 8  # names of one kind in a message


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory.

    Raises:
        CheckpointError: no such directory or file, or it holds no JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.parent.is_dir():
        raise CheckpointError(
            f"draft checkpoint: expected a directory, {str(directory)!r} is not one"
        )
    return _read_json(path)


def read_tensors(directory: str | Path, only: Container[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint directory to the CPU, training-only ones left out.

    Args:
        only: names to read, such as a drafter's inside the checkpoint of its target; None for all.
    Returns:
        name -> tensor, in the dtype of the file.
    Raises:
        CheckpointError: no weight file, a shard that is missing or unreadable, an index that does
        not match.
    """
    path, is_index = _weight_file(Path(directory))
    tensors = _read_shards(path, only) if is_index else _read_file(path, only)
    return drop_training_only(tensors)


def tensor_names(directory: str | Path) -> list[str]:
    """The names of all tensors of a checkpoint directory, without reading any from safetensors.

    Raises:
        CheckpointError: no weight file, or one that is unreadable.
    """
    path, is_index = _weight_file(Path(directory))
    if is_index:
        return list(_weight_map(path))
    if path.suffix != ".safetensors":
        return list(_read_file(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable ({_first_line(error)})") from error


def drop_training_only(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the tensors that only training reads."""
    return {name: tensor for name, tensor in tensors.items() if not TRAINING_ONLY.search(name)}


def load_strict(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Assign `tensors` to the parameters and persistent buffers of `module`, every one exactly
    once.

    Args:
        module: may live on the meta device; its tensors are replaced, their dtype is not looked at.
        tensors: name -> tensor, named as in `module.state_dict()`.
        source: where the tensors come from, for the message.
    Raises:
        CheckpointError: tensors missing, unexpected or misshapen; one line that lists them.
    """
    expected = module.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    misshapen = [
        f"{name} expected {list(expected[name].shape)} came {list(tensors[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if expected[name].shape != tensors[name].shape
    ]
    problems = [
        f"{kind}: {_listed(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source}: {'; '.join(problems)}. Compare config.json with the tensors in the "
            "checkpoint"
        )
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({_first_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, came {type(content).__name__}")
    return content


def _weight_file(directory: Path) -> tuple[Path, bool]:
    """The weights of a directory, and whether the file is an index of shards."""
    for name, is_index in WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name, is_index
    expected = ", ".join(name for name, _ in WEIGHT_FILES)
    raise CheckpointError(f"{directory}: no weights; expected one of {expected}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names")
    return weight_map


def _read_shards(index: Path, only: Container[str] | None) -> dict[str, Tensor]:
    weight_map = {
        name: file for name, file in _weight_map(index).items() if only is None or name in only
    }
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: shard {file_name!r} lies outside the checkpoint directory"
            )
        tensors.update(_read_file(index.parent / file_name, only))
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise CheckpointError(f"{index}: the shards lack {_listed(lost)}")
    return tensors


def _read_file(path: Path, only: Container[str] | None = None) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors" and only is not None:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name in only}  # noqa: SIM118
        if path.suffix == ".safetensors":
            return load_file(path, device="cpu")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: the shard {path.name} is missing") from None
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: not readable ({_first_line(error)})") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path}: expected a mapping of names to tensors")
    return {name: tensor for name, tensor in content.items() if only is None or name in only}


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
