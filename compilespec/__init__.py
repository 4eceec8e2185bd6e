"""compilespec: speculative decoding for PyTorch models, compiled into one program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "DraftTree",
    "EmbedsPrompt",
    "Engine",
    "Progress",
    "Quantize",
    "SamplingParams",
    "SelfDraft",
    "acceptance_rule",
    "attach",
    "bisect",
    "compile",
    "detach",
    "engine_of",
    "generate_with",
    "load",
    "save_quantized",
    "trace",
    "verify",
]

if TYPE_CHECKING:
    from compilespec.generation.attach import attach, detach, engine_of, generate_with
    from compilespec.inspect.bisect import bisect
    from compilespec.inspect.verify import verify
    from compilespec.methods.draft_tree import DraftTree
    from compilespec.methods.self_draft.recipe import SelfDraft
    from compilespec.passes.splice.acceptance.rule import acceptance_rule
    from compilespec.pipeline.entry import compile, trace
    from compilespec.pipeline.one_file import load
    from compilespec.progress import Progress
    from compilespec.quantization import Quantize, save_quantized
    from compilespec.runtime.embeds_prompt import EmbedsPrompt
    from compilespec.runtime.engine import Engine
    from compilespec.runtime.sampling_params import SamplingParams

_LAZY = {
    "DraftTree": ("compilespec.methods.draft_tree", "DraftTree"),
    "EmbedsPrompt": ("compilespec.runtime.embeds_prompt", "EmbedsPrompt"),
    "Engine": ("compilespec.runtime.engine", "Engine"),
    "SelfDraft": ("compilespec.methods.self_draft.recipe", "SelfDraft"),
    "SamplingParams": ("compilespec.runtime.sampling_params", "SamplingParams"),
    "acceptance_rule": ("compilespec.passes.splice.acceptance.rule", "acceptance_rule"),
    "compile": ("compilespec.pipeline.entry", "compile"),
    "load": ("compilespec.pipeline.one_file", "load"),
    "trace": ("compilespec.pipeline.entry", "trace"),
    "attach": ("compilespec.generation.attach", "attach"),
    "engine_of": ("compilespec.generation.attach", "engine_of"),
    "detach": ("compilespec.generation.attach", "detach"),
    "generate_with": ("compilespec.generation.attach", "generate_with"),
    "verify": ("compilespec.inspect.verify", "verify"),
    "Progress": ("compilespec.progress", "Progress"),
    "Quantize": ("compilespec.quantization", "Quantize"),
    "save_quantized": ("compilespec.quantization", "save_quantized"),
    "bisect": ("compilespec.inspect.bisect", "bisect"),
}


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*__all__, *globals()})


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for: `compilespec --help` stays
    quick.
    """
    from importlib import import_module

    from compilespec.progress import rare_collections

    if name in _LAZY:
        module, attribute = _LAZY[name]
        with rare_collections(only_imports=True):
            return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'compilespec' has no attribute {name!r}")
