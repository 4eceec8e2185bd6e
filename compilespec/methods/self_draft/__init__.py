"""The target drafts for itself: its own graph, made cheaper, on its own cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption, NotSupported
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.self_draft.cheaper import keep_layers, limit_sight
from compilespec.methods.self_draft.recipe import SelfDraft, read_recipe
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "SelfDraft", "SelfDrafter"]


class SelfDrafter(Drafter):
    """A copy of the target's traced graph.  It has no weights of its own until
    `quantization.calls` gives it its copies.
    """

    def __init__(self, recipe: SelfDraft, target: Traced) -> None:
        super().__init__()
        self.num_draft_tokens = 0  # it suggests no K
        self.recipe = recipe
        self.copied_in = recipe.weights
        self._forward, self.target_layers = keep_layers(target, recipe)
        if recipe.window is not None:
            limit_sight(self._forward, recipe.window[1])

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """ "forward" (the target's arguments -> logits at [B, T]) and "propose" (logits_BV -> the
        best id, int32 [B], and the logits, for a draw).
        """

        def propose(logits_BV: Tensor) -> tuple[Tensor, ...]:
            return logits_BV.argmax(-1).to(torch.int32), logits_BV.view_as(logits_BV)

        rows, width = EXAMPLE_SHAPE[0], info.vocab_size
        logits = torch.zeros(rows, width, dtype=config.dtype, device=config.device)
        dims = {"logits_BV": (logits, (0,))}
        proposal = trace_call(self, propose, dims, name="draft.propose", owner="draft")
        return {"forward": self._forward, "propose": proposal}

    def describe(self) -> str:
        recipe, own = self.recipe, self.target_layers
        kept = len(own["attention"]) + len(own["recurrence"])
        parts = [f"the target drafts for itself, on its own cache, with {kept} layers"]
        if recipe.window is not None:
            parts.append(f"of which each sees {recipe.window[1]} tokens")
        if recipe.weights is None:
            parts.append("with the target's weights")
        return ", ".join(parts)


class SelfMethod:
    """Any model with attention over a cache; there is nothing to train or to download."""

    capabilities = Capabilities(
        name="self",
        brings="any model: it drafts with a 4-bit copy of itself",
        kind="in_place",
        takes_recipe=True,
        prefers_auto=True,
        options=(),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> SelfDrafter:
        """Change a copy of the target's graph as the recipe says.

        Raises: InvalidOption (a layer that is not there), NotSupported (masks that the model
        computes from its cache).
        """
        traced = target.traced
        if traced is None:
            raise InvalidOption("spec='self' needs a target that was traced")
        if traced.has_kept_masks:
            raise NotSupported(
                "spec='self' does not draft under masks that the model computes from its cache "
                "yet; take spec='suffix', or a drafter of another method"
            )
        recipe = read_recipe(draft) if draft is not None else _recipe_for(traced)
        return SelfDrafter(recipe, traced)


def _recipe_for(target: Traced) -> SelfDraft:
    """The upper halves of weights where they have two planes, else copies in 4 bits."""
    is_nested = any(hasattr(weight, "upper_plane") for weight in target.weights.values())
    return SelfDraft(weights="upper" if is_nested else "int4")


METHOD = SelfMethod()
