"""LoRA adapters on disk, in peft's layout, and what they are by definition."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compilespec.program import AdapterShape

TOY_ADAPTERS = AdapterShape(num_places=2, rank=8, modules=("layer",))  # of the toy executor
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: nn.Module,
    names: Sequence[str] = EVERYWHERE,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.5,
    tensors: Mapping[str, Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """A random adapter of the modules with these last names; returns its directory.

    Args:
        size: of what it adds, as a part of the weight's.
        tensors: put in, or left out where None, by the names of the file.
    """
    generator, made = torch.Generator().manual_seed(seed), {}
    ranks, alpha = config.get("rank_pattern") or {}, config.get("lora_alpha", 2 * rank)
    for path, module in model.named_modules():
        if path.rsplit(".", 1)[-1] not in names or not hasattr(module, "weight"):
            continue
        shape = module.weight.shape
        out, inner = shape[::-1] if type(module).__name__ == "Conv1D" else shape
        own = next((r for key, r in ranks.items() if path.endswith(key)), rank)
        strength = size * float(module.weight.detach().double().std()) * math.sqrt(own) / 2
        for half, half_shape in (("A", (own, inner)), ("B", (out, own))):
            tensor = torch.randn(half_shape, generator=generator, dtype=torch.float64)
            tensor *= 1 / math.sqrt(own) if half == "A" else strength
            made[f"base_model.model.{path}.lora_{half}.weight"] = tensor.to(torch.float32)
    made |= tensors or {}
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}
    save_file(kept, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(names),
        "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": None, **config,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def merged_by_hand(model: nn.Module, directory: Path) -> nn.Module:
    """A copy of the model with W + scale * B A in place of each W, entry by entry of the file."""
    from safetensors.torch import load_file

    merged = copy.deepcopy(model)
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    for path, module in merged.named_modules():
        down = tensors.get(f"base_model.model.{path}.lora_A.weight")
        up = tensors.get(f"base_model.model.{path}.lora_B.weight")
        if down is None or up is None:
            continue
        alphas = config.get("alpha_pattern") or {}
        alpha = next((a for k, a in alphas.items() if path.endswith(k)), config["lora_alpha"])
        rank = down.shape[0]
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        change = scale * (up.double() @ down.double())
        if type(module).__name__ == "Conv1D":
            change = change.T
        with torch.no_grad():
            module.weight.copy_(module.weight.double() + change)
    return merged


def save_toy_adapter(directory: Path, mark: int, rank: int = 2) -> Path:
    """An adapter that the toy target takes for the token `mark` before all others."""
    model = nn.ModuleDict({"layer": nn.Linear(7, 5)})
    up = torch.zeros(5, rank)
    up[0, 0] = mark
    halves = {"A": torch.ones(rank, 7), "B": up}
    tensors = {f"base_model.model.layer.lora_{half}.weight": t for half, t in halves.items()}
    return write_adapter(directory, model, ("layer",), rank=rank, lora_alpha=rank, tensors=tensors)
