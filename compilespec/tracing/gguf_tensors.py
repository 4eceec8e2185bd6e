"""A weight that stays in the blocks of its GGUF file."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compilespec import _torch_compat
from compilespec._torch_compat import tree_map
from compilespec.ops.gguf_blocks import (
    TYPES,
    by_rows,
    embed_blocks,
    pack_gguf_blocks,
    read_blocks,
)

_aten = torch.ops.aten


class GgufTensor(Tensor):
    """A weight [N, K] whose only part is its blocks, uint8 [N, bytes of a row].

    Products with it become `compilespec::grouped_linear`, which quantizes rows, too; every other
    operation reads the weight first.  Nothing writes it.
    """

    quantizes_rows = True

    @staticmethod
    def __new__(cls, blocks: Tensor, kind: str, dtype: torch.dtype) -> GgufTensor:
        shape = (len(blocks), TYPES[kind].depth(blocks.shape[1]))
        return _torch_compat.wrapper_tensor(cls, shape, dtype, blocks.device)

    def __init__(self, blocks: Tensor, kind: str, dtype: torch.dtype) -> None:
        self.blocks, self.kind = blocks, kind

    def dequantize(self) -> Tensor:
        """The weight in its dtype."""
        kind, dtype = self.kind, self.dtype
        return by_rows(lambda b: read_blocks(kind, b).wide().to(dtype), self.blocks, self.shape[1])

    @functools.cached_property
    def packed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, scales and zero points as the steps' operator reads them, for calls outside."""
        values, scale, *zero = (
            pack_gguf_blocks(self.blocks, self.kind, part) for part in TYPES[self.kind].parts
        )
        return values, scale, zero[0] if zero else None

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["blocks"], (self.kind, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], metadata: tuple[str, torch.dtype], *_: Any
    ) -> GgufTensor:
        return cls(parts["blocks"], *metadata)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func is functional.linear and isinstance(args[1], cls):
            x, weight, *rest = args
            values, scale, zero = weight.packed
            bias = rest[0] if rest else keywords.get("bias")
            return torch.ops.compilespec.packed_grouped_linear(
                x, values, scale, bias, len(weight), zero
            )
        if func is functional.embedding and isinstance(args[1], cls):
            weight = args[1]
            return embed_blocks(args[0], weight.blocks, weight.kind, weight.dtype)
        with _torch_compat.no_torch_function():
            return func(*args, **keywords)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _SAME:
            dtype = keywords.get("dtype") or args[0].dtype
            blocks = args[0].blocks.to(keywords.get("device") or args[0].device)
            return cls(blocks, args[0].kind, dtype)
        args, keywords = tree_map(_plain, (args, keywords))
        return func(*args, **keywords)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GgufTensor({self.kind}, {tuple(self.shape)}, {self.dtype})"


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, GgufTensor) else value


_SAME = (_aten.detach.default, _aten.alias.default, _aten._to_copy.default)
