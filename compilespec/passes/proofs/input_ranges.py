"""The ranges and sizes that a step may rely on: of batch inputs, and of state between steps."""

from __future__ import annotations

from compilespec.passes.proofs.sizes import (
    BLOCK_SIZE,
    MAX_BATCH,
    NUM_BLOCKS,
    NUM_TABLE_BLOCKS,
    B,
    Expr,
    K,
    L,
    R,
    Range,
    T,
    V,
    integers,
)
from compilespec.program import NUM_KEPT

# What the host guarantees about batch inputs, and the ranges of state rows between steps.  Claims
# in `claims.py` check that every step keeps the latter; a test checks the host's guarantees.
CONTRACT: dict[str, Range] = {
    "row_B": integers(-1, MAX_BATCH - 1),
    "row_T": integers(-1, MAX_BATCH - 1),
    "commit_row_R": integers(-1, MAX_BATCH - 1),
    "ids_T": integers(-1, V - 1),
    "next_T": integers(-1, V - 1),
    "position_T": integers(0, L - 1),
    "owner_T": integers(0, R - 1),
    "given_T": integers(-1, T - 1),
    "ahead_T": integers(0, L - 1),
    "rope_time_T": integers(-L, L),
    "rope_height_T": integers(-L, L),
    "rope_width_T": integers(-L, L),
    "rope_delta_R": integers(-L, L),
    "long_rope_R": integers(0, 1),
    "last_R": integers(0, T - 1),
    "tokens_RS": integers(-1, V - 1),
    "history_RL": integers(-1, V - 1),
    "past_ML": integers(-1, V - 1),
    "processed_RL": integers(-1, V - 1),
    "withheld_R": integers(0, K),
    "ring_ids_RK": integers(0, V - 1),
    "kept_ids_RW": integers(0, V - 1),
    "backlog_B": integers(0, NUM_KEPT),
    "seq_len_R": integers(0, L),
    "absorbed_R": integers(0, L),
    "block_table_RM": integers(-1, NUM_BLOCKS - 1),
}


STATE_SHAPES: dict[str, tuple[Expr, ...]] = {
    "tokens_RS": (MAX_BATCH + 1, K + 1),
    "seq_len_R": (MAX_BATCH + 1,),
    "absorbed_R": (MAX_BATCH + 1,),
    "block_table_RM": (MAX_BATCH + 1, NUM_TABLE_BLOCKS),
    "cache": (NUM_BLOCKS, BLOCK_SIZE),
}


BATCH_SYMBOLS = {"B": B, "T": T, "R": R}
