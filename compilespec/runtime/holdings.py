"""State rows and cache blocks: those that are free, and those that each request holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compilespec.runtime.blocks import BlockPool, num_blocks_for
from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.kept_states import KeptCopies, places_to_keep
from compilespec.runtime.prefix_cache import PrefixCache
from compilespec.runtime.prefix_tiers import PrefixTiers
from compilespec.runtime.request import Request


class Holdings:
    """Gives requests rows and blocks, and takes them back; the caller tells the executor.

    A change that is cut short leaves rows and blocks in an unknown state; `free_all` resets them,
    and can be repeated if it is cut short itself.

    Args:
        shares_prefixes: find the blocks of known prompts again (see `PrefixCache`).
        tiers: find them beyond the pool as well.
    """

    def __init__(
        self, sizes: Geometry, *, shares_prefixes: bool, tiers: PrefixTiers | None = None
    ) -> None:
        self._sizes, self._shares_prefixes, self._tiers = sizes, shares_prefixes, tiers
        self.free_all(())

    def free_all(self, holders: Iterable[Request]) -> None:
        """Take everything from everybody, and forget the contents of all blocks."""
        for request in holders:
            _vacate(request)
        sizes, lookahead = self._sizes, self._sizes.reach.lookahead
        self.free_rows = list(range(sizes.config.max_batch_size))  # a heap: lowest row first
        self.pool = BlockPool(sizes.config.num_blocks)
        self.prefixes = (
            PrefixCache(self.pool, block_size=sizes.config.block_size, lookahead=lookahead)
            if self._shares_prefixes
            else None
        )
        has_states = sizes.num_state_places is not None and self._shares_prefixes
        self.states = (
            KeptCopies(sizes.num_state_places or 0, self._keep_state) if has_states else None
        )

    # --- taking and giving back ---

    def take(self, request: Request, running: Sequence[Request]) -> bool:
        """Give a request a row, and blocks for its tokens: blocks of a known prefix, which others
        may hold too, and new ones for the rest.

        Returns: False if it must wait: nothing is free, or its prefix is being computed.
        """
        if not self.free_rows:
            return False
        tokens = request.token_ids
        shared = self._find_prefix(request, tokens, running)
        if shared is None:
            return False
        self.pool.share(shared)
        own = self._allocate(self._num_blocks(request, len(tokens)) - len(shared), running)
        if own is None:
            self.pool.free(shared)
            return False
        num_found = len(shared) + request.num_stored
        if self._tiers is not None and request.num_stored:
            keys = request.block_keys[len(shared) : num_found]
            self._tiers.load("block", keys, own[: len(keys)])
            self._publish_blocks(keys, own)
        num_cached = num_found * self._sizes.config.block_size
        request.row, request.blocks = heapq.heappop(self.free_rows), shared + own
        request.prefill_token_ids, request.num_published = tokens, num_found
        request.num_cached = request.num_prefilled = request.num_computed = num_cached
        return True

    def grow(self, request: Request, num_committed: int) -> tuple[int, ...] | None:
        """Give it the blocks that it lacks for a step after `num_tokens` tokens.

        Returns: the new ones; None where too few are free.
        """
        missing = self._num_blocks(request, num_committed) - len(request.blocks)
        if missing <= 0:
            return ()
        blocks = self._allocate_blocks(missing)
        if blocks is not None:
            request.blocks += blocks
        return blocks

    def free(self, request: Request) -> None:
        """Take back all rows and blocks that it holds."""
        self.pool.free(request.blocks)
        heapq.heappush(self.free_rows, request.row)
        _vacate(request)

    def _allocate(self, count: int, running: Sequence[Request]) -> tuple[int, ...] | None:
        """Blocks for another request, unless the running ones would soon lack them."""
        most = self._sizes.config.max_seq_len
        growing = sum(len(r.blocks) < self._num_blocks(r, most) for r in running)
        return self._allocate_blocks(count) if count + growing <= self.pool.num_free else None

    def _allocate_blocks(self, count: int) -> tuple[int, ...] | None:
        """Blocks of the pool; the tiers take those that others might have found."""
        blocks = self.pool.allocate(count)
        if self.prefixes is not None and self.prefixes.evicted:
            evicted, self.prefixes.evicted = self.prefixes.evicted, {}
            if self._tiers is not None:
                self._tiers.keep_evicted("block", list(evicted), list(evicted.values()))
        return blocks

    def _num_blocks(self, request: Request, num_committed: int) -> int:
        """Blocks for a step after that many tokens, at most as many as it ever needs."""
        return num_blocks_for(self._sizes, min(num_committed, request.max_tokens))

    # --- shared prefixes ---

    def publish(self, request: Request) -> None:
        """Let others find the blocks that are complete, in the drafter's cache as well."""
        if self.prefixes is None:
            return
        self._settle_states(request)
        ahead = max(1, self.prefixes.lookahead)
        known = request.num_computed - request.backlog + 1 - ahead
        count = min(known // self._sizes.config.block_size, len(request.blocks))
        if count <= request.num_published:
            return
        self.prefixes.extend_keys(request.block_keys, request.key_ids, request.prefix_key)
        count = min(count, len(request.block_keys))
        new = slice(request.num_published, count)
        keys, blocks = request.block_keys[new], request.blocks[new]
        published = self._publish_blocks(keys, blocks)
        if self._tiers is not None:
            self._tiers.publish("block", list(published), list(published.values()))
        request.num_published = max(count, request.num_published)

    def _publish_blocks(self, keys: Sequence[bytes], blocks: Sequence[int]) -> dict[bytes, int]:
        """Publish blocks; returns those whose keys are new."""
        assert self.prefixes is not None, "the caller looked"
        pairs = dict(zip(keys, blocks, strict=False))
        return {k: block for k, block in pairs.items() if self.prefixes.publish(k, block)}

    def withdraw(self, request: Request) -> None:
        """Stop others from finding its blocks."""
        if self.prefixes is not None:
            self.prefixes.withdraw(request.blocks)
        if self.states is not None:
            self.states.forget(request.block_keys)
            request.state_ends = {}
        if self._tiers is not None:
            self._tiers.forget(request.block_keys)

    def withdraw_all(self, running: Iterable[Request]) -> None:
        """Stop all requests from finding any block that was written so far."""
        if self.prefixes is not None:
            self.prefixes.clear()
            for request in running:
                request.num_published = self._sizes.config.blocks_per_row
                request.state_ends = {}
        if self.states is not None:
            self.states.clear()
        if self._tiers is not None:
            self._tiers.forget_all()

    def renew_tiers(self, *, empties: bool) -> None:
        """The weights may be others now, after `withdraw_all`; see `PrefixTiers.renew`."""
        if self._tiers is not None:
            self._tiers.renew(empties=empties)

    def _find_prefix(
        self, request: Request, tokens: Sequence[int], running: Sequence[Request]
    ) -> tuple[int, ...] | None:
        """Blocks that hold the request's first tokens; None where another request is computing the
        next one, which samples of one prompt share.
        """
        request.state_place, request.state_ends, request.num_stored = None, {}, 0
        if self.prefixes is None or request.num_prompt_logprobs is not None:
            return ()
        if self.states is not None and any(request.ahead):
            return ()  # its chunks end where no token sees one behind the end
        keys = request.block_keys
        self.prefixes.extend_keys(keys, request.key_ids, request.prefix_key)
        found = self.prefixes.find(keys, len(tokens))
        if self.states is not None:
            return self._start_from_state(request, found, running)
        findable = keys[: self.prefixes.num_findable(len(tokens))]
        stored = self._stored(findable[len(found) :], running)
        if stored is None:
            return None
        request.num_stored = stored
        wanted = findable[len(found) + stored :][:1]
        is_coming = any(
            wanted[0] in other.block_keys[other.num_published :]
            for other in (running if wanted else ())
            if other.num_computed < len(other.prefill_token_ids)
        )
        return None if is_coming else found

    # --- beyond the pool ---

    def _stored(self, keys: Sequence[bytes], running: Sequence[Request]) -> int | None:
        """The number of blocks that the tiers have; None while they are being read."""
        while self._tiers is not None and (count := self._tiers.num_found(keys)):
            is_ready = self._tiers.ready(keys[:count], (), waits=not running)
            if is_ready is not None:
                return count if is_ready else None
        return 0

    def _stored_state(
        self, keys: Sequence[bytes], num_found: int, count: int, running: Sequence[Request]
    ) -> int | None:
        """The number of blocks before the deepest state for which the tiers have what the pool
        lacks; 0 where none lies deeper than `count`, and None while it is being read.

        Args:
            num_found: of the blocks of these keys, those in the pool.
        """
        assert self.states is not None
        while self._tiers is not None:
            known = num_found + self._tiers.num_found(keys[num_found:])
            kept, _ = self.states.find(keys[:known])
            deepest = self._tiers.deepest_state(keys[:known], kept)
            blocks, state = keys[num_found : deepest or kept], keys[deepest - 1 : deepest]
            deepest = deepest or kept
            if deepest <= count:
                break
            is_ready = self._tiers.ready(blocks, state, waits=not running)
            if is_ready is not None:
                return deepest if is_ready else None
        return 0

    def _settle_states(self, request: Request) -> None:
        """Copies of states that are known to be right may go to the tiers."""
        if self.states is None:
            return
        for end, key in request.state_ends.items():
            place = self.states.settle(key) if end <= request.num_computed else None
            if place is not None and self._tiers is not None:
                self._tiers.publish("state", [key], [place])

    def _keep_state(self, key: bytes, place: int) -> None:
        """Let the tiers take a copy of states that makes room."""
        if self._tiers is not None:
            self._tiers.keep_evicted("state", [key], [place])

    # --- states of recurrent layers ---

    def _start_from_state(
        self, request: Request, found: tuple[int, ...], running: Sequence[Request]
    ) -> tuple[int, ...] | None:
        """Choose the copy of the states that the request starts from, and where to keep others.

        Returns: those of the `found` blocks that lie before the copy; None where another request
            is about to keep a deeper one.
        """
        assert self.states is not None
        assert self.prefixes is not None
        keys, num_tokens = request.block_keys, request.num_tokens
        size, num_repeated = self._sizes.config.block_size, self._sizes.reach.num_repeated_tokens
        count, request.state_place = self.states.find(keys[: len(found)])
        findable = keys[: self.prefixes.num_findable(num_tokens)]
        stored = self._stored_state(findable, len(found), count, running)
        if stored is None:
            return None
        if stored:
            count, request.num_stored = stored, max(0, stored - len(found))
            request.state_place = self._load_state(keys[stored - 1])
        last = (num_tokens - 1 - num_repeated) // size
        last = min(last, self.prefixes.num_findable(num_tokens))
        request.state_ends = {
            number * size + num_repeated: keys[number - 1]
            for number in places_to_keep(last, count, max(len(found), count))
        }
        is_coming = any(
            end > other.num_computed and key in request.state_ends.values()
            for other in running
            for end, key in other.state_ends.items()
        )
        return None if is_coming else found[:count]

    def _load_state(self, key: bytes) -> int | None:
        """The place of a copy that is kept, or that the tiers have."""
        assert self.states is not None
        assert self._tiers is not None
        place = self.states.keep(key)
        if place is None:
            return self.states.find([key])[1]
        self._tiers.load("state", [key], [place])
        self.states.settle(key)
        return place

    def with_state_place(self, request: Request, chunk: PrefillChunk) -> PrefillChunk:
        """The chunk, with a place for the states after it where they are to be kept."""
        if self.states is None or chunk.end not in request.state_ends:
            return chunk
        return replace(chunk, state_place=self.states.keep(request.state_ends[chunk.end]))


def _vacate(request: Request) -> None:
    """Mark the request as holding nothing."""
    if request.processor is not None:
        request.processor.close()
    request.row, request.blocks, request.num_published = -1, (), 0
    request.num_prefilled = request.num_computed = request.num_cached = request.backlog = 0
    request.num_stored, request.evidence, request.state_place = 0, None, None
    request.state_ends = {}
