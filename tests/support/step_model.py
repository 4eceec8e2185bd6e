"""A plain-Python model of the step graph's bookkeeping: rows, slots, lengths, joins, late reads.

Nothing here computes a network.  Every cache slot stores its PROVENANCE, what it was computed from;
every read compares the provenance of slots 0..p with what a recomputation from scratch over the
request's tokens (committed ones plus this step's drafts) would have put there.  A slot raises that
was never written, or was written for other tokens, by a rejected draft, from a recycled hidden
state where the true one is known, or by an earlier owner of the block.  So a schedule that runs to
its end without an exception has read nothing but right slots.

The rules (x_p is the request's token at position p, H_p the target's hidden state there):

state      `seq_len` L = tokens whose target KV is committed = position of `tokens[0]`;
           `tokens` = [x_L | K drafts].
decode     Target rows at L..L+K; n = accepted + 1; e = L+n-1 is the last committed row;
           then L += n.
prefill    Prompt positions in chunks; then L = end of the chunk.  The last chunk samples x_P.
recycled   Row t pairs H_t with x_{t+1} in slot t.  All S rows run (the rejected tail is harmless),
           row n-1 gives draft 1, then K-1 single passes start at slot L+n, each fed with the
           hidden state that the pass before returned.
windowed   Module i has its own cache.  Input pairs come from a ring of the last K pairs ++ the
           new S; the window cat[n-1 : n+K] ends at e, so it holds no rejected row, skips no slot.
           module_rows: row t = (module i-1's row t, x_{t+i}); K+1 rows, whose tokens move on by one
           per module.
           target_rows: row t = (H_{t+i-1}, x_{t+i}), past e (recycled state, draft).  The window
           grows by one row per module (K+i rows): a slot that held a recycled state gets the true
           one.
unshifted  x_p in slot p: rows at L+1..L+S, single passes from L+n+1.  Prefill runs the prompt at
           slots 0..P-1, then the sampled token as the first of K single passes from slot P.
chunks     An unfinished chunk feeds true prompt tokens (module i up to i of them).  Rows whose
           token is not known write nothing; the next chunk runs the K-1 rows before its own again.
limits     Positions at or past max_seq_len, or before 0: slot -1 (write nothing), read nothing,
           position id 0.  Blocks are reserved to min(max_seq_len, L + 2K + 1), plus S for every
           decode step in flight, because the host does not know how far it moved L.
padding    A row of -1 writes no slot and no state.
overlap    The host reads step i after it launched step i+1, so a request that ended in i still runs
           in i+1; its row and blocks are freed once no launched step names them.
states     With `conv_width` the target has recurrent layers, and so has an unshifted drafter: their
           rows are `step_states`.
K          A step may verify and draft fewer than the largest K: it reads the first columns of
           `tokens`, and pads what it writes.  (Not with a windowed drafter.)
K = 0      A plain step runs no drafter and leaves a hole of one pair, kept in the ring; the next
           drafting step feeds the missing pairs first.  A row that missed more than `ring_size`
           pairs may not draft again.

`Rules` holds every formula that an engine could get wrong; tests override one at a time and expect
an error.

Source: ARCHITECTURE.md; requirements M4-M8, M11, A6, A9, E2, E5, H-4, H-6, H-9, H-14, H-16, H-21,
H-22, H-23.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from tests.support.step_states import Prefix, StatePass, StateRules, States, StepModelError

Kind = Literal["none", "recycled", "windowed", "unshifted"]
Chain = Literal["module_rows", "target_rows"]
PAD = -1
TARGET = 0  # cache group of the target; drafter modules are 1, 2, ...


class UnwrittenRead(StepModelError):
    """A slot was read that nothing ever wrote."""


class ForeignRead(StepModelError):
    """A slot was read that holds an entry of another request."""


class StaleRead(StepModelError):
    """A slot was read that was computed from something else than the request's current tokens."""


class WrongRow(StepModelError):
    """A draft was taken from a row that does not end at the last known token."""


class OutsideLength(StepModelError):
    """A slot outside 0..max_seq_len-1 was addressed instead of being redirected."""


class NotReserved(StepModelError):
    """A slot was addressed whose block the row's table does not hold."""


class ForeignWrite(StepModelError):
    """A block was written that belongs to another request or to none."""


class ConflictingWrite(StepModelError):
    """Two rows of one pass wrote the same slot: which one stays is undefined."""


class PaddedWrite(StepModelError):
    """A padded row wrote a slot or a state row."""


class FreedInFlight(StepModelError):
    """A row changed hands before a launched step that names it had run."""


class RingOverrun(StepModelError):
    """A row was asked to draft although more of its pairs are missing than the ring keeps."""


class OutputMismatch(StepModelError):
    """The delivered tokens are not those of plain decoding."""


class NoRoom(StepModelError):
    """No free state row, or no free block."""


class Hidden(NamedTuple):
    """Provenance of a hidden state: the token position it stands for, and the tokens it has seen.

    depth 0 is the target's own; depth d went through d drafter passes (recycled, or a module's
    output).
    """

    position: int
    prefix: Prefix
    depth: int = 0


class Pair(NamedTuple):
    """A drafter input: a hidden state and the token paired with it."""

    hidden: Hidden
    token: int


Value = (
    Prefix | Pair
)  # target and unshifted slots: tokens 0..p; other drafter slots: the input pair


class Entry(NamedTuple):
    """One written cache slot: the request that wrote it, and what it was computed from."""

    owner: int
    value: Value


