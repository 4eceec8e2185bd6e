"""Quantization with torchao.

`configs.py` reads the options, `modules.py` quantizes modules on a copy, `save.py` writes
checkpoints.  `tracing/quantized_weights.py` carries quantized weights through the stages.
"""

from compilespec.quantization.configs import NAMES, Quantize, read_quantize
from compilespec.quantization.modules import (
    describe_quantized,
    quantize_drafter,
    quantize_module,
    quantize_target,
    quantize_weights,
    with_plain_weights,
)
from compilespec.quantization.save import save_quantized

__all__ = [
    "NAMES",
    "Quantize",
    "describe_quantized",
    "quantize_drafter",
    "quantize_module",
    "quantize_target",
    "quantize_weights",
    "read_quantize",
    "save_quantized",
    "with_plain_weights",
]
