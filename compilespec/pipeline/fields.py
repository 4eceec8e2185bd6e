"""The keywords of `compile()`: name, type, default, a sentence, and a check of the value.

torch is not imported here, so that the command line can make a flag of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilespec.errors import InvalidOption, is_integer
from compilespec.errors.suggest import not_one_of
from compilespec.pipeline.keywords import (
    auto_or_switch,
    check_fields,
    function_or_none,
    keyword,
    positive,
    positive_or_none,
    switch,
)

if TYPE_CHECKING:
    from torch import Tensor

    from compilespec.cudagraphs.modes import GraphOptions
    from compilespec.methods.draft_tree import DraftTree


def _backend(name: str, value: Any) -> None:
    from compilespec.lowering import BACKENDS

    if value not in BACKENDS:
        raise not_one_of(name, value, BACKENDS)


def _two_or_more(name: str, value: Any) -> None:
    if value is not None and (not is_integer(value) or value < 2):
        raise InvalidOption(
            f"{name} must be an integer of at least 2, a prompt token and a new one; got {value!r}"
        )


def _zero_or_more_or_none(name: str, value: Any) -> None:
    if value is not None and (not is_integer(value) or value < 0):
        raise InvalidOption(f"{name} must be an integer of at least 0, or None; got {value!r}")


def _text_or_none(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str | Path) or not str(value)):
        raise InvalidOption(f"{name} must be the path of a folder, or None; got {value!r}")


def _tree_or_none(name: str, value: Any) -> None:
    from compilespec.methods.draft_tree import DraftTree

    if value is not None and not isinstance(value, DraftTree):
        raise InvalidOption(
            f"{name} must be a compilespec.DraftTree, such as DraftTree(top_k=4, depth=4, "
            f"num_nodes=16); got {value!r}"
        )


def _counts_or_file(name: str, value: Any) -> None:
    from torch import Tensor

    if isinstance(value, str | Path):
        if not Path(value).is_file():
            raise InvalidOption(f"{name} must be a file of counts or of text; there is no {value}")
    elif not (value is None or isinstance(value, Mapping | Sequence | Tensor)):
        raise InvalidOption(f"{name} must be a file, texts, or counts by token id; got {value!r}")


def _adapters(name: str, value: Any) -> None:
    if value is None or isinstance(value, str | Path):
        return
    from compilespec.tracing.adapter_files import Adapter

    is_by_name = isinstance(value, Mapping) and all(
        isinstance(key, str) and key and isinstance(path, str | Path | Adapter)
        for key, path in value.items()
    )
    if not is_by_name:
        raise InvalidOption(
            f"{name} must be the directory of a LoRA adapter, or directories by name; got {value!r}"
        )


def _ways_or_none(name: str, value: Any) -> None:
    from compilespec.passes.splice.sharding.plan import WAYS

    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidOption(
            f'{name} must be a dict of ways by module path, such as {{"*.mlp": "whole"}}; got '
            f"{value!r}"
        )
    for way in value.values():
        if way not in WAYS:
            raise not_one_of(name, way, WAYS)


@dataclass(frozen=True, kw_only=True)
class CompileFields:
    """The keywords of `compile()` as users give them, and the options of the acceptance."""

    num_draft_tokens: int | str | Sequence[int] | None = keyword(
        None,
        "K; None takes the checkpoint's own, else 3, or 0 in steps where drafts do not pay.  "
        "Several, such as (0, 2, 5), let every step take the one that pays, by measured times, by "
        'how sure the drafter is, and by how often it was right; "auto" takes several that suit '
        "the method.  At most 64, and below max_seq_len.",
    )
    draft_tree: DraftTree | None = keyword(
        None,
        "verify a tree of drafts instead of a chain: several guesses for each position.  Its depth "
        "is K; num_draft_tokens is left out.  For eagle3, eagle, mtp_eagle, draft_model, medusa.",
        _tree_or_none,
    )
    max_batch_size: int = keyword(8, "requests that run at the same time.", positive)
    max_seq_len: int | None = keyword(
        None,
        "tokens per request, prompt included; None takes the model's limit, at most 4096.",
        _two_or_more,
    )
    max_prefill_tokens: int = keyword(
        2048, "prompt tokens that one step takes; longer prompts come in chunks.", positive
    )
    kv_cache_tokens: int | None = keyword(
        None,
        "size of the KV cache; None is max_batch_size * max_seq_len.",
        positive_or_none,
    )
    enable_prefix_caching: bool = keyword(
        True,
        "keep the cache blocks of prompts and outputs until others need them, and find them again "
        "for requests that begin alike.",
        switch,
    )
    max_cached_states: int | None = keyword(
        None,
        "copies of the states of recurrent layers that prefix caching keeps, each as large as a "
        "request's; None is twice max_batch_size, at least 8.  0: none are kept, and such models "
        "share no prefixes.",
        _zero_or_more_or_none,
    )
    prefix_host_mib: int | None = keyword(
        None,
        "host memory, in MiB, for blocks that the KV cache gives up: requests that begin alike get "
        "them back from there; None: none.",
        positive_or_none,
    )
    prefix_dir: str | Path | None = keyword(
        None,
        "a folder that blocks of prompts and outputs are written to as well, and found in after a "
        "restart with the same options, code and weights; None: they are in memory alone.",
        _text_or_none,
    )
    prefix_disk_mib: int = keyword(
        4096,
        "most MiB that the files in prefix_dir take; those not used for longest make room.",
        positive,
    )
    overlap: bool | str = keyword(
        "auto",
        'launch a step before the tokens of the last one are read; "auto" where it gains.',
        auto_or_switch,
    )
    greedy_step: bool | str = keyword(
        "auto",
        "compile a second decode step for batches whose requests all want the argmax and nothing "
        "else (no sampling, penalties, bias, guide or log-probabilities): it never writes the "
        'logits where heads are fused with their argmax.  "auto": on CUDA, and for trees.',
        auto_or_switch,
    )
    max_step_tokens: int | None = keyword(
        None,
        "tokens of a step, prefill and decode together, so that long prompts delay other requests "
        "less; None is no limit beside max_prefill_tokens.",
        positive_or_none,
    )
    backend: str = keyword(
        "inductor", '"inductor", or "eager" (the same rewritten graphs, interpreted).', _backend
    )
    cudagraphs: str | GraphOptions = keyword(
        "auto",
        '"auto" (full_and_piecewise on CUDA, none on the CPU), "full_and_piecewise", "full", '
        '"full_decode_only", "piecewise" or "none".  Or a `GraphOptions` with budgets.',
    )
    buckets: Sequence[int] | Mapping[str, Sequence[Any]] | None = keyword(
        None,
        'batch sizes that decode steps are padded to, or a dict of "decode" sizes and "prefill" '
        "pairs (requests, tokens); None pads nothing where no graphs are captured.",
    )
    acceptance: str | Callable[..., Any] = keyword(
        "auto",
        'how drafts are judged.  "auto": greedy requests strictly, sampled ones by the target\'s '
        "own noise, so that their tokens are those of plain decoding with the same seed; "
        '"rejection" or "block": by probabilities, which keeps the distribution; a function marked '
        'with `compilespec.acceptance_rule`; or "relaxed", which is lossy.',
    )
    logits_processor: Callable[..., Tensor] | None = keyword(
        None,
        "a function or module that is traced into the step and changes the target's logits; what "
        "it may read, and must not do, is said at `LogitsProcessor`.",
        function_or_none,
    )
    host_processors: bool = keyword(
        False,
        "each request may have its `logits_processor`, a Python function.  A step then "
        "waits for the host, copies its logits, and cannot be captured in a CUDA graph.",
        switch,
    )
    prompt_logprobs: bool = keyword(
        False,
        "requests may ask for `prompt_logprobs`.  Prefill then gives out its hidden states; others "
        "pay nothing else.",
        switch,
    )
    prompt_embeds: bool = keyword(
        False,
        "prompts may be embeddings, as `compilespec.EmbedsPrompt`.  Prefill then reads a buffer of "
        "max_prefill_tokens rows.",
        switch,
    )
    quantize: Any = keyword(
        None,
        '"int8_weight_only", "int8_dynamic", "int8_nested", "int4_weight_only", "int4_dynamic", '
        '"float8_weight_only" or "float8_dynamic".  Or a torchao config, or a `Quantize` that also '
        "says for which modules.  Needs the extra `quant`; `model` is left as it is.",
    )
    dequantize: bool = keyword(
        False,
        "dequantise the weights of a GGUF file.  Else products and embeddings of the CPU compute "
        "with its blocks as they are stored, and quantize their rows to int8.",
        switch,
    )
    draft_quantize: Any = keyword(
        None,
        "the same for the drafter.  A head that it shares with the target becomes its own then, "
        "unless the target's is quantized: that one stays shared.",
    )
    adapters: str | Path | Mapping[str, str | Path] | None = keyword(
        None,
        "a directory with a LoRA adapter of peft, which is merged into the target's weights, while "
        "`model` is left as it is; or directories by name, among which each request chooses with "
        "`SamplingParams(adapter=)`.  {} makes room for some that are loaded later.",
        _adapters,
    )
    max_adapters: int | None = keyword(
        None,
        "adapters that can be loaded at once, which every step pays for; None: as many as "
        "adapters= has, at least one.",
        positive_or_none,
    )
    max_adapter_rank: int | None = keyword(
        None,
        "the highest rank of theirs, to which all are padded; None: that of adapters=, or 16.",
        positive_or_none,
    )
    draft_vocab_size: int | None = keyword(
        None,
        "rows that a drafter's large head keeps, those of the tokens that occur most often: drafts "
        "are cheaper, and rare tokens are never drafted.  The output is what it was.",
        positive_or_none,
    )
    draft_vocab_counts: Any = keyword(
        None,
        "how often each token occurs: a file that `Engine.save_token_counts` wrote, or a text "
        "file; None takes token_counts.json beside the target.  Or texts, which the tokenizer "
        "splits, or counts by token id.",
        _counts_or_file,
    )
    tensor_parallel_size: int = keyword(
        1,
        "processes that share one model, each with its part of the weights and of the KV cache.  "
        "The program runs under torchrun with that many.",
        positive,
    )
    draft_tensor_parallel_size: int = keyword(
        1,
        "processes that share the drafter: 1, every one has all of it, or tensor_parallel_size.",
        positive,
    )
    tensor_parallel_plan: Mapping[str, str] | None = keyword(
        None,
        'how linear layers are cut, by module path or pattern: "columns" (of their outputs), '
        '"rows" (of their inputs) or "whole"; None derives it from the graph.',
        _ways_or_none,
    )

    # ACCEPTANCE_OPTIONS: given among a method's options.
    relaxed_topk: int | None = keyword(None, "accepts drafts among the n best tokens.", shown=False)
    relaxed_delta: float | None = keyword(
        None, "and at most so much less probable than the best one.", shown=False
    )
    begin_thinking_token_id: int | None = keyword(
        None, "relaxed acceptance begins after this token.", shown=False
    )
    end_thinking_token_id: int | None = keyword(None, "and ends at this one.", shown=False)
    force_num_accepted: int | None = keyword(
        None, "accepts n drafts regardless of their tokens (benchmarks only).", shown=False
    )

    def __post_init__(self) -> None:
        check_fields(self)
