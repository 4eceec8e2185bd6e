"""A deterministic toy program behind the `Executor` protocol, strict about every slot it touches.

The toy target's next token is a hash of ALL tokens before it, read back from a paged cache through
the row's block table.  So a wrong block, a stale slot, a skipped prompt token or a row mix-up
changes the tokens or raises.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from compilespec.methods.user import HostDrafter
from compilespec.program import NO_ADAPTER, ProgramConfig, Reach
from compilespec.runtime.detokenize import Tokenizer
from compilespec.runtime.engine import Engine
from compilespec.runtime.executor import Executor, Geometry, PrefillChunk
from compilespec.runtime.sampling_rows import RowSampling, TokenLogprobs
from compilespec.runtime.serving import EngineReport, ServingOptions
from compilespec.tracing.adapter_files import LowRank

JUNK = -7  # a token that nobody may be given


VOCAB = 259


class FakeExecutorError(AssertionError):
    """The scheduler broke the protocol."""


def engine_over(
    executor: Executor,
    tokenizer: Tokenizer | None = None,
    *,
    lookahead: int | None = None,
    graphs: Mapping[str, str] | None = None,
    drafter: Any = None,
    **options: Any,
) -> Engine:
    """An engine with these `ServingOptions` and fields of `EngineReport`.

    Args:
        graphs, drafter: of the program.
        lookahead: share prefixes whose entries depend on so many tokens after them; None: do not.
    """
    if lookahead is not None:
        sizes = executor.geometry
        reach = dataclasses.replace(sizes.reach, lookahead=lookahead)
        executor.geometry = dataclasses.replace(sizes, reach=reach)
    report = {name: options.pop(name) for name in [*options] if name in names_of(EngineReport)}
    program: Any = SimpleNamespace(graphs=graphs or {}, drafter=drafter)
    serving = ServingOptions(
        program=program,
        report=EngineReport(**report),
        shares_prefixes=lookahead is not None,
        **options,
    )
    return Engine(executor, tokenizer, serving)


def names_of(record: type) -> set[str]:
    return {one.name for one in dataclasses.fields(record)}


def geometry(**changes: Any) -> Geometry:
    """Small awkward sizes; vocabulary and blocks are no powers of two."""
    num_draft_tokens = changes.setdefault("num_draft_tokens", 3)
    sizes = {
        "max_batch_size": 4, "max_seq_len": 96, "max_prefill_tokens": 48, "block_size": 8,
        "num_blocks": 48, "vocab_size": VOCAB, "dtype": torch.float32,
        "device": torch.device("cpu"),
    }  # fmt: skip
    own, reach = (
        {name: changes.pop(name) for name in [*changes] if name in names_of(record)}
        for record in (ProgramConfig, Reach)
    )
    facts = {
        "config": ProgramConfig(**{**sizes, **own}),
        "reach": Reach(**{"num_reserved_tokens": 2 * num_draft_tokens + 1, **reach}),
        "capabilities": HostDrafter.capabilities,  # whose steps say nothing of their drafts
    }
    return Geometry(**{**facts, **changes})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt, another one for every length and seed."""
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(VOCAB) for _ in range(length)]


def toy_next(tokens: Sequence[int], vocab_size: int) -> int:
    """The toy target: greedy next token of a context."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens)) % vocab_size


def toy_decode(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """Plain decoding of the toy target: what every schedule must reproduce."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class _Row:
    blocks: list[int] = field(default_factory=list)
    num_committed: int = 0  # tokens whose KV is in the cache for good
    num_prefix: int = 0  # of these, those found in the cache
    last: int | None = None  # last emitted token, once the prompt is in
    drafts: list[int] = field(default_factory=list)
    expected: int | None = None  # token that the next prefill chunk must go on with
    live: bool = False
    adapter_place: int = NO_ADAPTER


@dataclass
class _Handle:
    rows: list[int]
    tokens: list[list[int]]
    collected: bool = False