class Oracle(Protocol):
    """Where tokens come from.  All three are functions of the tokens seen so far."""

    @property
    def eos(self) -> int: ...
    def target(self, prefix: Prefix) -> int: ...
    def draft(self, prefix: Prefix) -> int: ...
    def garbage(self, prefix: Prefix) -> int: ...  # what a redirected row returns


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A hash as target, and a drafter that agrees with it with probability `agreement`."""

    vocab_size: int = 11
    agreement: float = 0.7
    eos_rate: float = 0.02
    seed: int = 0

    @property
    def eos(self) -> int:
        return self.vocab_size - 1

    def _hash(self, salt: str, prefix: Prefix) -> int:
        text = repr((salt, self.seed, prefix)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def target(self, prefix: Prefix) -> int:
        number = self._hash("target", prefix)
        if (number >> 32) % 1000 < self.eos_rate * 1000:
            return self.eos
        return number % (self.vocab_size - 1)

    def draft(self, prefix: Prefix) -> int:
        number, right = self._hash("draft", prefix), self.target(prefix)
        if number % 1000 < self.agreement * 1000:
            return right
        return (right + 1 + (number >> 32) % (self.vocab_size - 1)) % self.vocab_size

    def garbage(self, prefix: Prefix) -> int:
        return self._hash("garbage", prefix) % self.vocab_size


class Rules(StateRules):
    """The formulas of the step and its states.  A test plants a fault by overriding one of them.

    The expected contents of the caches (`StepModel._law`) are derived without this class.
    """

    def paired_token(self, own: Sequence[int], following: Sequence[int], row: int) -> int:
        """Token paired with the hidden state of `row`: the one at the next position (E2)."""
        return following[row]

    def next_token(self, prompt: Prefix, end: int, sampled: int, ahead: int) -> int | None:
        """Token `ahead` (1, 2, ...) after an unfinished chunk; None, not known: no write (H-4)."""
        return prompt[end + ahead - 1] if end + ahead <= len(prompt) else None

    def gather_row(self, num_committed: int) -> int:
        """The row of the first pass that gives draft 1."""
        return num_committed - 1

    def first_slot(self, kind: Kind, seq_len: int) -> int:
        """Slot of row 0 of the drafter's first pass in decode."""
        return seq_len + 1 if kind == "unshifted" else seq_len

    def single_slot(self, kind: Kind, new_seq_len: int, index: int) -> int:
        """Slot of single-token pass `index` (1, 2, ...; unshifted prefill also has 0)."""
        return new_seq_len + index - (kind == "recycled")

    def window_end(self, seq_len: int, num_committed: int) -> int:
        """Position of the last input pair of a decode window."""
        return seq_len + num_committed - 1

    def window_rows(self, chain: Chain, module: int, num_draft_tokens: int) -> int:
        """Rows of module 1, 2, ... in decode (H-21)."""
        return num_draft_tokens + (module if chain == "target_rows" else 1)

    def ring_start(self, num_committed: int) -> int:
        """Where the new ring begins in ring ++ new pairs (M5)."""
        return num_committed

    def boundary_rows(self, num_draft_tokens: int) -> int:
        """Rows before a later chunk that module_rows runs again."""
        return num_draft_tokens - 1

    def prefill_modules(self, num_draft_tokens: int) -> int:
        """How many modules a chunk fills (H-22)."""
        return num_draft_tokens

    def replayed_pairs(self, num_missing: int) -> int:
        """How many missing pairs a drafting step feeds after plain steps (H-23)."""
        return num_missing

    def place(self, position: int, max_seq_len: int) -> int | None:
        """The position a row may write; None redirects it (E5, H-9, H-16)."""
        return position if 0 <= position < max_seq_len else None

    def advance(self, num_emitted: int) -> int:
        """What a decode step adds to seq_len."""
        return num_emitted

    def reserved(self, known_len: int, num_draft_tokens: int, in_flight: int) -> int:
        """Tokens for which a row must hold blocks, before the max_seq_len cap."""
        return known_len + (num_draft_tokens + 1) * in_flight + 2 * num_draft_tokens + 1

    def may_free(self, named_in_flight: bool) -> bool:
        """Whether a finished request's row and blocks may be freed now."""
        return not named_in_flight

    def padded_slot(self) -> int:
        """The flat slot that a padded row writes."""
        return -1

    def padded_state_row(self) -> int | None:
        """The state row that a padded row updates."""
        return None


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Tokens of a real step, used in place of the oracle's: targets (S, or 1 in prefill) and K
    drafts."""

    targets: Sequence[int]
    drafts: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One drafter pass of one row.  Redirected rows: slot -1, position 0."""

    module: int  # 1, 2, ...
    slots: tuple[int, ...]  # flat cache slots
    positions: tuple[int, ...]  # position ids
    tokens: tuple[int, ...]
    hiddens: tuple[Hidden | None, ...]  # None for unshifted drafters
    gather: int | None  # the row that gives this pass's draft; None when it gives none


