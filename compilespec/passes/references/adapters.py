"""Reference of the pass that adds adapters: one row, one adapter, one number between A and B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Follow, Values
from compilespec.passes.references.placement import place_call
from compilespec.passes.splice.add_adapters import adapted
from compilespec.program import module_path


def add_adapters(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, every product of an adapted module followed by its row's own change."""
    shape = ctx.config.adapters
    assert shape is not None, "the pass ran"
    rows = place_call(ctx.config, case).tokens.row

    def change(node: fx.Node, arguments: tuple[Any, ...], result: Any) -> Any:
        module = module_path(node)
        if "linear" not in str(node.target) or module not in shape.modules:
            return result
        return _changed(result, arguments[0], module, rows, shape.rank, case.inputs)

    return before(case.inputs, follow=change)


def changed_alike(ctx: PassContext, case: Case, rows: Tensor) -> Follow | None:
    """The same for tokens with these state rows, in the step's own operations: equal bit for bit.
    None without adapters.
    """
    shape = ctx.config.adapters
    if shape is None:
        return None
    place_BS = case.inputs["adapter_R"][rows.long()]  # a padded token's is the last row's
    numbers = torch.arange(shape.num_places * shape.rank, device=rows.device)
    keeps = place_BS.unsqueeze(-1) == numbers // shape.rank

    def change(node: fx.Node, arguments: tuple[Any, ...], result: Any) -> Any:
        module = module_path(node)
        if "linear" not in str(node.target) or module not in shape.modules:
            return result
        parts = (case.inputs[f"adapter.{module}.{half}"] for half in ("down", "up"))
        return adapted(result, arguments[0], keeps, *parts)

    return change


def _changed(
    product: Tensor,
    x: Tensor,
    module: str,
    rows: Tensor,
    rank: int,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """The product with what each token's adapter adds to it."""
    down, up = (inputs[f"adapter.{module}.{half}"] for half in ("down", "up"))
    places, changed = inputs["adapter_R"].tolist(), product.clone()
    x, parts = x.flatten(0, -3), changed.flatten(0, -3)  # [B, S, ..], of [B, 1, S, ..] too
    for request, token_rows in enumerate(rows.tolist()):
        for token, row in enumerate(token_rows):
            place = places[row]  # a padded token's is the last row's
            if place < 0:
                continue
            for number in range(place * rank, (place + 1) * rank):
                between = torch.dot(x[request, token], down[number])
                parts[request, token] += between * up[number]
    return changed
