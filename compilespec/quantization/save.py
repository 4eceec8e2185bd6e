"""Quantized checkpoints in Hugging Face layout, as transformers and `compile` load them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import CheckpointError, InvalidOption
from compilespec.quantization.configs import HEAD, read_quantize
from compilespec.quantization.modules import quantize_module
from compilespec.tracing.load import load_target
from compilespec.tracing.quantized_weights import is_quantized


def save_quantized(
    model: nn.Module | str | Path,
    directory: str | Path,
    quantize: Any = "int8_weight_only",
    *,
    dtype: Any = None,
) -> Path:
    """Write a quantized copy of a transformers model: config.json, safetensors, tokenizer.

    `compilespec.compile(directory)` (and transformers' own `from_pretrained`) then starts from the
    quantized weights; the full-precision ones are never in memory.

    Args:
        model: a transformers module, a directory, or "demo", as for `compile`.
        quantize: as for `compile`.
    Returns: the directory.
    Raises: InvalidOption (not a transformers model), CheckpointError (a directory that cannot be
        made), and the errors of `quantize=`.
    """
    from transformers import PreTrainedModel, TorchAoConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    asked = read_quantize(quantize)  # raises where torchao is missing
    if asked is None:
        raise InvalidOption("save_quantized needs quantize=, a torchao config or its short name")
    from torchao.quantization import FqnToConfig

    target = load_target(model, dtype=dtype)
    if not isinstance(target.model, PreTrainedModel):
        raise InvalidOption(
            f"save_quantized writes transformers models, got {type(target.model).__name__}; save "
            f"another module's quantized copy with torch.save"
        )
    _make_directory(Path(directory))
    saved: Any = quantize_module(target.model, asked)
    device = next(target.model.parameters()).device
    saved.config = copy.deepcopy(saved.config)
    head = saved.get_output_embeddings()
    if head is not None and is_quantized(head.weight):
        saved.config.tie_word_embeddings = False  # the quantized head is no longer the embedding
    config, of_head = asked.config_on(device), asked.config_on(device, HEAD)
    if of_head != config:
        paths = [p for p, m in saved.named_modules() if is_quantized(getattr(m, "weight", None))]
        config = FqnToConfig({path: _stored(asked.config_on(device, path)) for path in paths})
    saved.config.quantization_config = TorchAoConfig(_stored(config))
    saved.hf_quantizer = AutoHfQuantizer.from_config(
        saved.config.quantization_config, pre_quantized=True
    )
    saved.save_pretrained(directory)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(directory)
    return Path(directory)


def _stored(config: Any) -> Any:
    """The torchao config that a checkpoint names for one of ours."""
    return getattr(config, "in_checkpoints", config)


def _make_directory(directory: Path) -> None:
    """Make the directory.  Where a file has its name, transformers only logs a line and writes
    nothing.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be made a directory ({error.strerror}); give another place"
        ) from error
