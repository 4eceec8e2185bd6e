"""References of the passes that change a step's interface, in plain Python.

A reference takes the graph before its pass as a callable and one call's inputs, and returns what
the graph after the pass must compute.  It shares no code with the pass, so that a fault in one
shows against the other.
"""

from __future__ import annotations

from compilespec.passes.references.acceptance import splice_acceptance
from compilespec.passes.references.adapters import add_adapters
from compilespec.passes.references.base import Before, Case, Reference, Values
from compilespec.passes.references.draft_loops import splice_draft_loop, trim_draft_head
from compilespec.passes.references.embeds import add_deep_rows, read_embeds
from compilespec.passes.references.evidence import report_evidence
from compilespec.passes.references.kept_inputs import commit_drafts, read_kept
from compilespec.passes.references.kept_masks import insert_cached_keys
from compilespec.passes.references.process_logits import process_logits
from compilespec.passes.references.rope import (
    read_long_rope,
    read_rope_offsets,
    rope_arguments,
)
from compilespec.passes.references.splices import (
    commit_state,
    insert_paged_attention,
    insert_recurrent_state,
    narrow_logits,
    output_head_input,
    output_hidden_states,
    read_state,
    shift_hidden_states,
    tap_hidden_states,
)
from compilespec.passes.references.trees import keep_path

__all__ = [
    "Before",
    "Case",
    "Reference",
    "Values",
    "add_adapters",
    "add_deep_rows",
    "commit_drafts",
    "commit_state",
    "insert_cached_keys",
    "insert_paged_attention",
    "insert_recurrent_state",
    "keep_path",
    "narrow_logits",
    "output_head_input",
    "output_hidden_states",
    "process_logits",
    "read_embeds",
    "read_kept",
    "read_long_rope",
    "read_rope_offsets",
    "read_state",
    "report_evidence",
    "rope_arguments",
    "shift_hidden_states",
    "splice_acceptance",
    "splice_draft_loop",
    "tap_hidden_states",
    "trim_draft_head",
]
