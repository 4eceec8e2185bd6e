"""The keywords of `compile()`, checked and turned into the sizes of a program."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from compilespec.cudagraphs.buckets import Buckets, read_buckets
from compilespec.cudagraphs.modes import GraphOptions, read_graph_options
from compilespec.errors import InvalidOption, NotSupported, is_integer
from compilespec.errors.suggest import did_you_mean
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.ops.collectives.group import this_rank
from compilespec.ops.device import traits_of
from compilespec.passes.splice.acceptance.options import ACCEPTANCE_OPTIONS, resolve_acceptance
from compilespec.passes.splice.acceptance.registry import is_lossless
from compilespec.passes.splice.acceptance.rule import Acceptance
from compilespec.passes.splice.logits_processor import LogitsProcessor
from compilespec.passes.splice.sharding.plan import Sharding
from compilespec.pipeline.fields import CompileFields
from compilespec.pipeline.keywords import positive
from compilespec.program import ProgramConfig, RequestFeatures
from compilespec.quantization import Quantize, read_quantize
from compilespec.quantization.configs import FILE
from compilespec.runtime.keywords import FIELDS
from compilespec.tracing.images import has_own_masks, sees_ahead_in_windows
from compilespec.tracing.load import Target
from compilespec.tracing.long_rope import short_rope_limit
from compilespec.tracing.target_info import TargetInfo

DEFAULT_DRAFT_TOKENS = 3
AUTO = "auto"  # several K, if the method can have them
MAX_DRAFT_TOKENS = 64  # each is a row of the step and usually a pass of the drafter
DEFAULT_MAX_SEQ_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class CompileOptions(CompileFields):
    """The keywords of `compile()`, checked; their meanings are properties.

    Making one checks all that needs no model, so that errors come before anything is loaded.
    Raises: InvalidOption, NotSupported.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_counts is not None and self.draft_vocab_size is None:
            raise InvalidOption(
                "draft_vocab_counts= needs draft_vocab_size=, the rows that a drafter's head keeps"
            )
        if self.draft_tensor_parallel_size not in (1, self.tensor_parallel_size):
            raise InvalidOption(
                "draft_tensor_parallel_size must be 1 or tensor_parallel_size="
                f"{self.tensor_parallel_size}; got {self.draft_tensor_parallel_size}"
            )
        self._check_tiers()
        for name in ("max_adapters", "max_adapter_rank"):
            if getattr(self, name) is not None and not isinstance(self.adapters, Mapping):
                raise InvalidOption(
                    f"{name}= needs adapters={{name: directory}}, among which requests choose"
                )
        for name, attribute in vars(CompileOptions).items():
            if isinstance(attribute, functools.cached_property):
                getattr(self, name)  # reading the property checks it

    @property
    def has_prefix_tiers(self) -> bool:
        """True where blocks are to be found beyond the KV cache."""
        return self.prefix_host_mib is not None or self.prefix_dir is not None

    def _check_tiers(self) -> None:
        if not self.has_prefix_tiers:
            return
        if not self.enable_prefix_caching:
            raise InvalidOption(
                "prefix_host_mib= and prefix_dir= keep what prefix caching finds: leave out "
                "enable_prefix_caching=False"
            )
        if self.tensor_parallel_size > 1:
            raise NotSupported(
                "prefix_host_mib= and prefix_dir= do not go with tensor_parallel_size= yet, whose "
                "ranks have a part of each block: leave them out"
            )

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
        """Wrap what `logits_processor` gives, and check the names of its parameters; None if
        nothing was given.  Raises: InvalidOption.
        """
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

    def keeps_blocks(self, device: torch.device, dtype: torch.dtype | None) -> bool:
        """True where products and embeddings of a GGUF file keep its blocks.

        Raises: InvalidOption, NotSupported where `quantize` asks for it, and it cannot be.
        """
        asked = self.quantization is not None and self.quantization.config == FILE
        merges = self.adapters is not None and not isinstance(self.adapters, Mapping)
        floats = (None, torch.float32, torch.bfloat16, torch.float16)
        whys = {
            "dequantize=True": self.dequantize,
            f"device={str(device)!r}": not traits_of(device).packs_weights,
            f"dtype={dtype}": dtype not in floats,
            "tensor_parallel_size=": self.tensor_parallel_size > 1,
            "an adapter that is merged": merges,
        }
        why = next((why for why, holds in whys.items() if holds), None)
        if asked and why is not None:
            raise NotSupported(
                f"quantize={FILE!r} keeps the blocks of a GGUF file, which does not go with {why}; "
                "leave quantize= out for the dequantized weights"
            )
        return why is None

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
                ahead_in_windows=takes_medium and sees_ahead_in_windows(target.model),
                forced_drafts=self._judges_any_drafts,
            ),
        )

    @property
    def _judges_any_drafts(self) -> bool:
        """True where it does not matter for the tokens who made a draft, and drafts are a chain."""
        rule = self.acceptance_rule
        return self.draft_tree is None and is_lossless(rule) and not rule.reads_draft_probs

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
        own = own_draft_tokens(drafter)
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


def own_draft_tokens(drafter: Drafter | None) -> int:
    """K of a drafter that says it, as checkpoints do, else the default."""
    return int(getattr(drafter, "num_draft_tokens", 0) or DEFAULT_DRAFT_TOKENS)


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
