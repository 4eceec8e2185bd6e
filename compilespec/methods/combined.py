"""`spec="suffix+eagle3"`: a look-up, and a model that drafts where it finds nothing surer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter, Method
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.direct import DirectDrafter
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo

# Kinds whose drafts a model makes.
MODELS = ("recycled", "windowed", "unshifted", "shared_kv", "in_place")


class CombinedDrafter(Drafter):
    """Both drafters: the step runs the model's loop as ever, and the look-up beside it."""

    def __init__(self, finder: DirectDrafter, model: Drafter, capabilities: Capabilities) -> None:
        super().__init__()
        self.finder, self.model, self.capabilities = finder, model, capabilities
        self.num_draft_tokens = getattr(model, "num_draft_tokens", 0)
        self.aux_layers, self.kv_layers = model.aux_layers, model.kv_layers
        self.target_layers, self.copied_in = model.target_layers, model.copied_in
        self.kv_block_sizes = model.kv_block_sizes
        self.chain = model.chain

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """The calls of the model's loop, and "draft", the look-up's.  Raises: as theirs."""
        return {**self.model.capture(config, info), **self.finder.capture(config, info)}

    def describe(self) -> str:
        parts = (self.finder, self.model)
        texts = [getattr(one, "describe", lambda one=one: type(one).__name__)() for one in parts]
        return f"{texts[0]}; where a model is surer, {texts[1]}"


class CombinedMethod:
    """A look-up with a model to fall back on.

    Args: finder, model: the methods of both, which go together.
    """

    def __init__(self, finder: Method, model: Method) -> None:
        self.finder, self.model = finder, model
        self.capabilities = combined_capabilities(finder.capabilities, model.capabilities)

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> CombinedDrafter:
        """Both drafters; each is given its own options.  Raises: as the methods' own."""
        found = set(self.finder.capabilities.options or ())
        finder = self.finder.load(None, target, {n: options[n] for n in options if n in found})
        rest = {name: value for name, value in options.items() if name not in found}
        model = self.model.load(draft, target, rest)
        assert isinstance(finder, DirectDrafter)
        assert model is not None
        own = model.capabilities or self.model.capabilities
        capabilities = combined_capabilities(self.finder.capabilities, own)
        return CombinedDrafter(finder, model, capabilities)


def combined_method(*methods: Method) -> CombinedMethod:
    """The method "a+b".  Raises: InvalidOption unless a looks up and b drafts with a model."""
    names = "+".join(method.capabilities.name for method in methods)
    kinds = [method.capabilities for method in methods]
    if len(kinds) != 2 or not kinds[0].looks_up or kinds[1].kind not in MODELS:
        raise InvalidOption(
            f"spec={names!r}: expected a look-up and a method that drafts with a model, in this "
            "order, such as 'suffix+eagle3' or 'ngram+draft_model'"
        )
    return CombinedMethod(*methods)


def combined_capabilities(finder: Capabilities, model: Capabilities) -> Capabilities:
    """Those of the model's loop, whose steps look up as well."""
    options = None
    if finder.options is not None and model.options is not None:
        options = (*finder.options, *model.options)
    return dataclasses.replace(
        model, name=f"{finder.name}+{model.name}", looks_up=True, aliases=(), options=options,
        lossless=finder.lossless and model.lossless, remembers_texts=finder.remembers_texts,
    )  # fmt: skip


__all__ = ["CombinedDrafter", "CombinedMethod", "combined_capabilities", "combined_method"]
