"""Names the residual streams that the drafter reads, as the model's forward hooks would."""

from __future__ import annotations

from compilespec.errors import PassError
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.tracing.structure import describe, find_head, residual_streams, shape_of


def tap_hidden_states(step: Splice) -> int:
    """Give hs[k] the role `aux.<i>` for the i-th aux layer k.  Numerics: exact.  Runs on torch IR.

    hs[k] is the stream entering layer k; FINAL_NORM names the head's input.
    Source: requirement I7, as a pass instead of hooks.
    """
    head = find_head(node_of(step.roles.logits))
    width = (shape_of(head.hidden) or (None,))[-1] if head is not None else None
    if head is None or width is None:
        raise PassError(
            "tap_hidden_states: the model's output is not a product with a head, so its width is "
            "unknown"
        )
    streams = residual_streams(step.graph, node_of(step.roles.input_ids), width)
    for index, layer in enumerate(step.ctx.drafter.aux_layers):
        candidates = [head.hidden] if layer == FINAL_NORM else streams.get(layer, [])
        if len(candidates) != 1:
            raise PassError(
                f"tap_hidden_states: expected one residual stream entering layer {layer}, found "
                f"{describe(candidates)}; streams exist for layers {sorted(streams)}"
            )
        candidates[0].meta["role"] = f"aux.{index}"
    return len(step.ctx.drafter.aux_layers)
