"""The parts of a program that an explanation of lost drafts reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.inspect.why import explain
from compilespec.methods.base import Method
from compilespec.methods.find import find_draft
from compilespec.pipeline.options import CompileOptions
from compilespec.program import SpecProgram, Traced
from compilespec.tracing.load import Target, load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target


def explainer(
    program: SpecProgram,
    target: Target,
    method: Method,
    draft: str | Path | nn.Module | Callable[..., Any] | None,
    options: CompileOptions,
    method_options: Mapping[str, Any],
) -> Callable[..., Any] | None:
    """`inspect.why.explain` of the program; None where ranks hold parts of the weights."""
    if options.sharding is not None:
        return None
    directory = target.directory
    quantized = (options.quantization, options.draft_quantization) != (None, None)
    is_stored = directory is not None and not isinstance(draft, nn.Module)

    def originals() -> tuple[Traced, Any]:
        plain = load_target(directory or "", dtype=target.dtype, device=target.device)
        traced = trace_target(plain.model)
        found = find_draft(draft, plain, method.capabilities)
        info = describe_target(traced, plain)
        return traced, method.load(found, info, method_options)  # type: ignore[arg-type]

    def stored() -> Mapping[str, Any]:
        if draft is not None and not isinstance(draft, str | Path):
            return {}
        if not method.capabilities.needs_draft_weights:
            return {}
        found = find_draft(draft, target, method.capabilities)
        file = found / "config.json" if isinstance(found, Path) else None
        return {} if file is None or not file.is_file() else json.loads(file.read_text())

    loads = originals if quantized and is_stored else None
    return partial(explain, program=program, originals=loads, stored=stored)
