"""The keywords of `compile()` for type checkers and editors; `CompileOptions` checks them.

tests/pipeline/test_keywords.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

    from compilespec.cudagraphs.modes import GraphOptions
    from compilespec.methods.draft_tree import DraftTree

SpecName = Literal[
    "none",
    "eagle3",
    "eagle",
    "peagle",
    "dflash",
    "dspark",
    "medusa",
    "mtp",
    "mtp_eagle",
    "mtp_multi",
    "shared_kv",
    "draft_model",
    "self",
    "suffix",
    "ngram",
    "user",
    "save_hidden_states",
    "auto",
]


GraphMode = Literal["auto", "full_and_piecewise", "full", "full_decode_only", "piecewise", "none"]


class CompileKeywords(TypedDict, total=False):
    """The keywords of `compile` and `trace`; those of the acceptance and of the methods come last.

    A `str` beside literals is for names that a program computes; editors complete the literals.
    """

    num_draft_tokens: Literal["auto"] | str | int | Sequence[int] | None
    draft_tree: DraftTree | None
    max_batch_size: int
    max_seq_len: int | None
    max_prefill_tokens: int
    kv_cache_tokens: int | None
    enable_prefix_caching: bool
    max_cached_states: int | None
    prefix_host_mib: int | None
    prefix_dir: str | Path | None
    prefix_disk_mib: int
    overlap: Literal["auto"] | bool
    greedy_step: Literal["auto"] | bool
    max_step_tokens: int | None
    backend: Literal["inductor", "eager"] | str
    cudagraphs: (
        Literal["auto", "full_and_piecewise", "full", "full_decode_only", "piecewise", "none"]
        | GraphOptions
    )
    buckets: Sequence[int] | Mapping[str, Sequence[Any]] | None
    acceptance: Literal["auto", "rejection", "block", "relaxed"] | str | Callable[..., Any]
    logits_processor: Callable[..., Tensor] | None
    host_processors: bool
    prompt_logprobs: bool
    prompt_embeds: bool
    quantize: Any
    dequantize: bool
    draft_quantize: Any
    adapters: str | Path | Mapping[str, str | Path] | None
    max_adapters: int | None
    max_adapter_rank: int | None
    draft_vocab_size: int | None
    draft_vocab_counts: Any
    tensor_parallel_size: int
    draft_tensor_parallel_size: int
    tensor_parallel_plan: Mapping[str, str] | None

    relaxed_topk: int | None
    relaxed_delta: float | None
    begin_thinking_token_id: int | None
    end_thinking_token_id: int | None
    force_num_accepted: int | None

    aux_ids_are: Any
    aux_layers: Any
    norm_before_residual: Any
    pos0_mask: Any
    chain: Any
    kv_block_sizes: Any
    query_position: Any
    parallel: Any
    vocab_map: Any
    draft_tokenizer: Any
    max_match: Any
    min_match: Any
    num_past_texts: Any
    max_ngram: Any
    min_ngram: Any
    traced: Any
    output_dir: Any
    last_hidden: Any
    shard_tokens: Any
