"""compilespec: speculative decoding for PyTorch models, compiled into one program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Progress",
    "Quantize",
    "SamplingParams",
    "acceptance_rule",
    "bisect",
    "compile",
    "save_quantized",
    "trace",
    "verify",
]

if TYPE_CHECKING:
    from compilespec.acceptance import acceptance_rule
    from compilespec.inspect.bisect import bisect
    from compilespec.inspect.verify import verify
    from compilespec.pipeline import compile, trace
    from compilespec.progress import Progress
    from compilespec.quantization import Quantize, save_quantized
    from compilespec.runtime.engine import Engine
    from compilespec.sampling_params import SamplingParams

_LAZY = {
    "Engine": ("compilespec.runtime.engine", "Engine"),
    "SamplingParams": ("compilespec.sampling_params", "SamplingParams"),
    "acceptance_rule": ("compilespec.acceptance", "acceptance_rule"),
    "compile": ("compilespec.pipeline", "compile"),
    "verify": ("compilespec.inspect.verify", "verify"),
    "Progress": ("compilespec.progress", "Progress"),
    "Quantize": ("compilespec.quantization", "Quantize"),
    "save_quantized": ("compilespec.quantization", "save_quantized"),
    "bisect": ("compilespec.inspect.bisect", "bisect"),
}


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for: `compilespec --help` stays
    quick.
    """
    from importlib import import_module

    if name == "trace":  # the stage's module, which is callable
        return import_module("compilespec.trace")
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'compilespec' has no attribute {name!r}")
