"""The scheduler's interface to a compiled program: two calls, one per phase, and a block table.

`Executor` is the border between the host's bookkeeping (requests, blocks, stop conditions: this
package)
and the device's step (graphs, caches, state buffers).  The scheduler never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compilespec.passes.splice.evidence import Evidence
from compilespec.program import HostCapabilities, ProgramConfig, Reach, tells_evidence
from compilespec.runtime.given_rows import GivenRows
from compilespec.runtime.sampling_rows import RowSampling, TokenLogprobs
from compilespec.tracing.adapter_files import LowRank


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A run of consecutive prompt tokens of one request.

    `next_token` is the true prompt token that follows the chunk; None when the chunk ends the
    prompt: the drafter is then fed the token that the target samples (hazard H-4).
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None
    num_logprobs: int | None = None  # best log-probabilities asked for at each prompt token
    given: GivenRows | None = None  # embeddings, in place of those of their ids
    ahead: Sequence[int] | None = None  # the number of later tokens that each token sees
    rope: Sequence[Sequence[int]] | None = None  # offsets of its rotary positions, by axis
    state_place: int | None = None  # receives the row's recurrent states after the call

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.next_token is None


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The facts of a program that the host needs; nothing changes in the engine's life."""

    config: ProgramConfig  # its K is the largest
    capabilities: HostCapabilities
    reach: Reach
    needs_catch_up: bool = False  # true: drafters must catch up after steps of K = 0
    embeds_width: int | None = None  # of prompts as embeddings; None: there are none
    deep_width: int = 0  # of features of an image's rows that layers get besides
    num_state_places: int | None = None  # copies of recurrent states; None: nothing is recurrent

    @property
    def tells_evidence(self) -> bool:
        """True where steps say how sure their drafts are."""
        return tells_evidence(self.config, self.capabilities)

    @property
    def finds_all(self) -> bool:
        """True where all drafts are found in texts: a step leaves as many as the largest K takes,
        at any K.
        """
        return self.capabilities.looks_up and not self.capabilities.combines


class Executor(Protocol):
    """Runs prefill and decode steps over persistent device state, one state row per running
    request.

    A step is launched, and its tokens are read with `collect`, each launch once and in order; the
    next one may be launched before.  Other writes of the host happen between the launches before
    and after them.
    """

    geometry: Geometry

    def set_blocks(
        self,
        row: int,
        blocks: Sequence[int],
        prefix: Sequence[int] = (),
        state_place: int | None = None,
    ) -> None:
        """Write `blocks` (physical block ids, logical order) as the block table of a row with a new
        owner; the rest is cleared.

        Args:
            prefix: the tokens that the first blocks hold already, whole blocks of them.
            state_place: where the recurrent states after `prefix` were kept.
        """

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Write more blocks of the row's owner, from logical block `start` on."""

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        """Write the sampling parameters of the row; call it before the request's first prefill."""

    def adapter_products(self) -> Mapping[str, tuple[int, int]]:
        """(out, in) of the products that adapters may change, by path."""

    def write_adapter(self, place: int, modules: Mapping[str, LowRank]) -> None:
        """Write an adapter's matrices into a place that no request uses; modules that it does not
        change get zeros.
        """

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that the last call gave the row, and of the `count` best
        ones at each place; for requests that ask for them.
        """

    def prompt_logprobs(self, row: int) -> dict[int, TokenLogprobs]:
        """Log-probabilities by position that the last call noted for this row's chunk, if it asked
        for them: of its tokens but the first, and of the token that follows it.
        """

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Write up to K draft ids a row for the next decode step; for programs whose drafts come
        from the host.
        """

    def read_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """The drafts that the next decode step will judge in each row, up to K; of a tree by node,
        PAD for a node without one.
        """

    def read_parents(self, rows: Sequence[int]) -> Sequence[list[int] | None]:
        """The parent of each draft in each row's tree: 0 the last token, i draft i; None for
        chains.
        """

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Remember a text, such as that of a request that ended, for drafters that read them."""

    def set_masks(self, rows: Sequence[int], masks_NSW: Tensor) -> None:
        """Write the allowed ids at the first rows of these rows' next window: int32, one bit for
        each id.
        """

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        """Run the chunks as one packed batch; returns a handle for `collect`."""

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> Any:
        """One verify step for these rows; returns a handle for `collect`.

        Args:
            num_draft_tokens: K of this step, one of `draft_counts`; None takes the largest.
        """

    def catch_up(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        """Let the drafter catch up, and draft, for rows that just had 1 to NUM_KEPT steps of K = 0
        in a row; `backlogs` has their numbers.
        """

    def collect(self, handle: Any) -> list[list[int]]:
        """Wait for a launch; the tokens of each row: 1..K+1 in decode, one for a finished prompt,
        none for an unfinished one.  No tokens where there must be some mean that the row's logits
        held NaN.
        """

    def evidence(self, handle: Any) -> Sequence[Evidence]:
        """The evidence about the drafts that a collected launch left, row by row; empty unless the
        geometry says `tells_evidence`.
        """

    def release_caches(self) -> int:
        """Give the memory of caches and kept states back until it is written again, while no
        request has a row; returns the bytes.  Raises: NotSupported.
        """

    def close(self) -> None:
        """Free the device buffers.  Another call retries the parts that failed in this one, and is
        harmless.
        """
