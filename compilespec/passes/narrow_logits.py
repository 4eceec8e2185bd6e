"""Runs the head of a prefill only on the rows whose logits are used: the last of each prompt."""

from __future__ import annotations

from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role, set_outputs
from compilespec.passes.rows import newest_rows, take_rows
from compilespec.tracing.structure import find_head


def narrow_logits(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Gather rows `last_R` before the head's product: [1, T, V] becomes [1, R, V].  Numerics:
    rounding.  Torch IR.

    If the model applies more than element-wise operations to its logits, the rows are gathered
    after them: the same values, at the cost of a product over all rows.  Role made if prompts may
    ask for log-probabilities: `head_input`, [1, T, D], before the gather.
    """
    logits = find_role(gm, "logits")
    head = find_head(logits)
    if head is not None and head.rowwise:
        if ctx.config.features.prompt_logprobs:
            kept = emit(gm, lambda hidden: hidden.view_as(hidden), head.hidden, before=head.node)
            kept.meta["role"] = "head_input"
        rows = newest_rows(gm, ctx, before=head.node)
        narrowed = take_rows(gm, head.hidden, rows, before=head.node)
        head.node.replace_input_with(head.hidden, narrowed)
    else:
        following = logits.next
        rows = newest_rows(gm, ctx, before=following)
        narrowed = take_rows(gm, logits, rows, before=following)
        narrowed.meta["role"] = logits.meta.pop("role")
        set_outputs(gm, {"logits": narrowed})
    return 1
