"""Quantization with torchao: configs by name, modules quantized on a copy, weights as plain parts.

`configs.py` says what may be asked for, `modules.py` applies it, `tensors.py` is how quantized
weights pass through trace and rewrite (it knows no config and imports no torchao), `save.py` writes
checkpoints.
"""

from compilespec.quantization.configs import NAMES, Quantize, read_quantize
from compilespec.quantization.modules import (
    describe_quantized,
    quantize_drafter,
    quantize_module,
    quantize_target,
)
from compilespec.quantization.save import save_quantized

__all__ = [
    "NAMES",
    "Quantize",
    "describe_quantized",
    "quantize_drafter",
    "quantize_module",
    "quantize_target",
    "read_quantize",
    "save_quantized",
]
