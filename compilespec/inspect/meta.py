"""A target and a random drafter on the meta device, without memory, from a config.json alone."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from compilespec.errors import ModelNotFound, NotSupported
from compilespec.methods.base import Drafter
from compilespec.methods.registry import get_method
from compilespec.tracing.load import auto_class
from compilespec.tracing.placement import read_dtype
from compilespec.tracing.places import find_model
from compilespec.tracing.quiet import quiet_import
from compilespec.tracing.target_info import TargetInfo


def meta_target(model_name: str | Path, dtype: str | None = None) -> Any:
    """The model that a config.json describes, found as `find_model` does, with no weights.

    Raises: ModelNotFound where there is no config.json, or transformers cannot build it.
    """
    with quiet_import():
        from transformers import AutoConfig, PreTrainedModel  # noqa: F401

    place = find_model(model_name)
    directory = place.directory
    if place.gguf_file is not None:
        raise ModelNotFound(f"--meta: {place.path} holds no config.json; leave --meta out")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        wanted = read_dtype(dtype) or config.dtype or torch.bfloat16
        with torch.device("meta"):
            model = auto_class(directory, config).from_config(config, dtype=wanted)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"--meta: {directory}: {str(error).splitlines()[0]}") from error
    return model.eval()


def meta_draft(model: Any, spec: str) -> Drafter | None:
    """A random drafter of the method on the meta device; None where the method has none to load.

    Raises: NotSupported for a method without `random_head` or a `random_drafter` of such a target.
    """
    capabilities = get_method(spec).capabilities
    if not capabilities.needs_draft_weights:
        return None
    module = import_module(f"compilespec.methods.{capabilities.name}")
    make = getattr(module, "random_head", None)
    if make is None and capabilities.own_kv_cache:  # else it is made to fit the target's caches
        make = getattr(module, "random_drafter", None)
    if make is None:
        raise NotSupported(
            f"--meta: method {capabilities.name!r} has no random drafter; leave --meta out"
        )
    drafter: Drafter = make(_describe(model))
    return drafter


def _describe(model: Any) -> TargetInfo:
    """Read the target's facts off the module: tracing a large model twice would double the time."""
    config = model.config
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    return TargetInfo(
        hidden_size=head.shape[1],
        vocab_size=head.shape[0],
        num_layers=config.get_text_config().num_hidden_layers,
        dtype=head.dtype,
        device=head.device,
        embedding=embedding,
        lm_head=head,
        config=config,
        max_seq_len=getattr(config, "max_position_embeddings", 0),
    )
