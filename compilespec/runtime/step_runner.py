"""The executor over a lowered program: persistent buffers, bound inputs, two calls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.cudagraphs.buckets import Bucket, Buckets, choose_buckets
from compilespec.cudagraphs.dispatcher import Dispatcher, capture_all
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.cudagraphs.recorder import make_recorder
from compilespec.errors import NotSupported
from compilespec.lowering.ahead import compile_kernels
from compilespec.ops.device import traits_of
from compilespec.ops.thread_pool import use_thread_pool
from compilespec.passes.splice.evidence import Evidence
from compilespec.passes.splice.output_head_input import HeadFunction
from compilespec.passes.splice.recurrent_state import ABSORBED
from compilespec.program import (
    PAD,
    ByStep,
    Lowered,
    LoweredPhase,
    ProgramConfig,
    StepKey,
    is_recurrent,
)
from compilespec.progress import Reporter
from compilespec.runtime.adapter_places import product_sizes, write_adapter
from compilespec.runtime.buffers import allocate, release
from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.given_rows import write_rows
from compilespec.runtime.host_writes import HostWrites
from compilespec.runtime.launched import Launched
from compilespec.runtime.packing import BESIDE_IDS, pack_chunks
from compilespec.runtime.past_texts import BUFFER, PastTexts
from compilespec.runtime.prefix_cache import TOKENS_BY_POSITION
from compilespec.runtime.prompt_logprobs import PromptLogprobs
from compilespec.runtime.sampling_rows import (
    RowSampling,
    TokenLogprobs,
    is_plain,
    read_logprobs,
    write_row,
)
from compilespec.runtime.state_copies import StateCopies
from compilespec.runtime.taps import Taps
from compilespec.runtime.weights import bind_weights, panels_of
from compilespec.tracing.adapter_files import LowRank


class StepRunner:
    """Runs the phases of a `Lowered` program; implements `Executor`.

    State rows, caches and weights are allocated or bound once; a call passes only its batch inputs.
    `calls` are the program's graphs, ready to run; they read `buffers` and `weights`, by name.
    """

    def __init__(
        self,
        lowered: Lowered,
        *,
        buckets: Sequence[int] | Buckets | None = None,
        graphs: GraphOptions | None = None,
        model: nn.Module | None = None,
        num_state_places: int = 0,
    ) -> None:
        """Bind weights and allocate buffers; nothing is captured yet.

        Args:
            buckets: sizes that batches are padded to; decode alone, where they are numbers.
            graphs: the graphs to capture; None: none.
            model: its parameters become rows of merged weights; None: all stay what they are.
            num_state_places: copies of the recurrent states of a row, for shared prefixes.
        """
        program, config = lowered.program, lowered.program.config
        self.lowered: Lowered | None = lowered
        self.geometry = _geometry(lowered, num_state_places)
        self._device = config.device
        self._is_plain: dict[int, bool] = {}  # by row: true if it asks only for the argmax
        recorder = program.drafter.recorder if program.drafter else None
        self._taps = None if recorder is None else Taps(recorder)
        is_asked = config.features.prompt_logprobs
        self.weights = bind_weights(program, lowered.graphs, model)
        panels = panels_of(program, lowered.graphs, self.weights)
        head = HeadFunction(program.target, panels) if is_asked else None
        self._prompts = None if head is None else PromptLogprobs(head)
        self.buffers: dict[str, Tensor] = {
            spec.name: allocate(spec, config.device) for spec in program.buffers
        }
        self._copies = StateCopies(
            program.recurrent_states, self.buffers, num_state_places, config.device
        )
        self._host = HostWrites(self.buffers, config.device)
        self._past_texts = PastTexts(self._host) if BUFFER in self.buffers else None
        inputs = {spec.name for spec in lowered.graphs["prefill"].inputs}
        self._beside_ids = tuple(name for name in BESIDE_IDS if name in inputs)
        self._graphs = graphs or GraphOptions(mode="none")
        self._graph_recorder = make_recorder(self._graphs, config.device)
        sizes = choose_buckets(
            buckets,
            has_graphs=self._graphs.kinds_on(config.device),
            max_batch_size=config.max_batch_size,
            max_prefill_tokens=config.max_prefill_tokens,
        )
        self.buckets = tuple(size for (size,) in sizes.decode)
        self.calls = ByStep(
            self._dispatcher(graph, config, sizes.of(graph.phase))
            for graph in lowered.graphs.values()
        )

    def _dispatcher(
        self, graph: LoweredPhase, config: ProgramConfig, buckets: Sequence[Bucket]
    ) -> Dispatcher:
        return Dispatcher(
            graph,
            {**self.buffers, **self.weights},
            config,
            buckets=buckets,
            kind=self._graphs.kinds_on(config.device).get(graph.phase),
            recorder=self._graph_recorder,
        )

    def capture(self, progress: Reporter | None = None) -> None:
        """Capture graphs, the largest first, as the options say; only while all rows are free."""
        startup_seconds = self._graphs.startup_seconds
        if self.lowered is not None and startup_seconds > 0:
            sizes = {call.key: call.captured_sizes for call in self.calls.values()}
            compile_kernels(self.lowered, sizes, progress or Reporter())
        capture_all(list(self.calls.values()), startup_seconds=startup_seconds, progress=progress)

    def graph_report(self) -> dict[str, Any] | None:
        """The graphs captured so far, and their cost; None without graphs."""
        recorder = self._graph_recorder
        return None if recorder is None else recorder.report.as_dict()

    def set_blocks(
        self,
        row: int,
        blocks: Sequence[int],
        prefix: Sequence[int] = (),
        state_place: int | None = None,
    ) -> None:
        if state_place is not None:
            self._copies.restore(state_place, row)
            if ABSORBED in self.buffers:
                self._host.write(ABSORBED, row, [len(prefix)])
        rest = self.buffers["block_table_RM"].shape[1] - len(blocks)
        self._host.write("block_table_RM", row, [*blocks, *[-1] * rest])
        for name in TOKENS_BY_POSITION:  # prefill does not see the prefix
            if prefix and name in self.buffers:
                self._host.write(name, row, prefix)

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._host.write("block_table_RM", row, blocks, start)

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        write_row(self._host, row, sampling)
        self._is_plain[row] = is_plain(sampling)

    def adapter_products(self) -> Mapping[str, tuple[int, int]]:
        shape = self.geometry.config.adapters
        return {} if shape is None else product_sizes(self.buffers, shape)

    def write_adapter(self, place: int, modules: Mapping[str, LowRank]) -> None:
        assert self.geometry.config.adapters is not None, "the engine checks that there is room"
        write_adapter(self.buffers, self.geometry.config.adapters, place, modules)

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        return read_logprobs(self.buffers, row, tokens, min(count, self.geometry.config.vocab_size))

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> Launched:
        self._share_out(pool=False)
        self._host.send()
        packed = pack_chunks(chunks, self._beside_ids)
        if "embeds_PD" in self.buffers:
            self._write_given(chunks)
        emitted, counts, *hidden = self.calls["prefill"](packed)
        if self._taps is not None:
            self._taps.add_chunks(chunks, hidden[0].squeeze(0))
        if self._prompts is not None:
            self._prompts.note(chunks, hidden[-1].squeeze(0))
        for chunk in chunks:
            if chunk.state_place is not None:
                self._copies.keep(chunk.row, chunk.state_place)
        return self._launched(emitted, counts, len(chunks))

    def _write_given(self, chunks: Sequence[PrefillChunk]) -> None:
        start = 0
        for chunk in chunks:
            if chunk.given is not None:
                write_rows(
                    self.buffers["embeds_PD"], start, chunk.given, self.buffers.get("deep_PE")
                )
            start += len(chunk.tokens)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        """Launch and collect: each finished prompt's first token, else None."""
        given = self.collect(self.launch_prefill(chunks))
        return [tokens[0] if tokens else None for tokens in given]

    def prompt_logprobs(self, row: int) -> dict[int, TokenLogprobs]:
        return {} if self._prompts is None else self._prompts.take(row)

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        count = self.geometry.config.num_draft_tokens
        for row, ids in zip(rows, drafts, strict=True):
            self._host.write("tokens_RS", row, [*ids, *[PAD] * (count - len(ids))], 1)

    def read_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        self._host.send()  # drafts may have come from the host
        drafts: list[list[int]] = self.buffers["tokens_RS"][self._int32(rows), 1:].tolist()
        if self.geometry.config.tree is not None:
            return drafts
        return [list(itertools.takewhile(lambda token: token != PAD, ids)) for ids in drafts]

    def read_parents(self, rows: Sequence[int]) -> Sequence[list[int] | None]:
        if self.geometry.config.tree is None:
            return [None] * len(rows)
        parents: list[list[int]] = self.buffers["parents_RS"][self._int32(rows), 1:].tolist()
        return parents

    def keep_text(self, tokens: Sequence[int]) -> None:
        if self._past_texts is not None:
            self._past_texts.keep(tokens)

    def set_masks(self, rows: Sequence[int], masks_NSW: Tensor) -> None:
        for row, mask_SW in zip(rows, masks_NSW, strict=True):
            self._host.write("mask_RSW", row, mask_SW)

    def catch_up(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        step = self.calls.replay
        assert step is not None, "only where the geometry says needs_catch_up"
        self._host.send()
        self._share_out(pool=True)
        step({"row_B": rows, "backlog_B": backlogs})

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> Launched:
        count = (
            self.geometry.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        )
        call, greedy = self.calls[StepKey("decode", count)], StepKey("decode", count, "greedy")
        if greedy in self.calls and all(self._is_plain.get(row, False) for row in rows):
            call = self.calls[greedy]
        self._host.send()
        self._share_out(pool=True)
        emitted, counts, *hidden = call({"row_B": rows})
        if self._taps is not None:
            self._taps.add_rows(rows, hidden[0])
        return self._launched(emitted, counts, len(rows))

    def decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> list[list[int]]:
        """Launch and collect."""
        return self.collect(self.launch_decode(rows, num_draft_tokens))

    def collect(self, handle: Launched) -> list[list[int]]:
        return handle.read()

    def evidence(self, handle: Launched) -> Sequence[Evidence]:
        return handle.evidence

    @property
    def num_recompiles(self) -> int:
        """Graphs compiled while serving: always 0; counted so that a fault shows."""
        return sum(call.num_recompiles for call in self.calls.values())

    @property
    def num_kept_state_bytes(self) -> int:
        """Bytes of the copies of recurrent states."""
        return self._copies.num_bytes

    @property
    def kept_states(self) -> Sequence[Tensor]:
        """The copies of recurrent states, by place."""
        return [kept for _, kept in self._copies.pairs]

    @property
    def num_state_copies(self) -> int:
        """Copies of the host's writes into state rows; at most one a launch, none on the CPU."""
        return self._host.num_copies

    def release_caches(self) -> int:
        if not traits_of(self._device).is_cpu:
            raise NotSupported(
                "sleep: graphs remember the addresses of the caches, whose memory only the CPU can "
                "give back in place; close the engine instead"
            )
        assert self.lowered is not None, "the engine checks that it is open"
        specs = self.lowered.program.buffers
        given = [
            release(self.buffers[spec.name], spec.fill)
            for spec in specs
            if spec.kind == "cache" or is_recurrent(spec)
        ]
        return sum(given) + sum(release(kept) for _, kept in self._copies.pairs)

    def close(self) -> None:
        self.lowered = None
        if self._graph_recorder is not None:
            self._graph_recorder.close()
        self.calls = ByStep(())
        self.weights.clear()
        self.buffers.clear()
        self._copies.close()
        if self._taps is not None:
            self._taps.close()

    def _share_out(self, *, pool: bool) -> None:
        """Choose the threads: decode steps run on the pool, prefills on OpenMP's threads, where
        Inductor's loops run.
        """
        if traits_of(self._device).is_cpu:
            use_thread_pool(pool)

    def _launched(self, emitted_BS: Tensor, counts_B: Tensor, num_rows: int) -> Launched:
        has_evidence = self.geometry.tells_evidence
        return Launched(emitted_BS, counts_B, num_rows, has_evidence=has_evidence)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _geometry(lowered: Lowered, num_state_places: int) -> Geometry:
    program = lowered.program
    widths = {buffer.name: buffer.shape[-1] for buffer in program.buffers}
    return Geometry(
        config=program.config,
        capabilities=program.capabilities,
        reach=program.reach,
        needs_catch_up=lowered.graphs.replay is not None,
        embeds_width=widths.get("embeds_PD"),
        deep_width=widths.get("deep_PE", 0),
        num_state_places=num_state_places if program.recurrent_states else None,
    )
