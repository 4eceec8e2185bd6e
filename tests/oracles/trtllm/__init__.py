"""Small algorithms of TensorRT-LLM and vLLM as plain torch functions: definitions to test against.

Each docstring names its requirement (`docs/requirements.md`).  "contexts" are prefill requests,
which come first in a batch; "generations" are decode requests of K+1 rows each.  No function writes
into its arguments (H-8, H-14); it returns what changes.
"""

from __future__ import annotations

from tests.oracles.trtllm.accept import (
    accept_relaxed,
    accept_strict,
    force_num_accepted,
    skip_forward,
)
from tests.oracles.trtllm.metadata import MTPMetadata, SpecMetadata
from tests.oracles.trtllm.mtp import (
    MTPPools,
    committed_window,
    eagle_draft_lens,
    eagle_later_lens,
    eagle_step0_gather,
    update_pool,
    vanilla_context_inputs,
    vanilla_draft_loop,
    vanilla_generation_inputs,
    vanilla_lens,
)
from tests.oracles.trtllm.prepare import (
    PreparedPrefill,
    advance_positions,
    compact_inputs,
    last_token_indices,
    next_new_tokens,
    prepare_prefill_inputs,
    shift_context_inputs,
)
from tests.oracles.trtllm.sampling import (
    compute_probs_and_sample_next_token,
    sample_greedy,
    sampling_rows,
)

__all__ = [
    "MTPMetadata",
    "MTPPools",
    "PreparedPrefill",
    "SpecMetadata",
    "accept_relaxed",
    "accept_strict",
    "advance_positions",
    "committed_window",
    "compact_inputs",
    "compute_probs_and_sample_next_token",
    "eagle_draft_lens",
    "eagle_later_lens",
    "eagle_step0_gather",
    "force_num_accepted",
    "last_token_indices",
    "next_new_tokens",
    "prepare_prefill_inputs",
    "sample_greedy",
    "sampling_rows",
    "shift_context_inputs",
    "skip_forward",
    "update_pool",
    "vanilla_context_inputs",
    "vanilla_draft_loop",
    "vanilla_generation_inputs",
    "vanilla_lens",
]
