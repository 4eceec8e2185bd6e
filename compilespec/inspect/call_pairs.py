"""A drafter's captured calls before and after a rewrite, on the same random arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.fragments import run_fragment
from compilespec.program import Traced

NUM_REQUESTS, NUM_TOKENS = 3, 5


@torch.no_grad()
def call_pairs(
    ctx: PassContext, seed: int = 0
) -> Iterator[tuple[str, int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """(name, requests, outputs after, outputs before) of each call that differs from its capture.

    Attention is stateless: every token sees those before it in its own row.
    """
    for name, after in ctx.draft.items():
        before = after.expanded
        if before is not None:
            arguments = _random_arguments(before, ctx.config.device, seed)
            got, want = (run_fragment(call, dict(arguments)) for call in (after, before))
            yield name, NUM_REQUESTS, got, want


def _random_arguments(call: Traced, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Ids of 0 and 1, which every vocabulary has, positions from 0, states of any kind."""
    drawn = torch.Generator(device=device).manual_seed(seed)
    placeholders = call.graph_module.graph.find_nodes(op="placeholder")
    arguments = {}
    for node, entry in zip(placeholders, call.inputs, strict=True):
        if entry.kind != "argument":
            continue
        example = node.meta["example_value"]
        shape = (NUM_REQUESTS, NUM_TOKENS, *(int(size) for size in example.shape[2:]))
        if entry.name == "position_ids":
            tensor = torch.arange(NUM_TOKENS, device=device).expand(shape)
        elif example.is_floating_point():
            tensor = torch.randn(shape, generator=drawn, device=device)
        else:
            tensor = torch.randint(2, shape, generator=drawn, device=device)
        arguments[entry.name] = tensor.to(example.dtype)
    return arguments
