"""Quantized steps: which products the code calls, and what they read."""

from __future__ import annotations

from typing import Any

import torch

import compilespec
from compilespec.program import StepKey
from compilespec.quantization import configs
from tools.without_gpu.dry_run import dry_run
from tools.without_gpu.facts import facts
from tools.without_gpu.gpus import GPUS
from tools.without_gpu.machine_code import compile_step
from tools.without_gpu.steps import CUDA, on_cuda, passes_of_cuda

NAMES = ("int8_weight_only", "int8_dynamic", "float8_weight_only", "int4_weight_only")
_CONFIG = {
    "num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048,
    "max_position_embeddings": 512,
}  # fmt: skip


def quantized_step(name: str, arch: str = "sm_90") -> dict[str, Any]:
    """The greedy decode step of a small llama in bfloat16, quantized as `name` says.

    Real weights, since torchao quantizes no others.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **_CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    with passes_of_cuda():
        program = compilespec.trace(
            model,
            "none",
            quantize=configs.NAMES[name](CUDA),
            max_batch_size=4,
            max_seq_len=256,
            keep_graphs=False,
            greedy_step=True,
        )
    graph, gpu = program.graphs[StepKey("decode", 0, "greedy")], GPUS[arch]
    compiled = compile_step(on_cuda(graph.graph_module, graph.fakes, graph.inputs), gpu)
    found = facts(compiled, dry_run(compiled, gpu), program.buffers, context=0)
    return {"quantize": name, "faults": [], **found}
