"""The reader of prompts with images or sound, and the way its tower runs."""

from __future__ import annotations

from compilespec.errors import NotSupported, TraceError
from compilespec.pipeline.options import CompileOptions
from compilespec.progress import Reporter
from compilespec.runtime.compiled_tower import CompiledTower, compile_tower
from compilespec.runtime.executor import Geometry
from compilespec.runtime.image_prompts import ImageReader
from compilespec.tracing.load import Target
from compilespec.tracing.media import medium_of


def image_reader(
    target: Target, options: CompileOptions, geometry: Geometry, progress: Reporter
) -> tuple[ImageReader | None, str]:
    """The reader, and the way its tower runs, for `Engine.plan()`; None of text models, and of
    steps that take no embeddings.
    """
    medium = medium_of(target.model)
    if medium is None or geometry.embeds_width is None:
        return None, "none"
    compiled, how = _tower(target, options, progress)
    return ImageReader(target.model, medium, target.processor, geometry, compiled), how


def _tower(
    target: Target, options: CompileOptions, progress: Reporter
) -> tuple[CompiledTower | None, str]:
    if options.backend == "eager":
        return None, 'eager mode: backend="eager"'
    try:
        tower = compile_tower(target.model, progress)
    except (NotSupported, TraceError) as error:
        return None, f"eager mode: {error}"
    return tower, tower.describe()
