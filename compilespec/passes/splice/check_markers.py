"""Checks that every attention layer is a marker with its traced sizes."""

from __future__ import annotations

import torch

from compilespec.errors import PassError
from compilespec.passes.splice.builder import Splice
from compilespec.program import markers, module_path


def check_markers(step: Splice) -> int:
    """Count the attention markers; refuse attention that no cache would serve.  Numerics: exact.
    Torch IR.
    """
    stateless = torch.nn.functional.scaled_dot_product_attention
    for node in step.graph.nodes:
        if node.op == "call_function" and node.target is stateless:
            raise PassError(
                f"{module_path(node) or 'the model'} calls scaled_dot_product_attention, which has "
                f"no cache"
            )
    return len(markers(step.gm))
