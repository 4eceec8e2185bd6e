"""Reads a GGUF file through transformers: weights dequantised, tokenizer and chat template too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compilespec.errors import MissingDependency, ModelNotFound
from compilespec.tracing.checkpoint_files import reason, refuse_pointer

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def check_readable(path: Path) -> None:
    """Raises: MissingDependency where transformers could not read the file."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{path} is a GGUF file; reading it needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'compilespec[gguf]'"
        )


def load_gguf(path: Path, dtype: torch.dtype | None) -> tuple[Any, Mapping[str, Any]]:
    """The model of a file, and transformers' report of what did not fit.

    Args:
        dtype: of the weights; None takes that of the file's matrices, and bfloat16 for quantized
            ones.
    Raises: MissingDependency, ModelNotFound, CheckpointError (a pointer of Git LFS).
    """
    refuse_pointer(path)
    check_readable(path)
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        with _no_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype or _stored_dtype(path),
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file, or an architecture that is not known
        raise ModelNotFound(
            f"{path} cannot be loaded as a causal language model: {reason(error)}; give the "
            "checkpoint that it was made of"
        ) from error
    return model, report


def _stored_dtype(path: Path) -> torch.dtype:
    from gguf import GGUFReader

    types = {t.tensor_type.name for t in GGUFReader(path).tensors if len(t.shape) > 1}
    return STORED[types.pop()] if len(types) == 1 and types <= STORED.keys() else torch.bfloat16


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """transformers shows how far it is, whatever its settings say."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    before = theirs.tqdm
    theirs.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        theirs.tqdm = before
