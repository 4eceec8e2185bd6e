"""The executor over a lowered program: persistent buffers, bound inputs, two calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.cudagraphs.buckets import Buckets, default_decode, default_prefill
from compilespec.cudagraphs.dispatcher import Dispatcher, capture_all
from compilespec.cudagraphs.drivers import make_driver
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.cudagraphs.recorder import Recorder
from compilespec.program import PAD, ByStep, Lowered, StepKey
from compilespec.progress import Reporter
from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.prefix_cache import TOKENS_BY_POSITION
from compilespec.runtime.prompt_rows import prompt_logprobs
from compilespec.runtime.sampling_rows import (
    RowSampling,
    TokenLogprobs,
    is_plain,
    read_logprobs,
    write_row,
)
from compilespec.runtime.weights import bind_weights


class StepRunner:
    """Runs the phases of a `Lowered` program; implements `Executor`.

    State rows, caches and weights are allocated or bound once; a call passes only its batch inputs.
    """

    def __init__(
        self,
        lowered: Lowered,
        *,
        buckets: Sequence[int] | Buckets | None = None,
        graphs: GraphOptions | None = None,
    ) -> None:
        """Allocate buffers and bind weights; nothing is captured yet.

        Args:
            buckets: sizes that batches are padded to; decode alone, where they are numbers.
            graphs: what is captured; None: nothing.
        """
        program, config = lowered.program, lowered.program.config
        self.lowered: Lowered | None = lowered
        self.geometry = Geometry(
            max_batch_size=config.max_batch_size,
            max_seq_len=config.max_seq_len,
            max_prefill_tokens=config.max_prefill_tokens,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_draft_tokens=config.num_draft_tokens,
            vocab_size=program.vocab_size,
            reserve_tokens=program.num_reserved_tokens,
            num_repeated_tokens=program.num_repeated_tokens,
            draft_counts=lowered.graphs.draft_counts,
            needs_replay=lowered.graphs.replay is not None,
            host_processors=program.host_processors,
            prompt_logprobs=program.head is not None,
        )
        self._graphs = graphs or GraphOptions(mode="none")
        sizes = self._buckets(buckets)
        self.buckets = tuple(size for (size,) in sizes.decode)
        self._device = config.device
        self._recorder, self._head = program.recorder, program.head
        self._is_plain: dict[int, bool] = {}  # by row: whether it asks for the argmax alone
        self._prompt_logprobs: dict[int, dict[int, TokenLogprobs]] = {}  # by row, by position
        self.buffers: dict[str, Tensor] = {
            spec.name: torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=config.device)
            for spec in program.buffers
        }
        self._weights = bind_weights(program, lowered.graphs)
        kinds = self._graphs.kinds_on(config.device)
        self._graph_recorder = None
        if kinds:
            mode = self._graphs.mode_on(config.device)
            self._graph_recorder = Recorder(make_driver(config.device), self._graphs, mode=mode)
        fixed = {**self.buffers, **self._weights}
        self._calls = ByStep(
            Dispatcher(
                phase,
                fixed,
                config,
                buckets=sizes.of(phase.phase),
                kind=kinds.get(phase.phase),
                recorder=self._graph_recorder,
            )
            for phase in lowered.graphs.values()
        )

    def capture(self, progress: Reporter | None = None) -> None:
        """Capture graphs, the largest first, as the options say; while rows are free alone."""
        capture_all(
            list(self._calls.values()),
            startup_seconds=self._graphs.startup_seconds,
            progress=progress,
        )

    def graph_report(self) -> dict[str, Any] | None:
        """What was captured so far, and what it cost; None where nothing is."""
        recorder = self._graph_recorder
        return None if recorder is None else recorder.report.as_dict()

    def _buckets(self, given: Sequence[int] | Buckets | None) -> Buckets:
        """The given ones; else defaults of the phases that have graphs, else decode as it comes."""
        assert self.lowered is not None
        config = self.lowered.program.config
        if given is not None and not isinstance(given, Buckets):
            given = Buckets(decode=tuple((size,) for size in sorted(given)))
        kinds = self._graphs.kinds_on(config.device)
        decode, prefill = (given.decode, given.prefill) if given else ((), ())
        rows, tokens = config.max_batch_size, config.max_prefill_tokens
        if not decode:
            every = tuple((size,) for size in range(1, rows + 1))
            decode = default_decode(rows) if "decode" in kinds else every
        if not prefill and "prefill" in kinds:
            prefill = default_prefill(rows, tokens)
        return Buckets(decode=decode, prefill=prefill)

    def set_blocks(self, row: int, blocks: Sequence[int], prefix: Sequence[int] = ()) -> None:
        table = self.buffers["block_table_RM"]
        entries = list(blocks) + [-1] * (table.shape[1] - len(blocks))
        table[row] = self._int32(entries)
        for name in TOKENS_BY_POSITION:  # prefill does not see the prefix
            if prefix and name in self.buffers:
                self.buffers[name][row, : len(prefix)] = self._int32(prefix)

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self.buffers["block_table_RM"][row, start : start + len(blocks)] = self._int32(blocks)

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        write_row(self.buffers, row, sampling)
        self._is_plain[row] = is_plain(sampling)

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        return read_logprobs(self.buffers, row, tokens, min(count, self.geometry.vocab_size))

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> _Launched:
        packed = pack_chunks(chunks)
        emitted, counts, *hidden = self._calls["prefill"](packed)
        if self._recorder is not None:
            live_TE = hidden[0].squeeze(0)[: len(packed["ids_T"])]
            states = live_TE.split([len(chunk.tokens) for chunk in chunks])
            self._record([chunk.row for chunk in chunks], states)
        if self._head is not None:
            self._note_prompts(self._head, chunks, hidden[-1].squeeze(0))
        return _Launched(emitted, counts, len(chunks))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        """Launch and collect: each finished prompt's first token, else None."""
        given = self.collect(self.launch_prefill(chunks))
        return [tokens[0] if tokens else None for tokens in given]

    def _note_prompts(
        self, head: Callable[[Tensor], Tensor], chunks: Sequence[PrefillChunk], hidden_TD: Tensor
    ) -> None:
        """`hidden_TD`: what enters the head at the packed rows; padded ones at the end."""
        start = 0
        for chunk in chunks:
            begin, start = start, start + len(chunk.tokens)
            if chunk.num_logprobs is None:
                continue
            next_tokens = () if chunk.next_token is None else (chunk.next_token,)
            following = [*chunk.tokens[1:], *next_tokens]
            made = prompt_logprobs(head, hidden_TD[begin:], following, chunk.num_logprobs)
            self._prompt_logprobs[chunk.row] = dict(enumerate(made, start=chunk.start + 1))

    def prompt_logprobs(self, row: int) -> dict[int, TokenLogprobs]:
        return self._prompt_logprobs.pop(row, {})

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        count = self.geometry.num_draft_tokens
        padded = [[*ids, *[PAD] * (count - len(ids))] for ids in drafts]
        index = torch.tensor(rows, device=self._device)
        self.buffers["tokens_RS"][index, 1:] = torch.tensor(
            padded, dtype=torch.int32, device=self._device
        )

    def read_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        drafts = self.buffers["tokens_RS"][self._int32(rows), 1:].tolist()
        return [list(itertools.takewhile(lambda token: token != PAD, ids)) for ids in drafts]

    def set_masks(self, rows: Sequence[int], masks_NSW: Tensor) -> None:
        count = masks_NSW.shape[1]
        self.buffers["mask_RSW"][self._int32(rows), :count] = masks_NSW.to(self._device)

    def replay(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        replay = self._calls.replay
        assert replay is not None, "only where the geometry says needs_replay"
        replay({"row_B": rows, "backlog_B": backlogs})

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> _Launched:
        count = self.geometry.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        call, greedy = self._calls[StepKey("decode", count)], StepKey("decode", count, "greedy")
        if greedy in self._calls and all(self._is_plain.get(row, False) for row in rows):
            call = self._calls[greedy]
        emitted, counts, *hidden = call({"row_B": rows})
        if self._recorder is not None:
            self._record(rows, hidden[0][: len(rows)])
        return _Launched(emitted, counts, len(rows))

    def decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> list[list[int]]:
        """Launch and collect."""
        return self.collect(self.launch_decode(rows, num_draft_tokens))

    def collect(self, handle: _Launched) -> list[list[int]]:
        return handle.read()

    @property
    def num_recompiles(self) -> int:
        """Graphs compiled while serving: none, ever; counted so that a fault shows."""
        return sum(call.num_recompiles for call in self._calls.values())

    def close(self) -> None:
        self.lowered = None
        if self._graph_recorder is not None:
            self._graph_recorder.close()
        self._calls = ByStep(())
        self._weights.clear()
        self.buffers.clear()
        if self._recorder is not None:
            self._recorder.close()

    def _record(self, rows: Sequence[int], states: Iterable[Tensor]) -> None:
        assert self._recorder is not None
        for row, hidden_SE in zip(rows, states, strict=True):
            self._recorder.add(row, hidden_SE)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def pack_chunks(chunks: Sequence[PrefillChunk]) -> Mapping[str, list[int]]:
    """The packed prefill batch as the graph's batch inputs: T tokens of R chunks."""
    packed: dict[str, list[int]] = {
        name: []
        for name in ("ids_T", "next_T", "position_T", "row_T", "owner_T", "last_R", "commit_row_R")
    }
    for index, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        packed["ids_T"] += chunk.tokens
        packed["next_T"] += [
            *chunk.tokens[1:],
            PAD if chunk.next_token is None else chunk.next_token,
        ]
        packed["position_T"] += range(chunk.start, chunk.start + count)
        packed["row_T"] += [chunk.row] * count
        packed["owner_T"] += [index] * count
        packed["last_R"].append(len(packed["ids_T"]) - 1)
        packed["commit_row_R"].append(chunk.row if chunk.finished else PAD)
    return packed


class _Launched:
    """The tokens of a call, on their way to the host; the call's own outputs may be overwritten."""

    def __init__(self, emitted_BS: Tensor, num_emitted_B: Tensor, num_rows: int) -> None:
        results = (emitted_BS[:num_rows], num_emitted_B[:num_rows])
        self._ready: torch.cuda.Event | None = None
        if emitted_BS.is_cuda:
            self._pinned = [torch.empty(r.shape, dtype=r.dtype, pin_memory=True) for r in results]
            for pinned, result in zip(self._pinned, results, strict=True):
                pinned.copy_(result, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:  # there already
            self._emitted, self._counts = results[0].tolist(), results[1].tolist()

    def read(self) -> list[list[int]]:
        """Each row's tokens, once they are there.  PAD is no token: it stands in an unfinished
        prompt's place, and all over a row whose logits held NaN.
        """
        if self._ready is not None:
            self._ready.synchronize()
            self._emitted, self._counts = (pinned.tolist() for pinned in self._pinned)
        return [
            [token for token in tokens[:count] if token != PAD]
            for tokens, count in zip(self._emitted, self._counts, strict=True)
        ]


__all__ = ["StepRunner", "pack_chunks"]
