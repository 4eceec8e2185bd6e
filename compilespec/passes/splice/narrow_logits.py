"""Runs the head of a prefill only on the rows whose logits are used: the last of each prompt."""

from __future__ import annotations

from compilespec.passes.splice.builder import Splice, node_of
from compilespec.passes.splice.rows import newest_rows, take_rows
from compilespec.tracing.structure import find_head


def narrow_logits(step: Splice) -> int:
    """Gather rows `last_R` before the head's product: [1, T, V] becomes [1, R, V].  Numerics:
    rounding.  Torch IR.

    If the model applies more than element-wise operations to its logits, the rows are gathered
    after them: the same values, at the cost of a product over all rows.  Role made if prompts may
    ask for log-probabilities: `head_input`, [1, T, D], before the gather.
    """
    logits = step.roles.logits
    head = find_head(node_of(logits))
    if head is None or not head.rowwise:
        with step.after(logits):
            step.roles.logits = take_rows(step, logits, newest_rows(step))
        step.set_outputs({"logits": step.roles.logits})
        return 1
    with step.before(head.node):
        hidden = step.value(head.hidden)
        if step.ctx.config.features.prompt_logprobs:
            step.roles.head_input = hidden.view_as(hidden)
        narrowed = take_rows(step, hidden, newest_rows(step))
    head.node.replace_input_with(head.hidden, node_of(narrowed))
    return 1
