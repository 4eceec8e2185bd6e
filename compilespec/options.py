"""The keywords of `compile()`, checked and turned into the sizes of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.errors import InvalidOption, NotSupported
from compilespec.loading import Target
from compilespec.lowering import BACKENDS
from compilespec.methods.base import Drafter, TargetInfo
from compilespec.program import ProgramConfig

CUDAGRAPH_MODES = ("auto", "full_and_piecewise", "full", "full_decode_only", "piecewise", "none")
DEFAULT_DRAFT_TOKENS = 3
DEFAULT_MAX_SEQ_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Validated keywords; what depends on the model is filled in by `program_config`."""

    backend: str
    buckets: tuple[int, ...] | None
    max_batch_size: int
    max_seq_len: int | None
    max_prefill_tokens: int
    kv_cache_tokens: int | None
    num_draft_tokens: int | None
    disabled_passes: frozenset[str] = frozenset()

    def program_config(
        self, target: Target, info: TargetInfo, drafter: Drafter | None
    ) -> ProgramConfig:
        """All sizes, fixed.  Raises: InvalidOption where the model cannot serve them."""
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
        )


def resolve_options(
    *,
    cudagraphs: str = "auto",
    acceptance: str | Callable[..., Any] = "auto",
    logits_processor: Any = None,
    quantize: Any = None,
    draft_quantize: Any = None,
    backend: str = "inductor",
    buckets: Sequence[int] | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_prefill_tokens: int = 2048,
    kv_cache_tokens: int | None = None,
    num_draft_tokens: int | None = None,
) -> CompileOptions:
    """Check every keyword before anything is loaded.  Raises: InvalidOption, NotSupported."""
    if backend not in BACKENDS:
        raise InvalidOption(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if cudagraphs not in CUDAGRAPH_MODES:
        raise InvalidOption(
            f"cudagraphs must be one of {', '.join(CUDAGRAPH_MODES)}; got {cudagraphs!r}"
        )
    if cudagraphs not in ("auto", "none"):
        raise NotSupported(f"cudagraphs={cudagraphs!r} is not built yet; leave it at 'auto'")
    if acceptance != "auto":
        raise NotSupported(
            f"acceptance={acceptance!r} is not built yet; leave it at 'auto' (strict, for greedy "
            f"requests)"
        )
    for name, value in (
        ("logits_processor", logits_processor),
        ("quantize", quantize),
        ("draft_quantize", draft_quantize),
    ):
        if value is not None:
            raise NotSupported(f"{name}= is not built yet; leave it out")
    sizes = {
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_prefill_tokens": max_prefill_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "num_draft_tokens": num_draft_tokens,
    }
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InvalidOption(f"{name} must be a positive integer; got {size!r}")
    chosen = tuple(sorted(set(buckets))) if buckets is not None else None
    if chosen is not None and (not chosen or chosen[0] < 1 or chosen[-1] != max_batch_size):
        raise InvalidOption(
            f"buckets must be positive and end at max_batch_size={max_batch_size}; got "
            f"{list(buckets or ())}"
        )
    return CompileOptions(
        backend=backend,
        buckets=chosen,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_prefill_tokens=max_prefill_tokens,
        kv_cache_tokens=kv_cache_tokens,
        num_draft_tokens=num_draft_tokens,
    )
