"""The layouts of MTP modules: names of tensors, block-wise FP8, experts one by one.

The layout is recognised by content: `speculators_model_type`, then the names of the tensors.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.mtp.bodies import BODIES, name_in_block
from compilespec.tracing.checkpoint_files import ERNIE_MTP, LAYER, MTP, MTP_LAYER, mtp_layers

Layout = Literal["deepseek", "step", "mimo", "qwen3_next", "ernie", "speculators"]

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
    "emb_norm": "enorm",
    "hidden_norm": "hnorm",
    "linear_proj": "eh_proj",
}
LAST_NORM = "model.norm.weight"  # of the target, which ERNIE's modules have before the head
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
    if any(ERNIE_MTP.match(name) for name in names):
        return "ernie"
    if _any_starts(MTP, names, "fc."):
        return "qwen3_next"
    if _any_starts(MTP_LAYER, names, "input_proj."):
        return "mimo"
    own_head = any(name.endswith("shared_head.output.weight") for name in names)
    step = own_head or str(raw.get("model_type", "")).startswith("step3")
    return "step" if step else "deepseek"


def _any_starts(pattern: re.Pattern[str], names: Iterable[str], start: str) -> bool:
    return any((match := pattern.match(name)) and match[2].startswith(start) for name in names)


def module_names(raw: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The tensors of MTP modules: published name -> `steps.<i>.<name in MtpStep>`.

    DeepSeek's layout numbers the modules after the target's layers; they are recognised by their
    enorm.  Tensors that Qwen3-Next keeps once for all layers (fc and norms) are given to module 0.
    """
    names, body = list(names), body_of(raw)
    number = {layer: index for index, layer in enumerate(mtp_layers(names))}
    firsts = _first_layers(names)
    renamed: dict[str, str] = {}
    for name in names:
        if (match := LAYER.match(name)) and int(match[1]) in number:
            index, rest = number[int(match[1])], match[2]
        elif match := MTP_LAYER.match(name):
            index, rest = int(match[1]), match[2]
        elif match := ERNIE_MTP.match(name):
            stem = "" if match[1] == "block" else f"{match[1]}."
            index, rest = int(match[2]), stem + match[3]
        elif match := MTP.match(name):
            index, rest = _place(match, firsts)
        else:
            continue
        if body not in BODIES or not re.match(BODIES[body].dropped, rest):
            renamed[name] = _canonical(body, index, rest)
    if LAST_NORM in names and any(map(ERNIE_MTP.match, names)):
        renamed[LAST_NORM] = "steps.0.norm.weight"
    return renamed


def body_of(raw: Mapping[str, Any]) -> str:
    """The model type of the decoder layer."""
    key = "transformer_layer_config" if "speculators_model_type" in raw else "text_config"
    return str((raw.get(key) or raw).get("model_type"))


def _first_layers(names: Iterable[str]) -> list[int]:
    """The first layer of each module, where a module is several of Nemotron-H's layers."""
    found = [match for match in map(MTP.match, names) if match and match[1]]
    if not any(match[2].startswith("mixer.") for match in found):
        return []
    return sorted({int(match[1]) for match in found if match[2].startswith("eh_proj.")})


def _place(match: re.Match[str], firsts: list[int]) -> tuple[int, str]:
    """Module and inner name of a tensor of `mtp.*`; what belongs to no layer is module 0's."""
    if match[1] is None or not firsts:
        return int(match[1] or 0), match[2]
    layer, rest = int(match[1]), match[2]
    index = max(bisect.bisect_right(firsts, layer) - 1, 0)
    if rest.partition(".")[0] in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
        return index, rest
    return index, f"layers.{layer - firsts[index]}.{rest}"


def _canonical(body: str, index: int, rest: str) -> str:
    rest = _INSIDE.sub("", rest)
    stem, _, kind = rest.rpartition(".")
    stem = _RENAMED.get(stem, stem)
    own = stem in _OF_THE_MODULE
    return f"steps.{index}." + (f"{stem}.{kind}" if own else f"block.{name_in_block(body, rest)}")


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
    """Stack the published matrices per expert into transformers' gate_up_proj and down_proj, or
    up_proj and down_proj of experts without gates.

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
        gated = any(kind == "gate" for _, kind in parts)
        missing = [
            f"{prefix}.{number}.{kind}_proj.weight"
            for number in numbers
            for kind in ("gate", "up", "down")[not gated :]
            if (number, kind) not in parts
        ]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing[:8])}; copy the checkpoint again")
        first = [parts[number, "up"] for number in numbers]
        if gated:
            first = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers]
        stacked[f"{prefix}.{'gate_up' if gated else 'up'}_proj"] = torch.stack(first)
        stacked[f"{prefix}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return stacked
