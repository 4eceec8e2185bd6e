"""Custom operators, one folder each: reference in torch, kernels in C++ and Triton, schema, fake.

Importing defines the operators (`torch.ops.compilespec.*`) and compiles nothing; `load_kernels()`,
or the first CPU call of an operator that has a kernel, compiles or loads the C++ library.  Triton
is imported by the first CUDA call.
"""

from compilespec.ops._build import load_kernels
from compilespec.ops.argmax_linear import argmax_linear, score_linear
from compilespec.ops.attention import attention
from compilespec.ops.causal_conv import cached_conv, causal_conv
from compilespec.ops.collectives import all_gather, all_reduce
from compilespec.ops.deep_rows import deep_rows
from compilespec.ops.grouped_linear import grouped_linear
from compilespec.ops.head_linear import head_linear
from compilespec.ops.masked_attention import (
    all_positions,
    cached,
    cached_keys,
    masked_attention,
)
from compilespec.ops.ngram_match import ngram_match
from compilespec.ops.packed_linear import pack_weight, packed_linear
from compilespec.ops.paged_attention import paged_attention
from compilespec.ops.quantized_linear import dynamic_int8_linear, quantized_linear
from compilespec.ops.recurrence import cached_recurrence, recurrence
from compilespec.ops.roll_window import roll_window
from compilespec.ops.row_topk import row_topk
from compilespec.ops.sample import draw, sample

__all__ = [
    "all_gather",
    "all_positions",
    "all_reduce",
    "argmax_linear",
    "attention",
    "cached",
    "cached_conv",
    "cached_keys",
    "cached_recurrence",
    "causal_conv",
    "deep_rows",
    "draw",
    "dynamic_int8_linear",
    "grouped_linear",
    "head_linear",
    "load_kernels",
    "masked_attention",
    "ngram_match",
    "pack_weight",
    "packed_linear",
    "paged_attention",
    "quantized_linear",
    "recurrence",
    "roll_window",
    "row_topk",
    "sample",
    "score_linear",
]