@dataclass(frozen=True, kw_only=True)
class RowRecord:
    """What one row of a prefill or decode step did.  `row` -1 is a padded row."""

    row: int
    request: int = -1
    seq_len: int = 0  # before the step
    tokens: tuple[int, ...] = ()  # target input ids, S of them in decode, the chunk's in prefill
    positions: tuple[int, ...] = ()  # their position ids
    slots: tuple[int, ...] = ()  # their flat target slots
    targets: tuple[int, ...] = ()  # the target's token of every row (prefill: of the last)
    emitted: tuple[int, ...] = ()  # empty for an unfinished chunk
    passes: tuple[PassRecord, ...] = ()
    drafts: tuple[int, ...] = ()
    new_seq_len: int = 0

    @property
    def num_emitted(self) -> int:
        return len(self.emitted)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One scheduler step: at most one prefill replay and one decode replay, rows in batch order."""

    prefill: tuple[RowRecord, ...]
    decode: tuple[RowRecord, ...]


@dataclass
class Request:
    """The host's side of a request: everything here is known without asking the device."""

    id: int
    row: int
    prompt: Prefix
    limit: int  # output tokens, capped by max_seq_len
    output: list[int] = field(default_factory=list)
    emitted_per_step: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    launched: int = 0  # prompt tokens launched
    known_len: int = 0  # seq_len as of the last step read
    in_flight: int = 0  # decode steps launched, not read
    missing: int = 0  # pairs that plain steps kept from the drafter


@dataclass
class Row:
    """The device's state of one row.  Reuse clears it all (H-6); the cache itself is never
    cleared."""

    request: int
    table: list[int]  # physical blocks in logical order
    ring: list[Pair | None]  # last input pairs, newest last
    sequence: Prefix = ()  # the true tokens 0..seq_len (not device state: the measure of it)
    seq_len: int = 0
    tokens: tuple[int, ...] = ()
    missing: int = 0


@dataclass(frozen=True)
class Launch:
    """A scheduler step as launched: requests are named only to notice when a row changed hands."""

    prefill: tuple[tuple[int, int, int, int], ...]  # row, request, start, end
    decode: tuple[tuple[int, int], ...]  # row, request
    padded_prefill: int
    padded_decode: int
    num_draft_tokens: int
    forced: Mapping[int, Forced]

    def names(self, row: int) -> bool:
        return any(row == chunk[0] for chunk in self.prefill) or any(
            row == r for r, _ in self.decode
        )


@dataclass(frozen=True)
class Feed:
    """One row of a pass: where it goes, what it is computed from."""

    position: int
    value: Value
    token: int
    hidden: Hidden | None = None


@dataclass
class Work:
    """What the drafter gets from a target forward over positions start, start+1, ... of one
    request."""

    row: Row
    start: int
    num_committed: int  # n in decode, the chunk's length in prefill
    pairs: list[Pair]  # S in decode (rejected tail included), the chunk's in prefill
    known: Prefix  # the true tokens as far as they are known
    own: Prefix  # the target's input tokens
    prefill: bool
    drafts_wanted: bool  # False for an unfinished chunk
    next_tokens: list[int | None]  # unfinished chunk: 2nd, 3rd, ... token after it
    tail: dict[int, Value]  # slots of the rejected tail -> what the first pass puts there
    forced: Forced | None
    num_draft_tokens: int  # K of the step
    num_missing: int = 0
    drafts: list[int] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)

    @property
    def last(self) -> int:
        """e: the last committed row."""
        return self.start + self.num_committed - 1

    def window(self, first: int, last: int) -> list[Pair | None]:
        """Input pairs of positions first..last from ring ++ new pairs; None where none is kept."""
        cat = [*self.row.ring, *self.pairs]
        base = self.start - len(self.row.ring)
        inside = range(base, base + len(cat))
        return [cat[p - base] if p in inside else None for p in range(first, last + 1)]


