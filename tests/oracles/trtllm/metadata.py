"""TensorRT-LLM's metadata of one speculative step, and its copy for a captured graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from compilespec.reference_ops.modes import SpecMode
from tests.oracles.trtllm.sampling import sampling_rows


@dataclass(kw_only=True)
class SpecMetadata:
    """Source: requirement I5."""

    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    num_generations: int = 0
    is_cuda_graph: bool = False
    spec_dec_mode: SpecMode = SpecMode.NONE
    draft_tokens: Tensor | None = None
    draft_lens: Any = None
    request_ids: Sequence[int] | None = None
    seq_lens: Any = None
    gather_ids: Tensor | None = None
    num_accepted_draft_tokens: Tensor | None = None
    num_tokens: int = 0
    all_rank_num_tokens: list[int] | None = None
    all_rank_num_seqs: list[int] | None = None
    num_extra_kv_tokens: int = 0  # entries that the drafter's cache holds beyond the target's
    num_layers: int = 0
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False
    allow_advanced_sampling: bool = False
    temperatures: Tensor | None = None
    top_ks: Tensor | None = None
    top_ps: Tensor | None = None

    def __post_init__(self) -> None:
        """Allocate the buffers that are as large as the batch; the base class has none."""

    def create_cuda_graph_metadata(self, max_batch_size: int) -> Self:
        """Metadata for a graph of this batch size; metadata that already belongs to a graph is
        returned unchanged.

        Nothing is shared: tensors and lists are copied before the buffers are allocated again
        (H-2).
        Source: requirement I6.
        """
        if self.is_cuda_graph:
            return self
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                vars(made)[name] = value.clone()
            elif isinstance(value, list):
                vars(made)[name] = list(value)
        made.is_cuda_graph, made.max_num_requests = True, max_batch_size
        made.__post_init__()
        return made

    def populate_sampling(self, requests: Sequence[tuple[Mapping[str, Any] | None, bool]]) -> None:
        """Fill the sampling rows, request by request; does nothing unless they are needed.

        Source: requirement I8.
        """
        if not self.allow_advanced_sampling or not self.spec_dec_mode.traits.one_engine:
            return
        num_rows = (self.max_draft_len + 1) * self.max_num_requests
        if self.temperatures is None or len(self.temperatures) != num_rows:
            self.temperatures = torch.ones(num_rows)
            self.top_ks = torch.zeros(num_rows, dtype=torch.int32)
            self.top_ps = torch.ones(num_rows)
        assert self.top_ks is not None
        assert self.top_ps is not None
        rows = sampling_rows(requests, self.max_draft_len)
        buffers = (self.temperatures, self.top_ks, self.top_ps)
        for buffer, values in zip(buffers, rows, strict=True):
            buffer[: len(values)] = values


@dataclass(kw_only=True)
class MTPMetadata(SpecMetadata):
    """Source: requirement M2; the module count is a number (H-7)."""

    mtp_num_modules: int = 1
    slot_ids: Tensor = dataclasses.field(init=False)  # int64 [max_num_requests]
    batch_indices: Tensor = dataclasses.field(init=False)  # int32 [max_num_requests]
    draft_token_indices: Tensor = dataclasses.field(init=False)  # int32 [mtp_num_modules]

    def __post_init__(self) -> None:
        self.slot_ids = torch.zeros(self.max_num_requests, dtype=torch.int64)
        self.batch_indices = torch.zeros(self.max_num_requests, dtype=torch.int32)
        self.draft_token_indices = torch.arange(self.mtp_num_modules, dtype=torch.int32)

    @property
    def subseq_all_rank_num_tokens(self) -> list[int] | None:
        """Tokens of each rank in steps after the first: one per sequence, for a recycled module."""
        return None if self.spec_dec_mode.is_mtp_vanilla() else self.all_rank_num_seqs

    @property
    def num_draft_rows(self) -> int:
        """Rows of the drafter's step: vanilla MTP drafts over K rows a generation, not K + 1.

        Computed; TensorRT-LLM instead subtracts it from `num_tokens` at every `prepare` (H-8).
        """
        return self.num_tokens - self.num_generations * self.spec_dec_mode.is_mtp_vanilla()

    def prepare(self, slots: Mapping[int, int]) -> None:
        """Fill the buffers for the requests of the step; may be called repeatedly.

        Args:
            slots: pool row of each request id.
        Raises: ValueError without request_ids.
        """
        if self.request_ids is None:
            raise ValueError("prepare needs request_ids: set them first")
        count = len(self.request_ids)
        self.batch_indices[:count] = torch.arange(count, dtype=torch.int32)
        self.slot_ids[:count] = torch.tensor([slots[i] for i in self.request_ids])
