"""The keywords of `compile()`, checked and turned into the sizes of a program."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.cudagraphs.buckets import Buckets, read_buckets
from compilespec.cudagraphs.modes import NO_OPTIONS, GraphOptions, read_graph_options
from compilespec.errors import InvalidOption, is_integer
from compilespec.errors.suggest import did_you_mean, not_one_of
from compilespec.lowering import BACKENDS
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.passes.acceptance.options import ACCEPTANCE_OPTIONS, resolve_acceptance
from compilespec.passes.acceptance.rule import STRICT, Acceptance
from compilespec.passes.logits_processor import LogitsProcessor
from compilespec.program import ProgramConfig
from compilespec.quantization import Quantize, read_quantize
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.tracing.load import Target
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)

DEFAULT_DRAFT_TOKENS = 3
MAX_DRAFT_TOKENS = 64  # each is a row of the step and, mostly, an unrolled pass of the drafter
DEFAULT_MAX_SEQ_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Validated keywords; what depends on the model is filled in by `program_config`."""

    backend: str
    buckets: Buckets | None
    max_batch_size: int
    max_seq_len: int | None
    max_prefill_tokens: int
    kv_cache_tokens: int | None
    num_draft_tokens: int | None
    smaller_draft_counts: tuple[int, ...] = ()  # further K, one of which a step may choose
    enable_prefix_caching: bool = True
    overlap: bool | None = None  # None: where it gains, on CUDA
    greedy_step: bool | None = None  # None: on CUDA, where heads are fused with their argmax
    max_step_tokens: int | None = None
    graphs: GraphOptions = NO_OPTIONS
    acceptance: Acceptance = STRICT
    quantize: Quantize | None = None
    draft_quantize: Quantize | None = None
    logits_processor: LogitsProcessor | None = None
    host_processors: bool = False
    prompt_logprobs: bool = False
    disabled_passes: frozenset[str] = frozenset()

    def program_config(
        self, target: Target, info: TargetInfo, drafter: Drafter | None
    ) -> ProgramConfig:
        """All sizes, fixed.  Raises: InvalidOption where the model cannot serve them."""
        _check_token_ids(self.acceptance, info.vocab_size)
        limit = target.max_seq_len
        max_seq_len = self.max_seq_len or min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
        if limit is not None and max_seq_len > limit:
            raise InvalidOption(
                f"max_seq_len must be at most the model's limit of {limit} positions; got "
                f"{max_seq_len}"
            )
        if drafter is None:
            num_draft_tokens = 0
            if self.num_draft_tokens:
                raise InvalidOption(
                    f"num_draft_tokens={self.num_draft_tokens} needs a drafting method; give "
                    f"spec=, or leave it out"
                )
        else:
            num_draft_tokens = self.num_draft_tokens or int(
                getattr(drafter, "num_draft_tokens", 0) or DEFAULT_DRAFT_TOKENS
            )
        _check_draft_tokens(num_draft_tokens)
        if num_draft_tokens >= max_seq_len:
            raise InvalidOption(
                f"num_draft_tokens must be below max_seq_len={max_seq_len}, or no step could use "
                f"all of them; got {num_draft_tokens}"
            )
        tokens = self.kv_cache_tokens or self.max_batch_size * max_seq_len
        num_blocks = -(-tokens // BLOCK_SIZE)
        if self.kv_cache_tokens is None:
            num_blocks = self.max_batch_size * -(-max_seq_len // BLOCK_SIZE)
        if num_blocks < -(-max_seq_len // BLOCK_SIZE):
            raise InvalidOption(
                f"kv_cache_tokens must hold one request of max_seq_len={max_seq_len} tokens; got "
                f"{tokens}: raise it or lower max_seq_len"
            )
        return ProgramConfig(
            num_draft_tokens=num_draft_tokens,
            max_batch_size=self.max_batch_size,
            max_seq_len=max_seq_len,
            max_prefill_tokens=self.max_prefill_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            dtype=info.dtype,
            device=info.device,
            max_draft_tokens=num_draft_tokens if self.smaller_draft_counts else None,
        )


def resolve_options(
    *,
    cudagraphs: str | GraphOptions = "auto",
    acceptance: str | Callable[..., Any] = "auto",
    logits_processor: Any = None,
    host_processors: bool = False,
    prompt_logprobs: bool = False,
    quantize: Any = None,
    draft_quantize: Any = None,
    backend: str = "inductor",
    buckets: Sequence[int] | Mapping[str, Sequence[Any]] | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_prefill_tokens: int = 2048,
    kv_cache_tokens: int | None = None,
    num_draft_tokens: int | Sequence[int] | None = None,
    enable_prefix_caching: bool = True,
    overlap: bool | str = "auto",
    greedy_step: bool | str = "auto",
    max_step_tokens: int | None = None,
    relaxed_topk: int | None = None,
    relaxed_delta: float | None = None,
    begin_thinking_token_id: int | None = None,
    end_thinking_token_id: int | None = None,
    force_num_accepted: int | None = None,
) -> CompileOptions:
    """Check every keyword before anything is loaded.  Raises: InvalidOption, NotSupported."""
    if backend not in BACKENDS:
        raise not_one_of("backend", backend, BACKENDS)
    graphs = read_graph_options(cudagraphs)
    for name, switch in (
        ("host_processors", host_processors),
        ("prompt_logprobs", prompt_logprobs),
    ):
        if not isinstance(switch, bool):
            raise InvalidOption(f"{name} must be True or False; got {switch!r}")
    if logits_processor is not None and not callable(logits_processor):
        raise InvalidOption(
            f"logits_processor must be a function or a module; got {logits_processor!r}"
        )
    num_draft_tokens, smaller = _draft_counts(num_draft_tokens)
    sizes = {
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_prefill_tokens": max_prefill_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "num_draft_tokens": num_draft_tokens,
        "max_step_tokens": max_step_tokens,
    }
    for name, size in sizes.items():
        if size is not None and (not is_integer(size) or size < 1):
            raise InvalidOption(f"{name} must be a positive integer; got {size!r}")
    _check_draft_tokens(num_draft_tokens or 0)
    if not isinstance(enable_prefix_caching, bool):
        raise InvalidOption(
            f"enable_prefix_caching must be True or False; got {enable_prefix_caching!r}"
        )
    for name, choice in (("overlap", overlap), ("greedy_step", greedy_step)):
        if choice != "auto" and not isinstance(choice, bool):
            raise InvalidOption(f"{name} must be 'auto', True or False; got {choice!r}")
    return CompileOptions(
        backend=backend,
        buckets=read_buckets(
            buckets, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens
        ),
        graphs=graphs,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_prefill_tokens=max_prefill_tokens,
        kv_cache_tokens=kv_cache_tokens,
        num_draft_tokens=num_draft_tokens,
        smaller_draft_counts=smaller,
        enable_prefix_caching=enable_prefix_caching,
        overlap=overlap if isinstance(overlap, bool) else None,
        greedy_step=greedy_step if isinstance(greedy_step, bool) else None,
        max_step_tokens=max_step_tokens,
        quantize=read_quantize(quantize),
        draft_quantize=read_quantize(draft_quantize, "draft_quantize"),
        logits_processor=None if logits_processor is None else LogitsProcessor(logits_processor),
        host_processors=host_processors,
        prompt_logprobs=prompt_logprobs,
        acceptance=resolve_acceptance(
            acceptance,
            force_num_accepted,
            relaxed_topk=relaxed_topk,
            relaxed_delta=relaxed_delta,
            begin_thinking_token_id=begin_thinking_token_id,
            end_thinking_token_id=end_thinking_token_id,
        ),
    )


def check_method_options(
    given: Iterable[str], method: Capabilities, keywords: Sequence[str]
) -> None:
    """Refuse names that neither the method nor the acceptance knows as options.

    Args:
        keywords: those of `compile()`, one of which may have been meant.
    Raises: InvalidOption.
    """
    if method.options is None:
        return
    known = (*method.options, *ACCEPTANCE_OPTIONS)
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in given:
        if name in known:
            continue
        what = f"compile() and spec={method.name!r} have no keyword {name!r}"
        if name in fields:
            raise InvalidOption(f"{what}; give SamplingParams({name}=...) with the prompts")
        takes = (
            f"the method takes {', '.join(method.options)}" if method.options else "leave it out"
        )
        cure = did_you_mean(name, (*keywords, *known), "compile") or f"; {takes}"
        raise InvalidOption(what + cure)


def _draft_counts(given: int | Sequence[int] | None) -> tuple[int | None, tuple[int, ...]]:
    """The largest K, and the other ones of a sequence, in rising order."""
    if given is None or isinstance(given, str) or not isinstance(given, Sequence):
        return given, ()  # the check of all sizes refuses what is no integer
    counts = sorted(set(given)) if all(is_integer(count) for count in given) else []
    if not counts or counts[0] < 0 or counts[-1] < 1:
        raise InvalidOption(
            f"num_draft_tokens must be a positive integer, or several of 0 and more of which each "
            f"step takes the best, such as (0, 2, 5); got {given!r}"
        )
    return counts[-1], tuple(counts[:-1])


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
