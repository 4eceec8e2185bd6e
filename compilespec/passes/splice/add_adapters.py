"""Adds what LoRA adapters change to the target's products, each row by its request's adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import compilespec.ops.head_linear  # noqa: F401  (registers the operator)
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.program import (
    NO_ADAPTER,
    AdapterShape,
    BufferSpec,
    ProgramConfig,
    module_path,
)
from compilespec.tracing.structure import LINEAR


def add_adapters(step: Splice) -> int:
    """linear(x, W) -> adapted(linear(x, W), x, keeps, A, B), for every product that an adapter may
    change.

    A and B^T hold the matrices of all places, rank rows each: one product with each serves any
    mixture of adapters, and `keeps` says which of the numbers between them belong to a row's own.
    The matrices are buffers that the host fills, so a new adapter compiles nothing.
    Returns: products.  Numerics: exact where a row has no adapter.  Torch IR.
    Source: Hu et al. 2021, LoRA, section 4.1.
    """
    shape = step.config.adapters
    assert shape is not None, "the pass runs where there is room for adapters"
    products = list(products_of(step.graph, shape))  # no drafter is there yet
    if products:
        row, num_verified = step.roles.row, step.config.num_verify_tokens
        tokens = (None, num_verified) if step.is_decode else (1, None)
        with step.after(row):
            keeps = numbers_kept(step, shape, row, tokens)
        change_products(step, shape, products, keeps)
    return len(products)


def change_products(
    step: Splice, shape: AdapterShape, products: Sequence[fx.Node], keeps: Tensor
) -> None:
    """Let the readers of each product read what adapters make of it."""
    for node in products:
        _, dtype = node.meta["example"]
        specs = matrices(shape, module_path(node), *_widths(node), dtype)
        step.wrap(node, adapted, node.args[0], keeps, *map(step.buffer, specs))


def adapted(product: Tensor, x: Tensor, keeps: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """product + (x A^T) B^T, of the numbers between A and B only those of the row's own adapter.

    Args:
        product: [B, S, out] or [B, 1, S, out]; x: the same with `in`; keeps: bool,
            [B, S, places * rank].
        down: A, [places * rank, in]; up: B^T, [places * rank, out], of finite numbers.
    """
    return changed_by(product, narrowed(x, down), keeps, up)


def narrowed(x: Tensor, down: Tensor) -> Tensor:
    """x A^T, the numbers between A and B: [.., places * rank]."""
    return _product(x, down.t())


def changed_by(product: Tensor, low: Tensor, keeps: Tensor, up: Tensor) -> Tensor:
    """`adapted`, of the numbers between A and B, x A^T."""
    keeps = keeps if product.dim() == keeps.dim() else keeps.unsqueeze(1)
    return product + _product(torch.where(keeps, low, 0.0), up)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times a matrix.  On the CPU the bits of a row do not depend on the rows beside it."""
    operation = torch.ops.compilespec.head_linear.default
    product: Tensor = operation(x.unsqueeze(-2), matrix.unsqueeze(0))
    return product.squeeze(-2)


def num_adapted(ctx: PassContext) -> int | None:
    """The number of products to change; None without adapters."""
    shape = ctx.config.adapters
    return None if shape is None else len(list(products_of(ctx.target.graph_module.graph, shape)))


def products_of(graph: fx.Graph, shape: AdapterShape) -> Iterator[fx.Node]:
    """The products of the modules that adapters may change."""
    for node in graph.nodes:
        if node.target in LINEAR and module_path(node) in shape.modules:
            yield node


def may_be_adapted(shape: AdapterShape | None, role: str) -> bool:
    """True where an adapter may change the product of a weight, which is not all of it then."""
    module = role.removeprefix("target.").removesuffix(".weight")
    return shape is not None and module in shape.modules


def adapter_rows(config: ProgramConfig) -> BufferSpec:
    """The place of each row's adapter; -1 where it has none."""
    return BufferSpec(
        name="adapter_R",
        kind="state",
        shape=(config.num_rows,),
        dtype=torch.int32,
        fill=NO_ADAPTER,
        by_host=True,
    )


def matrices(
    shape: AdapterShape, module: str, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[BufferSpec, BufferSpec]:
    """A and B^T of a module, of all places."""
    width = shape.num_places * shape.rank
    sizes = {"down": (width, num_inputs), "up": (width, num_outputs)}
    down, up = (
        BufferSpec(
            name=f"adapter.{module}.{half}", kind="state", shape=size, dtype=dtype, by_host=True
        )
        for half, size in sizes.items()
    )
    return down, up


def numbers_kept(
    step: Splice, shape: AdapterShape, row: Tensor, tokens: tuple[int | None, int | None]
) -> Tensor:
    """Which numbers between A and B are of a token's own adapter: bool, [*tokens, places * rank].

    Args: row: int32, the state rows of the tokens.
    """
    places, width = step.buffer(adapter_rows(step.config)), shape.num_places * shape.rank
    keeps = step.call(own_numbers, places, row, width=width, rank=shape.rank)
    node_of(keeps).meta["example"] = ((*tokens, width), torch.bool)
    return keeps


def own_numbers(adapter_R: Tensor, row: Tensor, *, spare_row: int, width: int, rank: int) -> Tensor:
    """True where each number belongs to the place of each token's row; padded tokens read the spare
    row's.
    """
    place = adapter_R[torch.where(row >= 0, row, spare_row).long()]
    return place.unsqueeze(-1) == arange_like(adapter_R, width) // rank


def _widths(node: fx.Node) -> tuple[int, int]:
    """(out, in) of a product."""
    (*_, num_outputs), _ = node.meta["example"]
    source: Any = node.args[0]
    (*_, num_inputs), _ = source.meta["example"]
    return int(num_outputs), int(num_inputs)
