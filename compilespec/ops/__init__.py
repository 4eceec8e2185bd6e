"""Custom operators, one folder each: definition in torch, C++ kernel for the CPU, schema, fake.

Importing defines the operators (`torch.ops.compilespec.*`) and compiles nothing; `load_kernels()`,
or the first CPU call of an operator that has a kernel, compiles or loads the C++ library.
"""

from compilespec.ops._build import load_kernels
from compilespec.ops.attention import attention
from compilespec.ops.packed_linear import pack_weight, packed_linear
from compilespec.ops.paged_attention import paged_attention
from compilespec.ops.quantized_linear import dynamic_int8_linear, quantized_linear
from compilespec.ops.sample import draw, sample

__all__ = [
    "attention",
    "draw",
    "dynamic_int8_linear",
    "load_kernels",
    "pack_weight",
    "packed_linear",
    "paged_attention",
    "quantized_linear",
    "sample",
]
