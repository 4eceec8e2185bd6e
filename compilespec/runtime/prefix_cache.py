"""Blocks of the KV cache found again by the tokens that they hold.

A full block is published under the chain hash of all tokens up to its end, and of the `lookahead`
tokens after it: the drafter's cache pairs a position with the tokens that follow it, so its last
entries are right only before the same successors.  So every block that is found is right as a
whole, for target and drafter.  Only full blocks are shared; nothing is copied but the states of
recurrent layers (`KeptCopies`).  Seeds and sampling
parameters are not hashed, because keys and values do not depend on them; the adapter is, at the
beginning of the chain.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from compilespec.program import SpecProgram, is_recurrent
from compilespec.runtime.blocks import BlockPool

# State rows with a request's tokens in them, which the host completes after a prefix was found.
TOKENS_BY_POSITION = ("history_RL", "processed_RL")
# State rows that every prefill fills from the start, or that the host writes.
REBUILT_STATE = frozenset(
    {
        "block_table_RM", "tokens_RS", "parents_RS", "seq_len_R", "withheld_R", "sampling_RF",
        "sampling_RI", "bias_RV", "context_RL", "mask_RSW", "processor_R", "logprob_RSN",
        "logprob_id_RSN", "ring_hidden_RKD", "ring_ids_RK", "kept_aux_RWE", "kept_ids_RW",
        "draft_prob_RKV", "child_prob_RIV", "past_ML", "adapter_R", "embeds_PD", "deep_PE",
        "rope_delta_R", "long_rope_R", "absorbed_R",
        *TOKENS_BY_POSITION,
    }
)  # fmt: skip


class PrefixCache:
    """The published blocks, by the tokens that they hold.

    Args:
        lookahead: the number of tokens after a position on which its drafter entries depend.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, lookahead: int) -> None:
        self.block_size, self.lookahead = block_size, lookahead
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.evicted: dict[bytes, int] = {}  # blocks of the pool's last allocation, by their keys
        pool.on_reuse = self._evict

    def __len__(self) -> int:
        return len(self._block_of)

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], first: bytes = b"") -> None:
        """Append the keys of the blocks of `tokens` whose successors are among them.

        Args:
            keys: those of the first blocks, from an earlier call with fewer of the same tokens.
            first: begins the chain, such as an adapter's key.
        """
        size = self.block_size
        for start in range(len(keys) * size, len(tokens) - size - self.lookahead + 1, size):
            own = tokens[start : start + size + self.lookahead]
            before = keys[-1] if keys else first
            keys.append(
                hashlib.blake2b(before + array("q", own).tobytes(), digest_size=16).digest()
            )

    def find(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, ...]:
        """The published blocks of the longest known beginning of a prompt."""
        found = []
        for key in keys[: self.num_findable(num_tokens)]:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return tuple(found)

    def num_findable(self, num_tokens: int) -> int:
        """The number of a prompt's blocks that may be found: the last token, or the last
        `lookahead` tokens, are always computed, because the step needs their hidden states.
        """
        return max(0, num_tokens - max(1, self.lookahead)) // self.block_size

    def publish(self, key: bytes, block: int) -> bool:
        """Make a held, full block whose successors are committed findable for others; False where
        there is one.
        """
        if key in self._block_of:
            return False
        self._pool.keep(block)
        self._block_of[key], self._key_of[block] = block, key
        return True

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Stop others from finding these blocks; requests that hold them are not affected."""
        for block in blocks:
            if block in self._key_of:
                self._pool.discard(block)
                self._forget(block)

    def clear(self) -> None:
        self.withdraw(tuple(self._key_of))

    def _evict(self, block: int) -> None:
        self.evicted[self._key_of[block]] = block
        self._forget(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]


def why_not(program: SpecProgram) -> str | None:
    """The reason why requests of this program cannot share the blocks of a prefix; None: they
    can.
    """
    drafter = program.drafter
    if drafter is not None and drafter.recorder is not None:
        return "the hidden states of every prompt token are recorded"
    if drafter is not None and drafter.kv_block_sizes:
        return "the drafter's layers have other blocks, which are not found by tokens"
    for buffer in program.buffers:
        is_of_rows = buffer.kind == "state" and not buffer.name.startswith("adapter.")
        if is_of_rows and not (buffer.name in REBUILT_STATE or is_recurrent(buffer)):
            return f"the step reads a whole prompt into {buffer.name}"
    return None
