"""The layouts of Medusa heads: files and names of tensors."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from compilespec.errors import CheckpointError
from compilespec.methods.checkpoint import read_tensors, tensor_names

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # beside those that all models have
PREFIX = re.compile(r"^medusa_heads?\.")

# Tensor names of the layouts, without the prefix -> those of `MedusaDrafter`.
NAMES = (
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"heads.\1.lm_head.weight"),
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"^lm_heads\.(\d+)\.weight$"), r"heads.\1.lm_head.weight"),
    (re.compile(r"^lm_head\.weight$"), r"heads.0.lm_head.weight"),
)


def read_heads(directory: str | Path) -> dict[str, Tensor]:
    """The tensors by the drafter's names; in the checkpoint of a whole model only the heads'."""
    names = tensor_names(directory, own_files=FILES)
    is_whole = any(PREFIX.match(name) for name in names)
    only = {name for name in names if PREFIX.match(name)} if is_whole else None
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(directory, only, own_files=FILES).items():
        new = canonical_name(name)
        if new in tensors:
            raise CheckpointError(
                f"tensor {new} appears twice, once as {name}; the checkpoint mixes two layouts"
            )
        tensors[new] = tensor
    return tensors


def canonical_name(name: str) -> str:
    """The drafter's name of a tensor of any layout; an unknown one as it is."""
    bare = PREFIX.sub("", name)
    for pattern, new in NAMES:
        if pattern.match(bare):
            return pattern.sub(new, bare)
    return bare
