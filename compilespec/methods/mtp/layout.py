"""The layouts of MTP modules: names of tensors, block-wise FP8, experts one by one.

The layout is recognised by content: `speculators_model_type`, then the names of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from compilespec.errors import CheckpointError, NotSupported
from compilespec.tracing.checkpoint_files import LAYER, MTP, MTP_LAYER, mtp_layers

Layout = Literal["deepseek", "step", "mimo", "qwen3_next", "speculators"]

_INSIDE = re.compile(r"^(?:transformer|mtp_block)\.")

# Tensor names of a module, next to those of its block, as `MtpStep` has them.
_RENAMED: dict[str, str] = {
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "shared_head.output": "lm_head",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
}
_OF_THE_MODULE = ("enorm", "hnorm", "eh_proj", "norm", "lm_head", "embed_tokens")

SCALE = "_scale_inv"  # suffix of the scales of block-wise FP8 weights
FP8_BLOCK = (128, 128)
OTHER_QUANTISED = re.compile(
    r"(_blocks|_scales|\.qweight|\.qzeros|\.weight_packed|\.weight_scale|\.input_scale)$"
)
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def layout_of(raw: Mapping[str, Any], modules: Iterable[str]) -> Layout:
    """The layout of a checkpoint, from the names of its module tensors and its config."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind != "mtp":
            raise CheckpointError(f"speculators_model_type is {kind!r}, expected 'mtp'")
        return "speculators"
    names = list(modules)
    if any(MTP.match(name) for name in names):
        return "qwen3_next"
    if any(MTP_LAYER.match(name) for name in names):
        return "mimo"
    own_head = any(name.endswith("shared_head.output.weight") for name in names)
    step = own_head or str(raw.get("model_type", "")).startswith("step3")
    return "step" if step else "deepseek"


def module_names(raw: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The tensors of MTP modules: published name -> `steps.<i>.<name in MtpStep>`.

    DeepSeek's layout numbers the modules after the target's layers; they are recognised by their
    enorm.  Tensors that Qwen3-Next keeps once for all layers (fc and norms) are given to module 0.
    """
    names = list(names)
    number = {layer: index for index, layer in enumerate(mtp_layers(names))}
    renamed: dict[str, str] = {}
    for name in names:
        if (match := LAYER.match(name)) and int(match[1]) in number:
            renamed[name] = _canonical(number[int(match[1])], match[2])
        elif match := MTP_LAYER.match(name):
            renamed[name] = _canonical(int(match[1]), match[2])
        elif match := MTP.match(name):
            of_block = match[1] is not None
            rest = f"block.{match[2]}" if of_block else _canonical(0, match[2]).split(".", 2)[2]
            renamed[name] = f"steps.{int(match[1] or 0)}.{rest}"
    return renamed


def _canonical(index: int, rest: str) -> str:
    rest = _INSIDE.sub("", rest)
    stem, _, kind = rest.rpartition(".")
    stem = _RENAMED.get(stem, stem)
    inner = f"{stem}.{kind}" if stem in _OF_THE_MODULE else f"block.{rest}"
    return f"steps.{index}.{inner}"


def canonical_tensors(
    tensors: Mapping[str, Tensor], raw: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Dequantise, and stack the experts.

    Raises:
        NotSupported: a quantisation that is not block-wise FP8.
        CheckpointError: an expert lacks a matrix.
    """
    return stack_experts(dequantise(tensors, raw, dtype))


def dequantise(
    tensors: Mapping[str, Tensor], raw: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Dequantise block-wise FP8 (`weight` and `weight_scale_inv`, one scale per block) in float32,
    rounded to `dtype`; other tensors are unchanged.

    Raises:
        NotSupported: another quantisation; the message names the tensor.
    """
    text = raw.get("text_config") or {}
    quantisation = raw.get("quantization_config") or text.get("quantization_config") or {}
    block = tuple(quantisation.get("weight_block_size") or FP8_BLOCK)
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise CheckpointError(f"{name} scales a tensor that is not there")
            continue
        scale = tensors.get(name + SCALE)
        packed = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
        if OTHER_QUANTISED.search(name) or (packed and scale is None):
            raise NotSupported(
                f"{name} is quantised ({quantisation.get('quant_method', tensor.dtype)}); only "
                "block-wise FP8 with weight_scale_inv is read: give an unquantised draft="
            )
        plain[name] = tensor if scale is None else _unscale(name, tensor, scale, block).to(dtype)
    return plain


def _unscale(name: str, tensor: Tensor, scale: Tensor, block: tuple[int, ...]) -> Tensor:
    *experts, rows, columns = tensor.shape
    blocks = [*experts, -(-rows // block[0]), -(-columns // block[1])]
    if list(scale.shape) != blocks:
        raise CheckpointError(
            f"{name}{SCALE}: expected {blocks} scales of blocks {list(block)}, got "
            f"{list(scale.shape)}"
        )
    spread = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return tensor.float() * spread[..., :rows, :columns]


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the published matrices per expert into transformers' gate_up_proj and down_proj.

    Raises:
        CheckpointError: an expert lacks a matrix.
    """
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            stacked[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in experts.items():
        numbers = range(1 + max(number for number, _ in parts))
        missing = [
            f"{prefix}.{number}.{kind}_proj.weight"
            for number in numbers
            for kind in ("gate", "up", "down")
            if (number, kind) not in parts
        ]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing[:8])}; copy the checkpoint again")
        stacked[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in numbers]
        )
        stacked[f"{prefix}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return stacked
