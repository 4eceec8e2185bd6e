"""Files of token counts, by which a later start chooses the rows of a drafter's head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from compilespec.errors import InvalidOption, is_integer

FILE_NAME = "token_counts.json"  # its name beside a target, where it is found by itself
SUFFIXES = (".json", ".safetensors")


def save_counts(path: str | Path, counts: Mapping[int, int], vocab_size: int) -> Path:
    """Write counts by token id as JSON, without ids that never occurred."""
    path = Path(path)
    known = {str(token): counts[token] for token in sorted(counts)}
    text = json.dumps({"vocab_size": vocab_size, "counts": known}) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def read_counts(path: str | Path, vocab_size: int) -> Tensor:
    """The counts of a file by token id, float64 [V].

    Args:
        path: JSON (what `save_counts` wrote, an object of counts by id, or a list of V counts) or
            safetensors (one tensor of V counts).
        vocab_size: V, the ids of the target.
    Raises: InvalidOption (no such file, not of this form, another vocabulary).
    """
    try:
        if str(path).endswith(".safetensors"):
            (tensor,) = load_file(path).values()
            return check_counts(tensor, vocab_size, str(path))
        given: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidOption(
            f"draft_vocab_counts: expected {path} to hold counts by token id, as JSON or as one "
            f"tensor; {reason}"
        ) from error
    if isinstance(given, dict) and {*given} == {"vocab_size", "counts"}:
        if given["vocab_size"] != vocab_size:
            raise _of_another_vocabulary(str(path), given["vocab_size"], vocab_size)
        given = given["counts"]
    if isinstance(given, dict) and all(key.isdecimal() for key in given):
        given = {int(key): count for key, count in given.items()}
    return check_counts(given, vocab_size, str(path))


def check_counts(given: Any, vocab_size: int, source: str) -> Tensor:
    """Counts by token id, float64 [V].

    Args:
        given: a mapping of ids to counts, or V counts.
        source: their origin, for messages.
    Raises: InvalidOption (no counts, none above 0, another vocabulary).
    """
    if isinstance(given, Mapping):
        outside = [token for token in given if not is_integer(token) or not 0 <= token < vocab_size]
        if outside:
            raise _of_another_vocabulary(source, f"the id {outside[0]!r}", vocab_size)
        given = [given.get(token, 0) for token in range(vocab_size)]
    try:
        counts_V = torch.as_tensor(given).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOption(
            f"draft_vocab_counts: expected {source} to hold one number for each token id; got "
            f"{type(given).__name__}"
        ) from error
    if counts_V.shape != (vocab_size,):
        shape = len(counts_V) if counts_V.dim() == 1 else list(counts_V.shape)
        raise _of_another_vocabulary(source, shape, vocab_size)
    if not bool((counts_V >= 0).all() & (counts_V.sum() > 0)) or bool(counts_V.isinf().any()):
        raise InvalidOption(
            f"draft_vocab_counts: expected counts of 0 and more, and some above it; {source} holds "
            f"{float(counts_V.min()):g} to {float(counts_V.max()):g}"
        )
    return counts_V


def _of_another_vocabulary(source: str, got: object, vocab_size: int) -> InvalidOption:
    return InvalidOption(
        f"draft_vocab_counts: expected counts of the target's {vocab_size} ids; {source} has "
        f"{got}: count tokens of this target's tokenizer"
    )
