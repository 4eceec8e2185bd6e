"""The keywords of `compile()`, checked and turned into the sizes of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compilespec.cudagraphs.buckets import Buckets, read_buckets
from compilespec.cudagraphs.modes import GraphOptions, read_graph_options
from compilespec.errors import InvalidOption, is_integer
from compilespec.errors.suggest import did_you_mean, not_one_of
from compilespec.lowering import BACKENDS
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.draft_tree import DraftTree
from compilespec.ops.collectives.group import this_rank
from compilespec.passes.splice.acceptance.options import ACCEPTANCE_OPTIONS, resolve_acceptance
from compilespec.passes.splice.acceptance.rule import Acceptance
from compilespec.passes.splice.logits_processor import LogitsProcessor
from compilespec.passes.splice.sharding.plan import WAYS, Sharding
from compilespec.pipeline.keywords import (
    auto_or_switch,
    check_fields,
    function_or_none,
    keyword,
    positive,
    positive_or_none,
    switch,
)
from compilespec.program import ProgramConfig, RequestFeatures
from compilespec.quantization import Quantize, read_quantize
from compilespec.runtime.keywords import FIELDS
from compilespec.tracing.images import has_own_masks
from compilespec.tracing.load import Target
from compilespec.tracing.long_rope import short_rope_limit
from compilespec.tracing.target_info import TargetInfo

DEFAULT_DRAFT_TOKENS = 3
AUTO = "auto"  # several K, if the method can have them
MAX_DRAFT_TOKENS = 64  # each is a row of the step and usually a pass of the drafter
DEFAULT_MAX_SEQ_LEN = 4096
BLOCK_SIZE = 16


def _backend(name: str, value: Any) -> None:
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


def _tree_or_none(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, DraftTree):
        raise InvalidOption(
            f"{name} must be a compilespec.DraftTree, such as DraftTree(top_k=4, depth=4, "
            f"num_nodes=16); got {value!r}"
        )


def _counts_or_file(name: str, value: Any) -> None:
    if isinstance(value, str | Path):
        if not Path(value).is_file():
            raise InvalidOption(f"{name} must be a file of counts or of text; there is no {value}")
    elif not (value is None or isinstance(value, Mapping | Sequence | Tensor)):
        raise InvalidOption(f"{name} must be a file, texts, or counts by token id; got {value!r}")


def _adapters(name: str, value: Any) -> None:
    if value is None or isinstance(value, str | Path):
        return
    is_by_name = isinstance(value, Mapping) and all(
        isinstance(key, str) and key and isinstance(path, str | Path) for key, path in value.items()
    )
    if not is_by_name:
        raise InvalidOption(
            f"{name} must be the directory of a LoRA adapter, or directories by name; got {value!r}"
        )


def _ways_or_none(name: str, value: Any) -> None:
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
class CompileOptions:
    """The keywords of `compile()` as users give them; their meanings are properties.

    Making one checks all that needs no model, so that errors come before anything is loaded.
    Raises: InvalidOption, NotSupported.
    """

    num_draft_tokens: int | str | Sequence[int] | None = keyword(
        None,
        "K; None takes the checkpoint's own, else 3.  Several, such as (0, 2, 5), let every step "
        "take the one that pays, by measured times, by how sure the drafter is, and by how often "
        'it was right; "auto" takes several that suit the method.  At most 64, and below '
        "max_seq_len.",
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
        '"full_decode_only", "piecewise", "none", or a `GraphOptions` with budgets.',
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
        'a torchao config, its short name ("int8_weight_only", "int8_dynamic", '
        '"int4_weight_only", "int4_dynamic", "float8_weight_only", "float8_dynamic"), or a `Quantize` that also '
        "says for which modules.  Needs the extra `quant`; `model` is left as it is.",
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
        "how often each token occurs: a file that `Engine.save_token_counts` wrote, a text file or "
        "texts, which the tokenizer splits, or counts by token id; None looks for "
        "token_counts.json beside the target.",
        _counts_or_file,
    )
    tensor_parallel_size: int = keyword(
        1,
        "processes that share one model, each with its part of the weights and of the KV cache; "
        "the program runs under torchrun with that many.",
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
        if self.draft_vocab_counts is not None and self.draft_vocab_size is None:
            raise InvalidOption(
                "draft_vocab_counts= needs draft_vocab_size=, the rows that a drafter's head keeps"
            )
        if self.draft_tensor_parallel_size not in (1, self.tensor_parallel_size):
            raise InvalidOption(
                "draft_tensor_parallel_size must be 1 or tensor_parallel_size="
                f"{self.tensor_parallel_size}; got {self.draft_tensor_parallel_size}"
            )
        for name in ("max_adapters", "max_adapter_rank"):
            if getattr(self, name) is not None and not isinstance(self.adapters, Mapping):
                raise InvalidOption(
                    f"{name}= needs adapters={{name: directory}}, among which requests choose"
                )
        for name, attribute in vars(CompileOptions).items():
            if isinstance(attribute, functools.cached_property):
                getattr(self, name)  # reading the property checks it

    @functools.cached_property
    def draft_counts(self) -> tuple[int, ...]:
        """Every K that was given, in rising order; empty without one."""
        given = self.num_draft_tokens
        if given is None or given == AUTO:
            return ()
        if isinstance(given, int) or not isinstance(given, Sequence):
            positive("num_draft_tokens", given)
            _check_draft_tokens(given)
            return (given,)
        several = not isinstance(given, str) and all(is_integer(count) for count in given)
        counts: list[int] = sorted({int(count) for count in given}) if several else []
        if not counts or counts[0] < 0 or counts[-1] < 1:
            raise InvalidOption(
                f"num_draft_tokens must be a positive integer, 'auto', or several of 0 and more of "
                f"which each step takes the best, such as (0, 2, 5); got {given!r}"
            )
        _check_draft_tokens(counts[-1])
        return tuple(counts)

    @property
    def smaller_draft_counts(self) -> tuple[int, ...]:
        """Every K but the largest; a step may choose one of them."""
        return self.draft_counts[:-1]

    @functools.cached_property
    def bucket_sizes(self) -> Buckets | None:
        """The sizes of `buckets`; None: nothing is padded where no graphs are captured."""
        return read_buckets(
            self.buckets,
            max_batch_size=self.max_batch_size,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    @functools.cached_property
    def graphs(self) -> GraphOptions:
        """The options of `cudagraphs`."""
        return read_graph_options(self.cudagraphs)

    @functools.cached_property
    def acceptance_rule(self) -> Acceptance:
        """The rule of `acceptance` and its options."""
        given = {name: getattr(self, name) for name in ACCEPTANCE_OPTIONS}
        return resolve_acceptance(self.acceptance, **given)

    @functools.cached_property
    def processor(self) -> LogitsProcessor | None:
        """The processor of `logits_processor`."""
        given = self.logits_processor
        return None if given is None else LogitsProcessor(given)

    @property
    def sharding(self) -> Sharding | None:
        """A new plan for `tensor_parallel_size`, for this process's rank, still undecided."""
        size = self.tensor_parallel_size
        if size == 1:
            return None
        return Sharding(
            size=size,
            rank=this_rank(),
            wanted=self.tensor_parallel_plan or {},
            draft_size=self.draft_tensor_parallel_size,
        )

    @functools.cached_property
    def quantization(self) -> Quantize | None:
        """The target's quantization, from `quantize`."""
        return read_quantize(self.quantize)

    @functools.cached_property
    def draft_quantization(self) -> Quantize | None:
        """The drafter's quantization, from `draft_quantize`."""
        return read_quantize(self.draft_quantize, "draft_quantize")

    def program_config(
        self, target: Target, info: TargetInfo, drafter: Drafter | None
    ) -> ProgramConfig:
        """All sizes, fixed.  Raises: InvalidOption where the model cannot serve them."""
        _check_token_ids(self.acceptance_rule, info.vocab_size)
        max_seq_len = self.longest_request(target.max_seq_len)
        tree = None if self.draft_tree is None else self.draft_tree.shape
        num_draft_tokens = self._num_draft_tokens(drafter)
        if num_draft_tokens >= max_seq_len:
            raise InvalidOption(
                f"{'the depth of draft_tree' if tree else 'num_draft_tokens'} must be below "
                f"max_seq_len={max_seq_len}, or no step could use all of them; got "
                f"{num_draft_tokens}"
            )
        takes_medium = self.serves_medium_of(target, info)
        return ProgramConfig(
            num_draft_tokens=num_draft_tokens,
            several=self.draft_counts if self.smaller_draft_counts else (),
            vocab_size=info.vocab_size,
            max_batch_size=self.max_batch_size,
            max_seq_len=max_seq_len,
            max_prefill_tokens=self.max_prefill_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks(max_seq_len),
            dtype=info.dtype,
            device=info.device,
            tree=tree,
            short_rope_limit=short_rope_limit(target.model),
            prefills_one=info.has_kept_masks,
            features=RequestFeatures(
                host_processors=self.host_processors,
                prompt_logprobs=self.prompt_logprobs,
                prompt_embeds=self.prompt_embeds or takes_medium,
                sees_ahead=takes_medium and has_own_masks(target.model),
            ),
        )

    def serves_medium_of(self, target: Target, info: TargetInfo) -> bool:
        """True where prompts may hold images or sound; ranks take none, nor models that need the
        token ids of images besides their rows.
        """
        return target.medium is not None and self.sharding is None and info.takes_rows

    def longest_request(self, limit: int | None) -> int:
        """The largest number of tokens of a request, for a model with a `limit`.  Raises:
        InvalidOption.
        """
        chosen = self.max_seq_len or min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
        if limit is not None and chosen > limit:
            raise InvalidOption(
                f"max_seq_len must be at most the model's limit of {limit} positions; got {chosen}"
            )
        return chosen

    def _num_draft_tokens(self, drafter: Drafter | None) -> int:
        """K: the largest given one, else the drafter's own, else the default."""
        given = self.draft_counts[-1] if self.draft_counts else None
        if self.draft_tree is not None:
            if given is not None or drafter is None:
                raise InvalidOption(
                    "draft_tree= needs a drafting method; give spec="
                    if drafter is None
                    else "draft_tree= says how many tokens are drafted; leave num_draft_tokens= out"
                )
            given = self.draft_tree.shape.depth
        if drafter is None:
            if given is not None:
                raise InvalidOption(
                    f"num_draft_tokens={given} needs a drafting method; give spec=, or leave it out"
                )
            return 0
        own = int(getattr(drafter, "num_draft_tokens", 0) or DEFAULT_DRAFT_TOKENS)
        _check_draft_tokens(given or own)
        return given or own

    def _num_blocks(self, max_seq_len: int) -> int:
        of_request = -(-max_seq_len // BLOCK_SIZE)
        if self.kv_cache_tokens is None:
            return self.max_batch_size * of_request
        num_blocks = -(-self.kv_cache_tokens // BLOCK_SIZE)
        if num_blocks < of_request:
            raise InvalidOption(
                f"kv_cache_tokens must hold one request of max_seq_len={max_seq_len} tokens; got "
                f"{self.kv_cache_tokens}: raise it or lower max_seq_len"
            )
        return num_blocks


def check_method_options(
    given: Iterable[str], method: Capabilities, keywords: Sequence[str]
) -> None:
    """Refuse names that neither the method nor the acceptance knows as options.

    Args:
        keywords: the keywords of `compile()`, for suggestions.
    Raises: InvalidOption.
    """
    if method.options is None:
        return
    known = (*method.options, *ACCEPTANCE_OPTIONS)
    for name in given:
        if name in known:
            continue
        what = f"compile() and spec={method.name!r} have no keyword {name!r}"
        if name in FIELDS:
            raise InvalidOption(f"{what}; give SamplingParams({name}=...) with the prompts")
        takes = (
            f"the method takes {', '.join(method.options)}" if method.options else "leave it out"
        )
        cure = did_you_mean(name, (*keywords, *known), "compile") or f"; {takes}"
        raise InvalidOption(what + cure)


def _check_draft_tokens(count: int) -> None:
    if count > MAX_DRAFT_TOKENS:
        raise InvalidOption(
            f"num_draft_tokens must be at most {MAX_DRAFT_TOKENS}, for each draft makes the "
            f"compiled step longer; got {count}"
        )


def _check_token_ids(acceptance: Acceptance, vocab_size: int) -> None:
    if acceptance.relaxed is not None:
        for name in ("begin_thinking_token_id", "end_thinking_token_id"):
            token = getattr(acceptance.relaxed, name)
            if token >= vocab_size:
                raise InvalidOption(
                    f"{name} must be an id of the target, 0 to {vocab_size - 1}; got {token}"
                )
