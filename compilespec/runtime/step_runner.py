"""The executor over a lowered program: persistent buffers, bound inputs, two calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec import _torch_compat
from compilespec.program import PAD, InputSpec, Lowered, LoweredPhase
from compilespec.runtime.executor import Geometry, PrefillChunk
from compilespec.runtime.sampling_rows import (
    RowSampling,
    TokenLogprobs,
    read_logprobs,
    write_row,
)
from compilespec.runtime.weights import bind_weights


class StepRunner:
    """Runs the phases of a `Lowered` program; implements `Executor`.

    State rows, caches and weights are allocated or bound once; a call passes only its batch inputs.
    """

    def __init__(self, lowered: Lowered, *, buckets: Sequence[int] | None = None) -> None:
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
            reserve_tokens=2 * config.num_draft_tokens + 1,
            num_repeated_tokens=program.num_repeated_tokens,
            draft_counts=tuple(lowered.variants),
            needs_replay=lowered.replay is not None,
        )
        self.buckets = tuple(buckets) if buckets else tuple(range(1, config.max_batch_size + 1))
        self._device = config.device
        self._recorder = program.recorder
        self.buffers: dict[str, Tensor] = {
            spec.name: torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=config.device)
            for spec in program.buffers
        }
        self._weights = bind_weights(program, lowered.calls)
        self._calls = {
            name: _Call(phase, self.buffers, self._weights) for name, phase in lowered.calls.items()
        }

    def set_blocks(self, row: int, blocks: Sequence[int]) -> None:
        table = self.buffers["block_table_RM"]
        entries = list(blocks) + [-1] * (table.shape[1] - len(blocks))
        table[row] = torch.tensor(entries, dtype=torch.int32, device=self._device)

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        write_row(self.buffers, row, sampling)

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        return read_logprobs(self.buffers, row, tokens, min(count, self.geometry.vocab_size))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        packed = pack_chunks(chunks)
        emitted, _, *hidden = self._calls["prefill"](
            {name: self._int32(values) for name, values in packed.items()}
        )
        if self._recorder is not None:
            states = hidden[0].squeeze(0).split([len(chunk.tokens) for chunk in chunks])
            self._record([chunk.row for chunk in chunks], states)
        firsts = emitted[:, 0].tolist()
        return [
            first if chunk.finished else None for first, chunk in zip(firsts, chunks, strict=True)
        ]

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        count = self.geometry.num_draft_tokens
        padded = [[*ids, *[PAD] * (count - len(ids))] for ids in drafts]
        index = torch.tensor(rows, device=self._device)
        self.buffers["tokens_RS"][index, 1:] = torch.tensor(
            padded, dtype=torch.int32, device=self._device
        )

    def replay(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        bucket = next(size for size in self.buckets if size >= len(rows))
        missing = bucket - len(rows)
        self._calls["replay"](
            {
                "row_B": self._int32([*rows, *[PAD] * missing]),
                "backlog_B": self._int32([*backlogs, *[0] * missing]),
            }
        )

    def decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> list[list[int]]:
        is_smaller = num_draft_tokens not in (None, self.geometry.num_draft_tokens)
        name = f"decode.{num_draft_tokens}" if is_smaller else "decode"
        bucket = next(size for size in self.buckets if size >= len(rows))
        padded = list(rows) + [PAD] * (bucket - len(rows))
        emitted, counts, *hidden = self._calls[name]({"row_B": self._int32(padded)})
        if self._recorder is not None:
            self._record(rows, hidden[0][: len(rows)])
        return [
            tokens[:count]
            for tokens, count in zip(
                emitted.tolist()[: len(rows)], counts.tolist()[: len(rows)], strict=True
            )
        ]

    @property
    def num_recompiles(self) -> int:
        """Graphs compiled while serving: none, ever; counted so that a fault shows."""
        return sum(call.num_recompiles for call in self._calls.values())

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self.lowered = None
        self._calls.clear()
        self._weights.clear()
        self.buffers.clear()

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


class _Call:
    """A phase's callable with its fixed inputs in place."""

    def __init__(
        self, phase: LoweredPhase, buffers: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        self._call = phase.call
        self._inputs: list[Any] = [_fixed(spec, buffers, weights) for spec in phase.inputs]
        self.num_recompiles = 0
        self._batch = {
            spec.name: index for index, spec in enumerate(phase.inputs) if spec.kind == "batch"
        }

    def __call__(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        inputs = list(self._inputs)
        for name, index in self._batch.items():
            inputs[index] = batch[name]
        compiled_before = _torch_compat.count_compilations()
        result: Sequence[Tensor] = self._call(*inputs)
        self.num_recompiles += _torch_compat.count_compilations() - compiled_before
        return result


def _fixed(
    spec: InputSpec, buffers: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> Tensor | None:
    if spec.kind == "batch":
        return None
    return weights[spec.name] if spec.kind == "weight" else buffers[spec.name]


__all__ = ["StepRunner", "pack_chunks"]
