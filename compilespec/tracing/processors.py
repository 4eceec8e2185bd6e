"""Loads the processor that makes a model's inputs from text and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compilespec.errors import ModelNotFound
from compilespec.tracing.checkpoint_files import reason
from compilespec.tracing.media import IMAGES, Medium
from compilespec.tracing.quiet import quiet_import

FILES = ("preprocessor_config.json", "processor_config.json")


def is_processor(tokenizer: Any) -> bool:
    """True where a processor reads images or sound, and has its own tokenizer for text."""
    reads = any(hasattr(tokenizer, name) for name in ("image_processor", "feature_extractor"))
    return reads and hasattr(tokenizer, "tokenizer")


def load_processor(directory: Path, medium: Medium) -> Any:
    """transformers' processor of a checkpoint; None where it has none, or Pillow is missing.

    Raises: ModelNotFound (a damaged file).
    """
    if not any((directory / name).is_file() for name in FILES):
        return None
    with quiet_import():
        from transformers import AutoProcessor
        from transformers.utils import is_vision_available
    if medium is IMAGES and not is_vision_available():
        return None
    try:
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files raise any error in transformers
        raise ModelNotFound(
            f"{directory}: the processor cannot be loaded: {reason(error)}"
        ) from error
    return processor if is_processor(processor) else None
