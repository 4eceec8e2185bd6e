"""What the scheduler asks of a compiled program: two calls, one per phase, and a block table.

`Executor` is the border between the host's bookkeeping (requests, blocks, stop conditions: this
package)
and the device's step (graphs, caches, state buffers).  The scheduler never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compilespec.passes.splice.evidence import Evidence
from compilespec.program import AdapterShape
from compilespec.runtime.given_rows import GivenRows
from compilespec.runtime.sampling_rows import RowSampling, TokenLogprobs
from compilespec.tracing.adapter_files import LowRank


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A run of consecutive prompt tokens of one request.

    `next_token` is the true prompt token that follows the chunk; None when the chunk ends the
    prompt, so
    that the drafter is fed the token the target samples (hazard H-4).
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None
    num_logprobs: int | None = None  # of the prompt's tokens, as many best ones are asked for
    given: GivenRows | None = None  # embeddings, in place of those of their ids
    ahead: Sequence[int] | None = None  # how many later tokens each of its tokens sees
    rope: Sequence[Sequence[int]] | None = None  # offsets of its rotary positions, by axis

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.next_token is None


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes a program was compiled for.  All of them are fixed for the engine's life."""

    max_batch_size: int  # state rows
    max_seq_len: int  # tokens per request, prompt included
    max_prefill_tokens: int  # packed tokens of one prefill call
    block_size: int  # tokens per cache block
    num_blocks: int  # blocks of the cache
    num_draft_tokens: int  # K; of a program with several, the largest
    dtype: torch.dtype = torch.float32  # of the model's products
    draft_counts: tuple[int, ...]  # every K that a step may have, rising; the largest is the last
    vocab_size: int
    reserve_tokens: (
        int  # slots past seq_len that one step may write, before the max_seq_len cap: 2K + 1
    )

    num_repeated_tokens: int = 0  # prompt tokens before a chunk that it must hold again
    host_processors: bool = False  # whether requests may have logits processors on the host
    prompt_logprobs: bool = False  # whether they may ask for those
    draft_tree: bool = False  # whether drafts are a tree
    needs_replay: bool = False  # whether rows must be replayed after steps of K = 0
    tells_evidence: bool = False  # whether steps say how sure their drafts are
    looks_up: bool = False  # whether drafts are found in texts, by steps of K = 0 as well
    combines: bool = False  # whether only some are, where they are surer than a model's
    adapters: AdapterShape | None = None  # the room for them; None: requests have none
    short_rope_limit: int | None = None  # longer requests have the long rotary table
    embeds_width: int | None = None  # of prompts as embeddings; None: there are none

    @property
    def finds_all(self) -> bool:
        """Whether all drafts are found in texts: every step leaves as many as the largest K takes,
        whatever its own K.
        """
        return self.looks_up and not self.combines

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_seq_len // self.block_size)


class Executor(Protocol):
    """Runs prefill and decode steps over persistent device state, one state row per running
    request.

    A step is launched, and its tokens are read with `collect`, each launch once and in order; the
    next one may be launched before.  What else the host writes takes its place between the launches
    before and after it.
    """

    geometry: Geometry

    def set_blocks(self, row: int, blocks: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """Write `blocks` (physical block ids, logical order) as the block table of a row with a new
        owner; the rest is cleared.

        Args:
            prefix: the tokens that the first blocks hold already, whole blocks of them.
        """

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Write more blocks of the row's owner, from logical block `start` on."""

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        """Write how the row's tokens are chosen; before the request's first prefill."""

    def adapter_products(self) -> Mapping[str, tuple[int, int]]:
        """(out, in) of the products that adapters may change, by path."""

    def write_adapter(self, slot: int, modules: Mapping[str, LowRank]) -> None:
        """Put an adapter into a slot that no request uses; modules that it does not change get
        zeros.
        """

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that the last call gave the row, and the `count` best
        ones' at each place; for requests that ask for them.
        """

    def prompt_logprobs(self, row: int) -> dict[int, TokenLogprobs]:
        """By position, those of the tokens that the last call's chunk of this row leads to: of a
        chunk that asks for them, its tokens but the first, and the one that follows it.
        """

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Write up to K draft ids a row for the next decode step; for programs whose drafts come
        from the host.
        """

    def read_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """The drafts that the next decode step will judge in each row, up to K of them; those of a
        tree by node, PAD where a node has none.
        """

    def read_parents(self, rows: Sequence[int]) -> Sequence[list[int] | None]:
        """Of each row's tree of drafts, what each follows: 0 the last token, i draft i; None where
        drafts are chains.
        """

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Remember the tokens of a request that ended, where the program's drafter reads such."""

    def set_masks(self, rows: Sequence[int], masks_NSW: Tensor) -> None:
        """Write which ids these rows may choose at the first rows of their next window: int32, a
        bit an id.
        """

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        """Run the chunks as one packed batch; returns a handle for `collect`."""

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> Any:
        """One verify step for these rows; returns a handle for `collect`.

        Args:
            num_draft_tokens: K of this step, one of `draft_counts`; None takes the largest.
        """

    def replay(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        """Bring the drafter up to date, and draft, for rows that had 1 to NUM_KEPT steps of K = 0
        in a row just now; `backlogs` says how many.
        """

    def collect(self, handle: Any) -> list[list[int]]:
        """Wait for a launch; the tokens of each row: 1..K+1 in decode, one for a finished prompt,
        none for an unfinished one.  None where there must be some: the row's logits held NaN.
        """

    def evidence(self, handle: Any) -> Sequence[Evidence]:
        """What a launch that was collected says of the drafts that it left, row by row; empty
        unless the geometry says `tells_evidence`.
        """

    def close(self) -> None:
        """Free the device buffers.  Another call does what failed in this one, and is harmless."""
