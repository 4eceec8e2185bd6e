"""Models of GGUF files whose products and embedding keep their blocks where they are, in the file.

transformers converts the rest, and moves rows: it gets their numbers in the place of a weight's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from compilespec.ops.gguf_blocks import TYPES
from compilespec.tracing.gguf_file import stored_dtype, told, unreadable
from compilespec.tracing.gguf_tensors import GgufTensor

BLOCKS, TENSORS = "blocks.json", "tensors.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoredBlocks:
    """A matrix of the file in a type of `TYPES`: where its blocks are."""

    kind: str
    offset: int  # of the first byte, in the file
    shape: tuple[int, int]  # rows, bytes of a row
    order: list[int] | None = None  # rows of the file by the model's; None: the same

    def read(self, data: np.ndarray) -> Tensor:
        """The blocks, uint8, mapped where the order is the same.  Args: data: the whole file."""
        rows, row_bytes = self.shape
        some = data[self.offset : self.offset + rows * row_bytes].reshape(self.shape)
        return torch.from_numpy(some if self.order is None else some[self.order])


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredModel:
    """The contents of a file, for a model whose products and embedding keep their blocks."""

    config: Any
    class_name: str
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]  # of no such blocks, by the model's names
    blocks: Mapping[str, StoredBlocks]

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors.values())

    def write(self, folder: Path) -> None:
        """Write it into a folder, for `read`."""
        self.config.save_pretrained(folder)
        safetensors.torch.save_file(dict(self.tensors), folder / TENSORS)
        record = {
            "class": self.class_name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "blocks": {name: dataclasses.asdict(one) for name, one in self.blocks.items()},
        }
        (folder / BLOCKS).write_text(json.dumps(record))

    @classmethod
    def read(cls, folder: Path) -> StoredModel:
        """The model that was written into a folder."""
        from transformers import AutoConfig

        record = json.loads((folder / BLOCKS).read_text())
        return cls(
            config=AutoConfig.from_pretrained(folder, local_files_only=True),
            class_name=record["class"],
            dtype=getattr(torch, record["dtype"]),
            tensors=safetensors.torch.load_file(folder / TENSORS),
            blocks={name: StoredBlocks(**one) for name, one in record["blocks"].items()},
        )

    def make(self, path: Path) -> tuple[nn.Module, Mapping[str, Any]]:
        """The model, and transformers' report of misfits.  Raises: ModelNotFound."""
        import transformers

        data, dtype = np.memmap(path, np.uint8, mode="c"), self.dtype
        kept = {
            name: GgufTensor(one.read(data), one.kind, dtype) for name, one in self.blocks.items()
        }
        places = {
            name: torch.empty((), dtype=dtype).expand(one.shape) for name, one in kept.items()
        }
        try:
            model, report = getattr(transformers, self.class_name).from_pretrained(
                None,
                config=self.config,
                state_dict={**self.tensors, **places},
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise unreadable(path, error) from error
        for name, weight in kept.items():
            _put(model, name, weight)
        return model, report


def _put(model: nn.Module, name: str, weight: GgufTensor) -> None:
    """Put a weight into its module, and into those that are tied to it."""
    owner, _, attribute = name.rpartition(".")
    known = getattr(model.get_submodule(owner), attribute)
    parameter = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for own, tensor in module._parameters.items():
            if tensor is known:
                module._parameters[own] = parameter


def read_stored(
    path: Path, dtype: torch.dtype | None, tell: Callable[[str], object]
) -> StoredModel | None:
    """The contents of a file, with the blocks of products and embeddings where they are; call it
    inside `read_once`.

    Returns: None where there are no such blocks, or transformers moves parts of rows.
    Raises: ModelNotFound.
    """
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as theirs

    tell("header")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        dtype = dtype or stored_dtype(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise unreadable(path, error) from error
    rows = _RowNumbers(gguf.dequantize)
    try:
        with (
            mock.patch.object(gguf, "dequantize", rows.dequantize),
            mock.patch.object(theirs, "tqdm", lambda every, **_: rows.follow(told(every, tell))),
        ):
            found = theirs.load_gguf_checkpoint(
                path, return_tensors=True, model_to_load=model, torch_dtype=None
            )["tensors"]
        placed = {name: rows.place(one) for name, one in found.items() if one.dtype == ROW_NUMBERS}
    except Exception:  # it takes rows apart
        return None
    products = {
        f"{name}.weight"
        for name, one in model.named_modules()
        if type(one) is nn.Linear or isinstance(one, nn.Embedding)
    }
    blocks = {name: one for name, one in placed.items() if name in products}
    if not blocks:
        return None
    tensors = {name: one.to(dtype) for name, one in found.items() if name not in placed}
    data = np.memmap(path, np.uint8, mode="c")
    for name in placed.keys() - blocks.keys():
        one = placed[name]
        tensors[name] = GgufTensor(one.read(data), one.kind, dtype).dequantize()
    return StoredModel(
        config=model.config,
        class_name=type(model).__name__,
        dtype=dtype,
        tensors=tensors,
        blocks=blocks,
    )


ROW_NUMBERS = torch.float64  # of no tensor that gguf dequantises
_FIRST_ROW = 2**32  # the number of row r of tensor t is t * 2^32 + r


class _RowNumbers:
    """Gives [N, 1] numbers of rows for the numbers of a matrix, and finds its rows again."""

    def __init__(self, dequantize: Callable[..., Any]) -> None:
        self._dequantize = dequantize
        self._tensors: list[Any] = []

    def follow(self, tensors: Iterable[Any]) -> Iterator[Any]:
        for tensor in tensors:
            self._tensors.append(tensor)
            yield tensor

    def dequantize(self, data: Any, kind: Any) -> Any:
        """In the place of gguf's function, for the last tensor of `follow`."""
        if kind.name not in TYPES or data.ndim != 2:
            return self._dequantize(data, kind)
        first = (len(self._tensors) - 1) * _FIRST_ROW
        return np.arange(first, first + len(data), dtype=np.float64)[:, None]

    def place(self, numbers: Tensor) -> StoredBlocks:
        """Raises: ValueError where the numbers are not all rows of one tensor."""
        tensor = self._tensors[int(numbers[0, 0]) // _FIRST_ROW]
        rows, row_bytes = tensor.data.shape
        order = numbers.long().squeeze(1) % _FIRST_ROW
        every = torch.arange(rows)
        one = numbers // _FIRST_ROW == numbers[0, 0] // _FIRST_ROW
        if numbers.shape != (rows, 1) or not one.all() or not order.sort().values.equal(every):
            raise ValueError(f"{tensor.name}: rows are not moved whole")
        return StoredBlocks(
            kind=tensor.tensor_type.name,
            offset=int(tensor.data_offset),
            shape=(rows, row_bytes),
            order=None if order.equal(every) else order.tolist(),
        )