class FakeExecutor:
    """Implements `Executor` on plain lists.

    Args:
        hit_rate: how often the drafter proposes what the target will say, 0.0 to 1.0.
        fail: called with the phase before every call; may raise.
        next_token: the target, a function of the whole context; the hash by default.
        lookahead: tokens after a position that its entry in the drafter's cache depends on.
        spoil: called with phase and row at every launch; True: the row's logits hold NaN.
    """

    def __init__(
        self,
        sizes: Geometry | None = None,
        *,
        hit_rate: float = 0.7,
        fail: Callable[[str], None] = lambda phase: None,
        next_token: Callable[[Sequence[int]], int] | None = None,
        lookahead: int = 0,
        spoil: Callable[[str, int], bool] = lambda phase, row: False,
    ) -> None:
        self.geometry = sizes or geometry()
        self.config = self.geometry.config
        self.hit_rate = hit_rate
        self.fail = fail
        self.spoil = spoil
        self.next_token = next_token or (lambda t: toy_next(t, self.geometry.config.vocab_size))
        self.lookahead = lookahead
        self.closed = False
        self.prefill_calls: list[tuple[PrefillChunk, ...]] = []
        self.decode_calls: list[tuple[int, ...]] = []
        self.adapters: dict[int, int] = {}  # by place
        self.max_in_flight = 0  # launches that waited to be read at once
        self._in_flight: list[_Handle] = []
        self._states: dict[int | None, list[int]] = {}  # by place: the tokens they have taken in
        self._rows = [_Row() for _ in range(self.config.max_batch_size)]
        num_slots = self.config.num_blocks * self.config.block_size
        self._cache: list[int | None] = [None] * num_slots
        self._following: list[tuple[int, ...] | None] = [None] * num_slots  # the drafter's cache

    def set_blocks(
        self,
        row: int,
        blocks: Sequence[int],
        prefix: Sequence[int] = (),
        state_place: int | None = None,
    ) -> None:
        _check(not self.closed, "called after close")
        _check(not self._is_named(row), f"row {row} changes hands with a step in flight")
        num_shared, rest = divmod(len(prefix), self.config.block_size)
        _check(rest == 0, "a prefix of whole blocks")
        self._rows[row] = _Row(
            num_committed=len(prefix), num_prefix=len(prefix), live=True, blocks=list(blocks)
        )
        if self.geometry.num_state_places is not None and prefix:
            _check(self._states.get(state_place) == list(prefix), "states of other tokens")
        self._take(row, blocks[num_shared:])
        self._check_table(row)
        _check(self._read(self._rows[row], len(prefix)) == list(prefix), "a prefix of other tokens")

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        own = self._live_row(row)
        _check(start == len(own.blocks), f"row {row}: block {start} after {len(own.blocks)}")
        own.blocks += blocks
        self._take(row, blocks)
        self._check_table(row)

    def keep_text(self, tokens: Sequence[int]) -> None:
        _check(not self.closed, "called after close")

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        _check(self._rows[row].live, f"row {row}: sampling of a row without blocks")
        _check(sampling.params.temperature == 0, "the toy target is greedy")
        self._rows[row].adapter_place = sampling.adapter

    def adapter_products(self) -> Mapping[str, tuple[int, int]]:
        return {"layer": (5, 7)}

    def write_adapter(self, place: int, modules: Mapping[str, LowRank]) -> None:
        using = [index for index, row in enumerate(self._rows) if row.adapter_place == place]
        _check(not any(map(self._is_named, using)), "an adapter changes with a step in flight")
        self.adapters[place] = int(modules["layer"].up.sum()) if modules else 0

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """-token, so that tests see whose they are; those of the last call only."""
        _check(not self._is_named(row), f"row {row}: logprobs while a later step is in flight")
        return [TokenLogprobs(token_id=t, logprob=-float(t), top={}) for t in tokens]

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> _Handle:
        _check(not self.closed, "called after close")
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        _check(0 < num_tokens <= self.config.max_prefill_tokens, f"{num_tokens} packed tokens")
        _check(all(chunk.tokens for chunk in chunks), "an empty chunk")
        _check(len({chunk.row for chunk in chunks}) == len(chunks), "a row twice in one prefill")
        self.fail("prefill")
        self.prefill_calls.append(tuple(chunks))
        tokens = [self._prefill_chunk(chunk) for chunk in chunks]
        return self._launched("prefill", [chunk.row for chunk in chunks], tokens)

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> _Handle:
        _check(not self.closed, "called after close")
        _check(num_draft_tokens in (None, self.config.num_draft_tokens), "the toy has one K")
        _check(0 < len(rows) <= self.config.max_batch_size, f"{len(rows)} rows")
        _check(len(set(rows)) == len(rows), "a row twice in one decode")
        self.fail("decode")
        self.decode_calls.append(tuple(rows))
        return self._launched("decode", list(rows), [self._decode_row(row) for row in rows])

    def catch_up(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        raise FakeExecutorError("the toy has one K")

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        for row, ids in zip(rows, drafts, strict=True):
            self._live_row(row).drafts = list(ids)

    def collect(self, handle: _Handle) -> list[list[int]]:
        _check(self._in_flight[:1] == [handle], "launches are read once, in order")
        self.fail("collect")
        return self._in_flight.pop(0).tokens

    def release_caches(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def _launched(self, phase: str, rows: list[int], tokens: list[list[int]]) -> _Handle:
        for index, row in enumerate(rows):
            if self.spoil(phase, row):
                tokens[index] = []
        self._in_flight.append(_Handle(rows=rows, tokens=tokens))
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))
        return self._in_flight[-1]

    def _is_named(self, row: int) -> bool:
        return any(row in handle.rows for handle in self._in_flight)

    def _take(self, row: int, blocks: Sequence[int]) -> None:
        """New owners write before they read; whoever held a block may never run again."""
        for index, other in enumerate(self._rows):
            if index != row and set(other.blocks) & set(blocks):
                _check(not self._is_named(index), "a block changes hands with a step in flight")
                other.live = False
        size = self.config.block_size
        for block in blocks:  # poison
            self._cache[block * size : (block + 1) * size] = [None] * size
            self._following[block * size : (block + 1) * size] = [None] * size

    def _check_table(self, row: int) -> None:
        blocks = self._rows[row].blocks
        _check(len(set(blocks)) == len(blocks), f"row {row}: a block twice in one table")
        _check(len(blocks) <= self.config.blocks_per_row, f"row {row}: too many blocks")
        _check(all(0 <= b < self.config.num_blocks for b in blocks), "block outside the cache")

    def _prefill_chunk(self, chunk: PrefillChunk) -> list[int]:
        row, sizes = self._live_row(chunk.row), self.geometry
        _check(row.last is None, f"row {chunk.row}: prefill after its prompt ended")
        start = max(row.num_prefix, row.num_committed - sizes.reach.num_repeated_tokens)
        _check(chunk.start == start, f"row {chunk.row}: chunk starts at {chunk.start}")
        end = chunk.start + len(chunk.tokens)
        _check(end > row.num_committed, f"row {chunk.row}: a chunk of nothing new")
        known = self._read(row, row.num_committed)[chunk.start :]
        _check(chunk.tokens[: len(known)] == tuple(known), f"row {chunk.row}: other tokens again")
        if row.expected is not None:
            _check(chunk.tokens[len(known)] == row.expected, f"row {chunk.row}: wrong next_token")
        for offset, token in enumerate(chunk.tokens):
            self._write(row, chunk.start + offset, token)
        row.num_committed, row.expected = end, chunk.next_token
        if chunk.next_token is None:
            row.last = self._next(row, self._read(row, end))
        ahead = [*chunk.tokens, row.last if row.last is not None else chunk.next_token]
        for offset in range(len(chunk.tokens)):
            self._write_following(row, chunk.start + offset, ahead[offset + 1 :])
        if chunk.state_place is not None:
            _check(row.last is None, "states of a prompt that ended: its decode steps change them")
            _check(0 <= chunk.state_place < (sizes.num_state_places or 0), "no such place")
            self._states[chunk.state_place] = self._read(row, end - sizes.reach.num_repeated_tokens)
        if row.last is None:
            return []
        self._draft(row)
        return [row.last]

    def _decode_row(self, index: int) -> list[int]:
        sizes, row = self.geometry, self._live_row(index)
        _check(row.last is not None, f"row {index}: decode before its prompt is in")
        window, start = [row.last, *row.drafts], row.num_committed
        last = min(start + sizes.reach.num_reserved_tokens, sizes.config.max_seq_len)
        if start >= sizes.config.max_seq_len or last > len(row.blocks) * sizes.config.block_size:
            # Past its last token: a request that ended in the step before.  The device writes
            # nothing there, and what it says is not asked for.
            _check(self._is_named(index), f"row {index}: position {last - 1} has no block")
            row.num_committed = min(start + 1, sizes.config.max_seq_len)
            return [JUNK]
        for position in range(start, last):
            in_window = position - start < len(window)
            self._write(row, position, window[position - start] if in_window else -1)
        emitted: list[int] = []
        for j in range(len(window)):
            emitted.append(self._next(row, self._read(row, start) + window[: j + 1]))
            past_end = start + j + 1 >= sizes.config.max_seq_len
            if past_end or j + 1 == len(window) or window[j + 1] != emitted[-1]:
                break
        row.num_committed += len(emitted)
        row.last = emitted[-1]
        first = max(0, start - self.lookahead)
        ahead = [*self._read(row, row.num_committed)[first:], row.last]
        for offset in range(len(ahead) - 1):
            self._write_following(row, first + offset, ahead[offset + 1 :])
        self._draft(row)
        return emitted

    def _draft(self, row: _Row) -> None:
        context = [*self._read(row, row.num_committed), row.last]
        for position in range(row.num_committed - max(0, self.lookahead - 1)):
            right = tuple(context[position + 1 : position + 1 + self.lookahead])
            found = self._following[self._slot(row, position)]
            _check(found == right, f"the drafter's entry {position} is for {found}, not {right}")
        row.drafts = []
        for _ in range(self.config.num_draft_tokens):
            right = self._next(row, context)
            hits = zlib.crc32(bytes(str(context), "ascii")) % 1000 < self.hit_rate * 1000
            row.drafts.append(right if hits else (right + 1) % self.config.vocab_size)
            context.append(row.drafts[-1])

    def _next(self, row: _Row, context: Sequence[int]) -> int:
        """The target's next token; an adapter is a token before all others."""
        first = [] if row.adapter_place == NO_ADAPTER else [self.adapters[row.adapter_place]]
        return self.next_token([*first, *context])

    def _live_row(self, index: int) -> _Row:
        row = self._rows[index]
        _check(row.live, f"row {index}: used without blocks")
        return row

    def _slot(self, row: _Row, position: int) -> int:
        block, offset = divmod(position, self.config.block_size)
        _check(block < len(row.blocks), f"position {position} has no allocated block")
        return row.blocks[block] * self.config.block_size + offset

    def _write(self, row: _Row, position: int, token: int) -> None:
        """Others may read a shared block: it only ever gets what it holds."""
        slot = self._slot(row, position)
        sharers = sum(row.blocks[position // self.config.block_size] in r.blocks and r.live
                      for r in self._rows)  # fmt: skip
        _check(sharers <= 1 or self._cache[slot] == token, "a shared block is written")
        self._cache[slot] = token

    def _write_following(self, row: _Row, position: int, ahead: Sequence[int]) -> None:
        self._following[self._slot(row, position)] = tuple(ahead[: self.lookahead])

    def _read(self, row: _Row, length: int) -> list[int]:
        tokens = [self._cache[self._slot(row, position)] for position in range(length)]
        _check(None not in tokens, "read a slot that was never written")
        return [token for token in tokens if token is not None]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise FakeExecutorError(message)