class StepModel:
    """One engine: rows, blocks, caches, steps in flight.

    Args:
        kind, num_draft_tokens, chain: the draft loop, as in ARCHITECTURE.md (`chain`: windowed).
        max_rows, max_seq_len, block_size, num_blocks: sizes; by default enough blocks for all rows.
        overlap: read every step one step late.
        conv_width: the width of the convolutions in recurrent layers; None: there are none.
        ring_size: pairs kept for rows that plain steps kept from the drafter (H-23).
        strict_hidden: False accepts a slot whose tokens are right but whose hidden state was
            recycled where the true one is known by now (what a K+1-row window leaves in
            target_rows).
    Use: `row = admit(prompt)`, `prefill([(row, length), ...])` until `prompt_left(row)` is 0,
    `decode(rows)`, `drain()`, `check_outputs()`; `step()` does one prefill and one decode replay.
    Rows free themselves.
    """

    def __init__(
        self,
        kind: Kind,
        num_draft_tokens: int,
        *,
        max_rows: int,
        max_seq_len: int,
        block_size: int,
        num_blocks: int | None = None,
        chain: Chain = "module_rows",
        overlap: bool = False,
        ring_size: int = 0,
        conv_width: int | None = None,
        strict_hidden: bool = True,
        oracle: Oracle | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.kind, self.chain = kind, chain
        self.num_draft_tokens = num_draft_tokens
        self.max_rows, self.max_seq_len, self.block_size = max_rows, max_seq_len, block_size
        self.overlap, self.ring_size, self.strict_hidden = overlap, ring_size, strict_hidden
        self.oracle: Oracle = oracle or Toy()
        self.rules = rules or Rules()
        blocks = num_blocks or max_rows * -(-max_seq_len // block_size)
        self.free_blocks = list(range(blocks))  # last freed, first reused
        self.block_owner: dict[int, int] = {}
        self.cache: dict[tuple[int, int], Entry] = {}  # (group, flat slot)
        self.rows: dict[int, Row] = {}
        self.requests: list[Request] = []
        self.in_flight: list[Launch] = []
        self.states: States | None = None
        if conv_width is not None:
            self.states = States(conv_width, num_draft_tokens, self.rules)
        self.history: list[StepRecord] = []

    # What the scheduler calls.

    def admit(self, prompt: Sequence[int], max_new_tokens: int = 10**9) -> int:
        """Give the request a state row.  Raises NoRoom; the lowest free row is taken."""
        if not 0 < len(prompt) < self.max_seq_len:
            raise ValueError(f"prompt of {len(prompt)} tokens, max_seq_len {self.max_seq_len}")
        row = next((r for r in range(self.max_rows) if r not in self.rows), None)
        if row is None:
            raise NoRoom("no free row")
        limit = min(max_new_tokens, self.max_seq_len - len(prompt))
        request = Request(id=len(self.requests), row=row, prompt=tuple(prompt), limit=limit)
        self.requests.append(request)
        ring: list[Pair | None] = [None] * (self.num_draft_tokens + self.ring_size)
        self.rows[row] = Row(request=request.id, table=[], ring=ring)
        return row

    def request(self, row: int) -> Request:
        """The request that owns a state row."""
        return self.requests[self.rows[row].request]

    def prompt_left(self, row: int) -> int:
        """Prompt tokens of the row that no chunk was launched for."""
        return len(self.request(row).prompt) - self.request(row).launched

    def running(self) -> list[int]:
        """Rows that may decode: whole prompt launched, not known to be finished."""
        return [
            r for r in self.rows if not self.prompt_left(r) and not self.request(r).finish_reason
        ]

    def can_draft(self, row: int) -> bool:
        """False when plain steps overran the ring: the row stays at K = 0 (H-23)."""
        return self.request(row).missing <= self.ring_size

    def abort(self, row: int) -> None:
        """Leave; the row is freed once no step in flight names it."""
        self.request(row).finish_reason = self.request(row).finish_reason or "aborted"
        self._free_finished()

    def prefill(
        self,
        chunks: Sequence[tuple[int, int]],
        padded_to: int = 0,
        forced: Mapping[int, Forced] | None = None,
    ) -> StepRecord | None:
        """One prefill replay: (row, number of next prompt tokens) for each packed request."""
        return self.step(chunks=chunks, padded_prefill=padded_to, forced=forced)

    def decode(
        self,
        rows: Sequence[int],
        padded_to: int = 0,
        num_draft_tokens: int | None = None,
        forced: Mapping[int, Forced] | None = None,
    ) -> StepRecord | None:
        """One decode replay; `num_draft_tokens`, its K, is the largest unless given (0: plain)."""
        return self.step(
            rows=rows, padded_decode=padded_to, num_draft_tokens=num_draft_tokens, forced=forced
        )

    def step(
        self,
        *,
        chunks: Sequence[tuple[int, int]] = (),
        rows: Sequence[int] = (),
        padded_prefill: int = 0,
        padded_decode: int = 0,
        num_draft_tokens: int | None = None,
        forced: Mapping[int, Forced] | None = None,
    ) -> StepRecord | None:
        """Launch one scheduler step.

        Returns:
            the record of the step just read: this one, or with overlap the one before (None at
            first).
        """
        drafts = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        fewer = range(1, self.num_draft_tokens) if self.kind != "windowed" else ()
        if drafts not in (0, self.num_draft_tokens, *fewer):
            raise ValueError(f"a step of {drafts} drafts, of at most {self.num_draft_tokens}")
        if not drafts and rows and self._drafter_has_states and self.num_draft_tokens:
            raise ValueError("a drafter with states must see every token")
        packed = []
        for row in rows:
            packed.append((row, self._launch_decode(row, drafts)))
        prompts = [self._launch_chunk(row, length) for row, length in chunks]
        self.in_flight.append(
            Launch(
                prefill=tuple(prompts),
                decode=tuple(packed),
                padded_prefill=max(0, padded_prefill - len(prompts)),
                padded_decode=max(0, padded_decode - len(packed)),
                num_draft_tokens=drafts,
                forced=forced or {},
            )
        )
        return self._read(1 if self.overlap else 0)

    def drain(self) -> None:
        """Run and read everything in flight."""
        self._read(0)

    def plain(self, prompt: Sequence[int], limit: int) -> list[int]:
        """Plain decoding of the toy target: what every request must deliver."""
        output: list[int] = []
        while len(output) < limit and (not output or output[-1] != self.oracle.eos):
            output.append(self.oracle.target((*prompt, *output)))
        return output

    def check_outputs(self) -> None:
        """Compare every request with plain decoding (an unfinished or aborted one as it got)."""
        for request in self.requests:
            want = self.plain(request.prompt, request.limit)
            if request.finish_reason not in ("stop", "length"):
                want = want[: len(request.output)]
            if request.output != want:
                raise OutputMismatch(f"request {request.id}: {request.output}, plain {want}")

    @property
    def _drafter_has_states(self) -> bool:
        return self.states is not None and self.kind == "unshifted"

    # The host: reserving, reading, freeing.

    def _launch_decode(self, row: int, num_draft_tokens: int) -> int:
        request = self.request(row)
        if num_draft_tokens and not self.can_draft(row):
            raise RingOverrun(f"row {row} missed {request.missing} pairs")
        self._reserve(row, request.known_len, request.in_flight)
        request.in_flight += 1
        if self.num_draft_tokens:
            request.missing = 0 if num_draft_tokens else request.missing + 1
        return request.id

    def _launch_chunk(self, row: int, length: int) -> tuple[int, int, int, int]:
        request = self.request(row)
        start, end = request.launched, request.launched + length
        if not start < end <= len(request.prompt):
            raise ValueError(f"chunk {start}..{end} of a prompt of {len(request.prompt)}")
        request.launched = request.known_len = end
        self._reserve(row, end, 0)
        return row, request.id, start, end

    def _reserve(self, row: int, known_len: int, in_flight: int) -> None:
        wanted = self.rules.reserved(known_len, self.num_draft_tokens, in_flight)
        table = self.rows[row].table
        while len(table) * self.block_size < min(self.max_seq_len, wanted):
            if not self.free_blocks:
                raise NoRoom("no free block")
            table.append(self.free_blocks.pop())
            self.block_owner[table[-1]] = self.rows[row].request

    def _read(self, leave: int) -> StepRecord | None:
        """Run and read the oldest steps until `leave` are in flight: as late as can be."""
        record = None
        while len(self.in_flight) > leave:
            record = self._run(self.in_flight[0])
            self.in_flight.pop(0)
            self.history.append(record)
            for done in (*record.prefill, *record.decode):
                if done.row >= 0:
                    self._deliver(self.requests[done.request], done, done in record.decode)
            self._free_finished()
        return record

    def _deliver(self, request: Request, done: RowRecord, decode: bool) -> None:
        if decode:
            request.in_flight -= 1
            request.known_len += done.num_emitted
        if request.finish_reason:
            return  # ended one step earlier: what the step in flight emitted is dropped
        before = len(request.output)
        for token in done.emitted:
            request.output.append(token)
            if token == self.oracle.eos:
                request.finish_reason = "stop"
            elif len(request.output) == request.limit:
                request.finish_reason = "length"
            if request.finish_reason:
                break
        if decode:
            request.emitted_per_step.append(len(request.output) - before)

    def _free_finished(self) -> None:
        for row in list(self.rows):
            named = any(launch.names(row) for launch in self.in_flight)
            if self.request(row).finish_reason and self.rules.may_free(named):
                for block in self.rows[row].table:
                    del self.block_owner[block]
                    self.free_blocks.append(block)
                del self.rows[row]

    # The device.

    def _run(self, launch: Launch) -> StepRecord:
        self._run_padded(launch.padded_prefill + launch.padded_decode)
        padding = RowRecord(row=-1)
        prefill = [self._run_chunk(launch, *chunk) for chunk in launch.prefill]
        decode = [self._run_decode(launch, row, request) for row, request in launch.decode]
        return StepRecord(
            prefill=(*prefill, *[padding] * launch.padded_prefill),
            decode=(*decode, *[padding] * launch.padded_decode),
        )

    def _run_padded(self, count: int) -> None:
        if count and (self.rules.padded_slot() != -1 or self.rules.padded_state_row() is not None):
            raise PaddedWrite(
                f"slot {self.rules.padded_slot()}, row {self.rules.padded_state_row()}"
            )
        if count and self.states is not None:
            self.states.spoil()

    def _state(self, row: int, request: int) -> Row:
        if row not in self.rows or self.rows[row].request != request:
            raise FreedInFlight(f"row {row} left request {request} with a step in flight")
        return self.rows[row]

    def _run_chunk(
        self, launch: Launch, row: int, request_id: int, start: int, end: int
    ) -> RowRecord:
        state, prompt = self._state(row, request_id), self.requests[request_id].prompt
        forced, finished = launch.forced.get(row), end == len(prompt)
        own = prompt[start:end]
        feeds = [Feed(t, prompt[: t + 1], prompt[t]) for t in range(start, end)]
        slots, positions, _ = self._attend(state, TARGET, feeds, lambda t: prompt[: t + 1])
        self._prompt_states(row, request_id, prompt, start, end)
        sampled = forced.targets[0] if forced else self.oracle.target(prompt[:end])
        depths = range(1, max(1, self.num_draft_tokens) + 1)
        ahead = [self.rules.next_token(prompt, end, sampled, depth) for depth in depths]
        following = (*prompt[start + 1 : end], sampled if finished else ahead[0] or 0)
        known = (*prompt, sampled) if finished else prompt
        work = Work(
            row=state,
            start=start,
            num_committed=end - start,
            pairs=[
                Pair(Hidden(t, prompt[: t + 1]), self.rules.paired_token(own, following, t - start))
                for t in range(start, end)
            ],
            known=known,
            own=own,
            prefill=True,
            drafts_wanted=finished,
            next_tokens=ahead[1:],
            tail={},
            forced=forced,
            num_draft_tokens=self.num_draft_tokens,
        )
        self._draft(work)
        self._push_ring(state, work.pairs, end - start)
        state.seq_len, state.sequence = end, known
        state.tokens = (sampled, *work.drafts) if finished else ()
        return RowRecord(
            row=row,
            request=request_id,
            seq_len=start,
            tokens=own,
            positions=positions,
            slots=slots,
            targets=(sampled,),
            emitted=(sampled,) if finished else (),
            passes=tuple(work.passes),
            drafts=tuple(work.drafts),
            new_seq_len=end,
        )

    def _run_decode(self, launch: Launch, row: int, request_id: int) -> RowRecord:
        state, forced = self._state(row, request_id), launch.forced.get(row)
        seq_len, committed = state.seq_len, state.sequence
        own = state.tokens[: launch.num_draft_tokens + 1]
        truth = (*committed, *own[1:])
        rows = range(len(own))
        seen = [(*committed[:seq_len], *own[: j + 1]) for j in rows]
        feeds = [Feed(seq_len + j, seen[j], own[j]) for j in rows]
        slots, positions, written = self._attend(state, TARGET, feeds, lambda t: truth[: t + 1])
        self._verify_states(row, state, feeds, truth, launch.num_draft_tokens)
        if forced:
            targets = tuple(forced.targets)
        else:
            source = (self.oracle.garbage, self.oracle.target)
            targets = tuple(source[written[j]](seen[j]) for j in rows)
        count = 1
        while count < len(own) and own[count] == targets[count - 1]:
            count += 1
        emitted = targets[:count]
        if self.states is not None:
            absorbed = self.rules.count(seq_len, count, self.max_seq_len)
            self.states.set_absorbed(row, absorbed, self.max_seq_len)
        known = (*committed, *emitted)
        work = Work(
            row=state,
            start=seq_len,
            num_committed=count,
            pairs=[
                Pair(Hidden(seq_len + j, seen[j]), self.rules.paired_token(own, targets, j))
                for j in rows
            ],
            known=known,
            own=own,
            prefill=False,
            drafts_wanted=True,
            next_tokens=[],
            tail=self._tail(seq_len, count, seen, targets, committed),
            forced=forced,
            num_missing=self.rules.replayed_pairs(state.missing),
            num_draft_tokens=launch.num_draft_tokens,
        )
        if launch.num_draft_tokens:
            self._draft(work)
            state.missing = 0
        else:
            state.missing += 1
        work.drafts += [PAD] * (self.num_draft_tokens - len(work.drafts))
        self._push_ring(state, work.pairs, count)
        state.seq_len, state.sequence = seq_len + self.rules.advance(count), known
        state.tokens = (emitted[-1], *work.drafts)
        return RowRecord(
            row=row,
            request=request_id,
            seq_len=seq_len,
            tokens=own,
            positions=positions,
            slots=slots,
            targets=targets,
            emitted=emitted,
            passes=tuple(work.passes),
            drafts=tuple(work.drafts),
            new_seq_len=state.seq_len,
        )

    def _tail(
        self,
        seq_len: int,
        count: int,
        seen: Sequence[Prefix],
        targets: Prefix,
        committed: Prefix,
    ) -> dict[int, Value]:
        """What rows n, n+1, ... of the first pass, the rejected tail, put where."""
        tail = range(count, len(targets))
        if self.kind == "unshifted":
            return {seq_len + 1 + j: (*committed, *targets[: j + 1]) for j in tail}
        return {seq_len + j: Pair(Hidden(seq_len + j, seen[j]), targets[j]) for j in tail}

    def _push_ring(self, row: Row, pairs: Sequence[Pair], count: int) -> None:
        start = self.rules.ring_start(count)
        row.ring = [*row.ring, *pairs][start : start + len(row.ring)]

    # The drafter.

    def _draft(self, work: Work) -> None:
        """Run the drafter's passes; fills work.drafts and work.passes."""
        if self.num_draft_tokens == 0:
            return
        if self.kind == "none":
            while work.drafts_wanted and len(work.drafts) < work.num_draft_tokens:
                self._propose(work, Hidden(0, (*work.known, *work.drafts)), True)
        elif self.kind == "recycled":
            self._draft_recycled(work)
        elif self.kind == "unshifted":
            self._draft_unshifted(work)
        elif self.chain == "module_rows":
            self._draft_module_rows(work)
        else:
            self._draft_target_rows(work)

    def _draft_recycled(self, work: Work) -> None:
        missing, rules = work.num_missing, self.rules
        slot = work.start if work.prefill else rules.first_slot(self.kind, work.start)
        pairs = [*work.window(work.start - missing, work.start - 1), *work.pairs]
        feeds = self._pair_feeds(slot - missing, pairs)
        gather = missing + rules.gather_row(work.num_committed)
        out = self._pass(work, 1, feeds, gather if work.drafts_wanted else None)
        for index in range(1, work.num_draft_tokens):
            if out is not None:
                slot = rules.single_slot(self.kind, work.last + 1, index)
                feeds = self._pair_feeds(slot, [Pair(out, work.drafts[-1])])
                out = self._pass(work, 1, feeds, 0)

    def _draft_unshifted(self, work: Work) -> None:
        missing, rules = work.num_missing, self.rules
        if work.prefill:
            sequence, slot, tokens, singles = work.known, work.start, work.own, 0
        else:
            before = work.window(work.start - missing, work.start - 1)
            tokens = tuple(pair.token for pair in (*before, *work.pairs) if pair)
            sequence = (*work.known[: work.start + 1], *[pair.token for pair in work.pairs])
            slot, singles = rules.first_slot(self.kind, work.start) - missing, 1
        feeds = [
            Feed(slot + j, (*sequence[: slot + j], token), token) for j, token in enumerate(tokens)
        ]
        gather = missing + rules.gather_row(work.num_committed)
        self._first_pass_states(work, feeds)
        self._pass(work, 1, feeds, gather if singles else None)
        for index in range(singles, work.num_draft_tokens if work.drafts_wanted else 0):
            slot = rules.single_slot(self.kind, work.last + 1, index)
            sequence = (*work.known, *work.drafts)
            single = [Feed(slot, (*sequence[:slot], sequence[-1]), sequence[-1])]
            absorbed = rules.single_absorbed(work.last + 1, index)
            self._draft_states(work, single, absorbed, [rules.single_commits(index)])
            self._pass(work, 1, single, 0)

    def _draft_module_rows(self, work: Work) -> None:
        count = self.num_draft_tokens
        if work.prefill:
            first, last = work.start - self.rules.boundary_rows(count), work.last
        else:
            last = self.rules.window_end(work.start, work.num_committed)
            first = last + 1 - work.num_missing - self.rules.window_rows(self.chain, 1, count)
        window = work.window(first, last)
        hiddens = [pair.hidden if pair else None for pair in window]
        tokens: list[int | None] = [pair.token if pair else None for pair in window]
        for module in range(1, self._modules(work) + 1):
            ready = [
                Pair(hidden, token) if hidden is not None and token is not None else None
                for hidden, token in zip(hiddens, tokens, strict=True)
            ]
            feeds = self._pair_feeds(first, ready)
            self._pass(work, module, feeds, len(feeds) - 1 if work.drafts_wanted else None)
            hiddens = [self._output(pair) if pair else None for pair in ready]
            ahead = work.drafts if work.drafts_wanted else work.next_tokens
            tokens = [*tokens[1:], ahead[module - 1] if module <= len(ahead) else None]

    def _draft_target_rows(self, work: Work) -> None:
        count = self.num_draft_tokens
        last = work.last if work.prefill else self.rules.window_end(work.start, work.num_committed)
        first = work.start if work.prefill else last - count - work.num_missing
        pairs = work.window(first, last)
        for module in range(1, self._modules(work) + 1):
            rows, slot = pairs, first - (module - 1)
            if not work.prefill:
                skip = len(rows) - work.num_missing
                skip -= self.rules.window_rows(self.chain, module, count)
                rows, slot = rows[skip:], slot + skip
            feeds = self._pair_feeds(slot, rows)
            out = self._pass(work, module, feeds, len(feeds) - 1 if work.drafts_wanted else None)
            if out is not None:
                pairs = [*pairs, Pair(out, work.drafts[-1])]

    def _modules(self, work: Work) -> int:
        count = self.num_draft_tokens
        return self.rules.prefill_modules(count) if work.prefill else count

    def _pair_feeds(self, slot: int, pairs: Sequence[Pair | None]) -> list[Feed]:
        """Rows slot, slot+1, ...; a row without an input is redirected."""
        return [
            Feed(slot + j, pair, pair.token, pair.hidden)
            if pair
            else Feed(min(slot + j, -1), (), PAD)
            for j, pair in enumerate(pairs)
        ]

    def _output(self, value: Value) -> Hidden:
        """The hidden state that a row returns: one token more seen, one pass deeper."""
        if not isinstance(value, Pair):
            return Hidden(len(value) - 1, value)
        hidden, token = value
        moves = self.kind == "recycled" or self.chain == "target_rows"
        return Hidden(hidden.position + moves, (*hidden.prefix, token), hidden.depth + 1)

    def _pass(
        self, work: Work, module: int, feeds: list[Feed], gather: int | None
    ) -> Hidden | None:
        """Run one pass: write, attend, and draft from row `gather`, whose output is returned."""
        first = not work.passes
        law = self._law(module, (*work.known, *work.drafts), work.last)
        tail = work.tail if first else {}
        slots, positions, written = self._attend(work.row, module, feeds, law, tail)
        work.passes.append(
            PassRecord(
                module=module,
                slots=slots,
                positions=positions,
                tokens=tuple(feed.token for feed in feeds),
                hiddens=tuple(feed.hidden for feed in feeds),
                gather=gather,
            )
        )
        if gather is None:
            return None
        if not 0 <= gather < len(feeds):
            raise WrongRow(f"row {gather} of {len(feeds)}")
        out = self._output(feeds[gather].value)
        self._propose(work, out, written[gather])
        return out

    def _propose(self, work: Work, out: Hidden, live: bool) -> None:
        """Append a draft; the row it comes from must have seen all known tokens and drafts."""
        seen = (*work.known, *work.drafts)
        if out.prefix != seen:
            raise WrongRow(f"draft {len(work.drafts) + 1} from {out.prefix}, not from {seen}")
        if work.forced:
            work.drafts.append(work.forced.drafts[len(work.drafts)])
        else:
            work.drafts.append((self.oracle.draft if live else self.oracle.garbage)(seen))

    def _law(self, module: int, tokens: Prefix, last: int) -> Callable[[int], Value]:
        """What recomputing over `tokens` puts in each slot; `last` is e, the last true row."""
        if self.kind == "unshifted":
            return lambda slot: tokens[: slot + 1]
        if self.kind == "windowed" and self.chain == "module_rows":

            def module_row(slot: int) -> Value:
                end = slot + module
                after = (*tokens, PAD)[min(end, len(tokens))]
                return Pair(Hidden(slot, tokens[:end], module - 1), after)

            return module_row

        def target_row(slot: int) -> Value:
            source = slot + module - 1
            after = (*tokens, PAD)[min(source + 1, len(tokens))]
            return Pair(Hidden(source, tokens[: source + 1], max(0, source - last)), after)

        return target_row

    # Recurrent layers.

    def _prompt_states(self, row: int, request: int, prompt: Prefix, start: int, end: int) -> None:
        """The target's, over a chunk and the tokens before it that it runs again."""
        if self.states is None:
            return
        is_windowed, finished = self.kind == "windowed", end == len(prompt)
        repeated = max(0, self.num_draft_tokens - 1) if is_windowed else 0
        told = max(0, self.rules.repeated_tokens(self.num_draft_tokens)) if is_windowed else 0
        first = max(0, start - repeated)
        committed = self.rules.prompt_commits(end, told, finished)
        self.states.run(
            TARGET,
            StatePass(
                row=row,
                request=request,
                first=first,
                prefixes=[prompt[: t + 1] for t in range(first, end)],
                law=lambda t: prompt[: t + 1],
                absorbed=self.states.absorbed.get(row, 0),
                commits=[t < committed for t in range(first, end)],
                num_draft_tokens=self.num_draft_tokens,
            ),
        )
        count = self.rules.prompt_count(end, told, finished)
        self.states.set_absorbed(row, count, self.max_seq_len)

    def _verify_states(
        self, row: int, state: Row, feeds: Sequence[Feed], truth: Prefix, count: int
    ) -> None:
        """The target's, over the rows of a verify step."""
        if self.states is not None:
            self._run_states(
                TARGET, row, state.request, feeds, lambda t: truth[: t + 1],
                self.states.absorbed.get(row, 0),
                [self.rules.commits(j) for j in range(len(feeds))], count,
            )  # fmt: skip

    def _first_pass_states(self, work: Work, feeds: Sequence[Feed]) -> None:
        """An unshifted drafter's, over a chunk, or over the target tokens of a step."""
        if work.prefill:
            self._draft_states(work, feeds, work.start, [True] * len(feeds))
        else:
            commits = [self.rules.draft_commits(j, work.num_committed) for j in range(len(feeds))]
            self._draft_states(work, feeds, self.rules.draft_absorbed(work.start), commits)

    def _draft_states(
        self, work: Work, feeds: Sequence[Feed], absorbed: int, commits: Sequence[bool]
    ) -> None:
        if self._drafter_has_states:
            row = self.requests[work.row.request].row
            law = self._law(1, (*work.known, *work.drafts), work.last)
            tail = {} if work.passes else work.tail

            def wanted(position: int) -> Prefix:
                value = tail.get(position) or law(position)
                assert not isinstance(value, Pair)
                return value

            self._run_states(
                1, row, work.row.request, feeds, wanted, absorbed, commits, work.num_draft_tokens
            )

    def _run_states(
        self,
        group: int,
        row: int,
        request: int,
        feeds: Sequence[Feed],
        law: Callable[[int], Prefix],
        absorbed: int,
        commits: Sequence[bool],
        count: int,
    ) -> None:
        """The rows inside the maximum length; the others are at row -1, which has no state."""
        live = [f for f in feeds if self.rules.place(f.position, self.max_seq_len) is not None]
        prefixes = [f.value for f in live if not isinstance(f.value, Pair)]
        if live and self.states is not None:
            call = StatePass(
                row=row, request=request, first=live[0].position, prefixes=prefixes, law=law,
                absorbed=absorbed, commits=commits[: len(live)], num_draft_tokens=count,
            )  # fmt: skip
            self.states.run(group, call)

    # The cache.

    def _attend(
        self,
        row: Row,
        group: int,
        feeds: Sequence[Feed],
        law: Callable[[int], Value],
        tail: Mapping[int, Value] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
        """Write every row, then let each read slots 0..its own.

        The rows of a pass share their context, so one scan to the highest of them reads for all;
        `tail` gives the contents of the slots that only rows of the rejected tail may read.
        Returns:
            flat slots (-1: nothing written), position ids, and which rows were live.
        """
        slots, positions, highest = [], [], -1
        for feed in feeds:
            place = self.rules.place(feed.position, self.max_seq_len)
            if place is None:
                slots.append(-1)
                positions.append(0)
                continue
            slot = self._flat_slot(row, place)
            if self.block_owner.get(slot // self.block_size) != row.request:
                raise ForeignWrite(f"request {row.request} wrote slot {slot}")
            if slot in slots:
                raise ConflictingWrite(f"request {row.request} wrote slot {slot} twice in a pass")
            self.cache[group, slot] = Entry(row.request, feed.value)
            slots.append(slot)
            positions.append(place)
            highest = max(highest, place)
        for position in range(highest + 1):
            want = (tail or {}).get(position) or law(position)
            self._check(row, group, position, want)
        return tuple(slots), tuple(positions), tuple(slot >= 0 for slot in slots)

    def _flat_slot(self, row: Row, position: int) -> int:
        if not 0 <= position < self.max_seq_len:
            raise OutsideLength(f"position {position}, max_seq_len {self.max_seq_len}")
        index, offset = divmod(position, self.block_size)
        if index >= len(row.table):
            raise NotReserved(f"position {position}: the row holds {len(row.table)} blocks")
        return row.table[index] * self.block_size + offset

    def _check(self, row: Row, group: int, position: int, want: Value) -> None:
        entry = self.cache.get((group, self._flat_slot(row, position)))
        place = f"cache {group}, request {row.request}, position {position}"
        if entry is None:
            raise UnwrittenRead(place)
        if entry.owner != row.request:
            raise ForeignRead(f"{place}: written by request {entry.owner}")
        got = entry.value
        if not self.strict_hidden and isinstance(got, Pair) and isinstance(want, Pair):
            got = got._replace(hidden=got.hidden._replace(depth=want.hidden.depth))
        if got != want:
            raise StaleRead(f"{place}: holds {got}, not {want}")
