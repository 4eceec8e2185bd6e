"""A checkpoint directory in the form that transformers reads."""

from __future__ import annotations

import codecs
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from compilespec.errors import CheckpointError
from compilespec.tracing.checkpoint_files import read_json, refuse_pointer

KINDS = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja")


@contextlib.contextmanager
def readable(directory: Path) -> Iterator[Path]:
    """The directory, or a temporary one with links to its files and corrected JSON files.

    transformers fails at a config or an index with a byte order mark, dtypes such as "auto" and
    "torch.float32", a padding id beyond the vocabulary (nothing is padded here), and an index
    without `metadata`; it silently ignores other files with a byte order mark.
    Raises: CheckpointError (a pointer of Git LFS, an unknown dtype).
    """
    for kind in KINDS:
        for path in directory.glob(kind):
            refuse_pointer(path)
    files = {path.name: text for path in directory.glob("*.json") if (text := _mended(path))}
    if not files:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="compilespec-") as made:
        folder = Path(made)
        for path in directory.iterdir():
            if path.name not in files:
                (folder / path.name).symlink_to(path.resolve())
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _mended(path: Path) -> str | None:
    """The corrected contents of a file; None: no change is needed."""
    with path.open("rb") as file:
        has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    text = path.read_text(encoding="utf-8-sig") if has_mark else None
    if path.name != "config.json" and not path.name.endswith(".index.json"):
        return text
    try:
        content = read_json(path)
    except CheckpointError:  # transformers reports the error
        return text
    before = json.dumps(content)
    if path.name == "config.json":
        _mend_config(content, path)
    else:
        content.setdefault("metadata", {})
    after = json.dumps(content)
    return text if after == before else after


def _mend_config(config: dict[str, Any], path: Path) -> None:
    """Change a config, and the configs inside it, in place."""
    for name in ("dtype", "torch_dtype"):
        if isinstance(given := config.get(name), str):
            config[name] = _dtype(given, name, path)
    size, pad = config.get("vocab_size"), config.get("pad_token_id")
    if isinstance(size, int) and isinstance(pad, int) and pad >= size:
        config["pad_token_id"] = None
    for inner in config.values():
        if isinstance(inner, dict):
            _mend_config(inner, path)


def _dtype(given: str, name: str, path: Path) -> str | None:
    plain = given.removeprefix("torch.")
    if plain == "auto":
        return None
    if not isinstance(getattr(torch, plain, None), torch.dtype):
        raise CheckpointError(
            f"{path}: {name} is {given!r}: expected a dtype of torch, such as 'bfloat16'; correct "
            "it, or copy the file again"
        )
    return plain
