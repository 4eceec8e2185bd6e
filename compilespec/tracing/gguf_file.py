"""Reads a GGUF file through transformers: weights dequantised, tokenizer and chat template too."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from compilespec.errors import MissingDependency, ModelNotFound
from compilespec.tracing.checkpoint_files import reason

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
TOLD_EVERY_S = 2.0  # of tensors
CUT_SHORT = re.compile(  # numpy and struct, of a file that ends too early
    r"cannot reshape array|requires a buffer|must be a divisor|out of bounds|not in range"
)
_patching = threading.RLock()


def check_readable(path: Path) -> None:
    """Raises: MissingDependency where transformers could not read the file; ModelNotFound where it
    is no GGUF file of this machine's byte order.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{path} is a GGUF file; reading it needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'compilespec[gguf]'"
        )
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] != b"GGUF":
        raise ModelNotFound(
            f"{path} is no GGUF file: it begins with {head[:4]!r}; download it again"
        )
    if head[4:6] == b"\0\0":  # the version, a small number, in its last bytes
        raise ModelNotFound(
            f"{path} is a big-endian GGUF file: expected a little-endian one; download that, or "
            "convert it with gguf's gguf-convert-endian"
        )


def load_gguf(
    path: Path, dtype: torch.dtype | None, tell: Callable[[str], object]
) -> tuple[Any, Mapping[str, Any]]:
    """The model of a file, and transformers' report of misfits; call it inside `read_once`.

    Args:
        dtype: of the weights; None takes that of the file's matrices, and bfloat16 for quantized
            ones.
        tell: called with the part that is read.
    Raises: ModelNotFound.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    tell("header")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype or stored_dtype(path),
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file, or an architecture that is not known
        raise unreadable(path, error) from error
    return model, report


def unreadable(path: Path, error: Exception) -> ModelNotFound:
    if CUT_SHORT.search(str(error)):
        return ModelNotFound(
            f"{path} is cut short or damaged ({reason(error)}): copy or download it again"
        )
    return ModelNotFound(
        f"{path} cannot be loaded as a causal language model: {reason(error)}; give the "
        "checkpoint that it was made of"
    )


def stored_dtype(path: Path) -> torch.dtype:
    import gguf

    types = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}
    return STORED[types.pop()] if len(types) == 1 and types <= STORED.keys() else torch.bfloat16


@contextlib.contextmanager
def read_once(tell: Callable[[str], object]) -> Iterator[None]:
    """A context in which transformers parses a GGUF file once and names each tensor once.

    transformers makes a reader for the config, the weights and the tokenizer each, and a reader
    makes arrays of every string of the vocabulary.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as theirs

    readers = functools.cache(_fast_reader)
    facts = functools.cache(theirs.load_gguf_checkpoint)

    def read(path: Any, return_tensors: bool = False, **keywords: Any) -> Any:
        if return_tensors:
            return original(path, return_tensors=True, **keywords)
        return copy.deepcopy(facts(str(path)))

    original = theirs.load_gguf_checkpoint
    with _patching, contextlib.ExitStack() as patches:
        for where, name, ours in (
            (gguf, "GGUFReader", lambda path: readers(str(path))),
            (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
            (theirs, "load_gguf_checkpoint", read),
            (theirs, "tqdm", lambda tensors, **_: told(tensors, tell)),
        ):
            patches.enter_context(mock.patch.object(where, name, ours))
        yield


def _fast_reader(path: str) -> Any:
    """A reader that cuts plain arrays: cutting a `numpy.memmap` takes three times as long."""
    import gguf
    import numpy as np

    class Reader(gguf.gguf_reader.GGUFReader):
        data: Any

        def _get(self, *args: Any, **keywords: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **keywords)

    return Reader(path)


def told(tensors: Iterable[Any], tell: Callable[[str], object]) -> Iterator[Any]:
    """The tensors of a file, reported now and then in the place of transformers' bar."""
    every = list(tensors)
    last = 0.0
    for index, tensor in enumerate(every, 1):
        if time.monotonic() - last >= TOLD_EVERY_S or index == len(every):
            last = time.monotonic()
            tell(f"tensor {index} of {len(every)}")
        yield tensor
