"""Reads LoRA adapters in the layout of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import CheckpointError, NotSupported, is_integer
from compilespec.tracing.checkpoint_files import listed, read_json, read_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_TENSOR = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$")
# Keys of the config that change an adapter's computation, besides those that are read below.
_REFUSED = {
    "use_dora": "DoRA: norms of the merged weights scale what it adds",
    "lora_bias": "biases of adapted products",
    "use_qalora": "QALoRA: products of pooled inputs",
    "use_bdlora": "BD-LoRA: block-diagonal matrices",
    "alora_invocation_tokens": "activated LoRA: it begins at a token",
    "layer_replication": "layers that it repeats",
    "modules_to_save": "whole modules",
    "target_parameters": "parameters that are no module's weight, such as those of experts",
    "trainable_token_indices": "embeddings of single tokens",
    "arrow_config": "Arrow: it chooses among other adapters",
    "monteclora_config": "MonteCLoRA: random matrices",
    "kasa_config": "KaSA: further singular values",
}
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the base


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """An adapter's addition to one product: x A^T B^T, the scale in B."""

    down: Tensor  # A, [rank, in]
    up: Tensor  # B, [out, rank]

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight that it changes."""
        return int(self.up.shape[0]), int(self.down.shape[1])


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter, on the CPU, by the paths of the modules that it changes."""

    source: str  # its place, for messages
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(part.rank for part in self.modules.values())


def read_adapter(directory: str | Path | Adapter) -> Adapter:
    """Read a directory that peft's `save_pretrained` wrote; an adapter that was read is itself.

    Returns: A in the file's dtype, B times the scale in float64.
    Raises:
        CheckpointError: a file is missing or damaged, a tensor has no partner, another rank or
            shape than the config says, or holds NaN or infinity.
        NotSupported: another kind than LoRA, or a variant that computes something else; named.
    Source: peft's `LoraConfig`, and `LoraLayer.update_layer` for the scale.
    """
    if isinstance(directory, Adapter):
        return directory
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(
            f"adapter: expected a directory with {CONFIG_FILE}, got {str(directory)!r}"
        )
    config = read_json(path / CONFIG_FILE)
    check_kind(path, config)
    pairs = _pairs(path, read_tensors(path, own_files=WEIGHT_FILES))
    return Adapter(
        source=str(path),
        modules={module: _low_rank(path, config, module, *pairs[module]) for module in pairs},
    )


def check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse anything but a plain LoRA.  Raises: NotSupported, CheckpointError."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise NotSupported(
            f"{path}: peft_type is {kind!r}; expected 'LORA', a LoRA adapter: others can be merged "
            "with peft's merge_and_unload, if it has that for them"
        )
    for key, what in _REFUSED.items():
        if config.get(key):
            raise NotSupported(
                f"{path}: {key} is set ({what}), which is not read; train the adapter without it, "
                "or merge it with peft's merge_and_unload and give the merged model"
            )
    begins = config.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_OTHER_BASE):
        raise NotSupported(
            f"{path}: init_lora_weights={begins!r} changed the base model as well; save it with "
            "peft's path_initial_model_for_weight_conversion, or give the merged model"
        )
    for key in ("r", "lora_alpha"):
        _check_factor(path, key, config.get(key))


def _check_factor(path: Path, key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: {key} must be a positive, finite number; got {value!r}"
        )


def _pairs(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by module.  Raises: CheckpointError where one is missing, or a tensor is neither."""
    found: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            others.append(name)
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    alone = [module for module, pair in found.items() if len(pair) < 2]
    problems = {"tensors that are no matrix A or B of a product": others, "A or B alone": alone}
    for what, names in problems.items():
        if names:
            raise CheckpointError(
                f"{path}: {what}: {listed(sorted(names))}; expected <module>.lora_A.weight and "
                "<module>.lora_B.weight of linear modules"
            )
    if not found:
        raise CheckpointError(f"{path}: no lora_A and lora_B in it; save the adapter again")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _low_rank(
    path: Path, config: Mapping[str, Any], module: str, down: Tensor, up: Tensor
) -> LowRank:
    """One module's matrices, checked, the scale in B."""
    shapes = f"A {list(down.shape)} and B {list(up.shape)}"
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise CheckpointError(
            f"{path}: {module} has {shapes}; expected [rank, in] and [out, rank], of a linear "
            "module"
        )
    rank = _of_module(config.get("rank_pattern"), module, config["r"])
    if not is_integer(rank) or down.shape[0] != rank:
        raise CheckpointError(
            f"{path}: {module} has {shapes}; {CONFIG_FILE} says rank {rank}: copy both files again"
        )
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise CheckpointError(f"{path}: {module} holds NaN or infinity; train the adapter again")
    alpha = _of_module(config.get("alpha_pattern"), module, config["lora_alpha"])
    _check_factor(path, "alpha_pattern", alpha)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down=down, up=up.double() * scale)


def _of_module(pattern: Any, module: str, default: Any) -> Any:
    """The value of the first key that ends the module's path, or is a regex for it."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(?:.*\.)?(?:{key})$", module):
            return value
    return default


def check_finite(adapter: Adapter, dtype: torch.dtype) -> None:
    """Refuse an adapter whose numbers the dtype of an engine cannot hold: in products over all
    adapters' matrices they would spoil every request.  Raises: CheckpointError.
    """
    for path, part in adapter.modules.items():
        for what, matrix in (("A", part.down), ("B times its scale", part.up)):
            if not torch.isfinite(matrix.to(dtype)).all():
                raise CheckpointError(
                    f"{adapter.source}: {what} of {path} holds numbers that are not finite in "
                    f"{dtype}; expected at most {torch.finfo(dtype).max:.3g} in size: lower "
                    "lora_alpha, or compile with another dtype"
                )


def describe_misfits(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> str:
    """The parts of an adapter that fit no product of a model; "" where all of it fits.

    Args:
        shapes: (out, in) of each product that an adapter may change, by path.
    """
    unknown = [module for module in adapter.modules if module not in shapes]
    wrong = [
        f"{module} {list(part.shape)} (it is {list(shapes[module])} in the model)"
        for module, part in adapter.modules.items()
        if module in shapes and part.shape != shapes[module]
    ]
    parts = []
    if unknown:
        parts.append(f"changes {listed(sorted(unknown))}, which the model has not")
    if wrong:
        parts.append(f"changes {listed(sorted(wrong))}")
    return " and ".join(parts)


def names_of(modules: Iterable[str]) -> str:
    """The last parts of paths, each once: "q_proj, v_proj"."""
    return listed(dict.fromkeys(module.rsplit(".", 1)[-1] for module in modules))
