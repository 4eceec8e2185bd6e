"""TensorRT-LLM's speculation modes: names, predicates, and the method that serves each.

The predicates are computed from one record of traits per mode; no code asks for a mode by name.
Source: requirements I2-I4.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

NATIVE_BACKEND = "TRTLLM"  # the attention backend whose kernels verify drafts themselves
FIRST_SM_WITHOUT_SPEC_DEC = 120  # from this architecture on, those kernels do not


class SpecMode(enum.IntEnum):
    """Modes in TensorRT-LLM's order.  Every name in `PREDICATES` is a method: `mode.is_ngram()`."""

    MTP = 1
    MTP_EAGLE = 2
    MTP_EAGLE_ONE_MODEL = 3
    EAGLE3 = 4
    EAGLE3_ONE_MODEL = 5
    NGRAM = 6
    DRAFT_TARGET = 7
    USER_PROVIDED = 8
    SAVE_HIDDEN_STATES = 9
    NONE = 10
    AUTO = 11

    @classmethod
    def from_string(cls, name: str | None) -> SpecMode:
        """The mode of this name, in any case; NONE for None.  Raises: KeyError."""
        return cls.NONE if name is None else cls[name.upper()]

    @property
    def traits(self) -> Traits:
        return TRAITS[self]

    @property
    def method(self) -> str | None:
        """The method, built or planned, that lists the mode as an alias; None if none does."""
        from compilespec.methods.registry import capability_rows

        for row in capability_rows():
            aliases = row["aliases"]
            assert isinstance(aliases, tuple)
            if self.name in aliases:
                return str(row["name"])
        return None

    def extend_ctx(self, backend: str, *, sm: int) -> bool:
        """True where decode requests with drafts run as chunks of a prompt.

        Args:
            backend: the attention backend; sm: the GPU's architecture, 90 for sm_90.
        """
        return not self.traits.one_engine and not _verifies_itself(backend, sm)

    def attention_need_spec_dec_mode(
        self,
        manager: DraftManager | None,
        is_draft_model: bool,
        backend: str,
        use_chain_drafter: bool,
        *,
        sm: int,
    ) -> bool:
        """True where the attention backend must run in its mode for drafts."""
        if self.traits.one_engine:
            return sm < FIRST_SM_WITHOUT_SPEC_DEC
        is_first_draft = manager is not None and manager.is_first_draft and use_chain_drafter
        return _is_native(backend) and (not is_draft_model or is_first_draft)

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if name.startswith("_") or name not in PREDICATES:  # the enum's own
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda: PREDICATES[name](self)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a mode, from which its predicates follow."""

    label: str
    """`is_<label>` is true of this mode only."""

    one_engine: bool = False
    """Target and drafter are one engine: drafting is part of the target's step."""

    draft_engine: bool = False
    """The drafter is a model with its own engine."""

    drafter: bool = False
    """An object outside the target's step proposes the drafts."""

    decoder: bool = False
    """Has its own sampler, which reads several tokens a step."""

    rewinds_kv: bool = False
    """Rewinds the cache entries of rejected drafts."""

    recomputes_kv: bool = False
    """The draft engine computes the accepted tokens' entries again."""

    loads_draft_weights: bool = False
    """The drafter's weights are loaded apart from the target's."""

    is_mtp_one_model: bool = False
    """The drafter is MTP modules inside the target's engine."""

    is_plain: bool = False
    """No speculation."""


TRAITS: Mapping[SpecMode, Traits] = {
    SpecMode.MTP: Traits(
        label="mtp_vanilla",
        one_engine=True,
        decoder=True,
        rewinds_kv=True,
        is_mtp_one_model=True,
    ),
    SpecMode.MTP_EAGLE: Traits(
        label="mtp_eagle", draft_engine=True, drafter=True, decoder=True, recomputes_kv=True
    ),
    SpecMode.MTP_EAGLE_ONE_MODEL: Traits(
        label="mtp_eagle_one_model",
        one_engine=True,
        decoder=True,
        rewinds_kv=True,
        is_mtp_one_model=True,
    ),
    SpecMode.EAGLE3: Traits(
        label="eagle3", draft_engine=True, drafter=True, decoder=True, recomputes_kv=True
    ),
    SpecMode.EAGLE3_ONE_MODEL: Traits(
        label="eagle3_one_model",
        one_engine=True,
        decoder=True,
        rewinds_kv=True,
        loads_draft_weights=True,
    ),
    SpecMode.NGRAM: Traits(label="ngram", drafter=True, rewinds_kv=True),
    SpecMode.DRAFT_TARGET: Traits(label="draft_target", draft_engine=True, drafter=True),
    SpecMode.USER_PROVIDED: Traits(label="user_provided", drafter=True),
    SpecMode.SAVE_HIDDEN_STATES: Traits(label="save_hidden_states", drafter=True),
    SpecMode.NONE: Traits(label="none", is_plain=True),
    SpecMode.AUTO: Traits(label="auto"),
}


def _is(label: str) -> Callable[[SpecMode], bool]:
    return lambda mode: mode.traits.label == label


def _one_engine(mode: SpecMode) -> bool:
    return mode.traits.one_engine


PREDICATES: Mapping[str, Callable[[SpecMode], bool]] = {
    "is_mtp_one_model": lambda mode: mode.traits.is_mtp_one_model,
    **{
        f"is_{traits.label}": _is(traits.label)
        for mode, traits in TRAITS.items()
        if traits.label != "auto"  # TensorRT-LLM has no such predicate
    },
    "use_one_engine": _one_engine,
    "without_logits": _one_engine,
    "support_capturable_guided_decoder": _one_engine,
    "needs_kv_cache_rewind": lambda mode: mode.traits.rewinds_kv,
    "has_draft_model": lambda mode: mode.traits.draft_engine,
    "support_overlap_scheduler": lambda mode: mode.traits.one_engine or mode.traits.draft_engine,
    "needs_kv_cache_recompute": lambda mode: mode.traits.recomputes_kv,
    "need_load_draft_weights": lambda mode: mode.traits.loads_draft_weights,
    "has_spec_decoder": lambda mode: mode.traits.decoder,
    "has_spec_drafter": lambda mode: mode.traits.drafter,
    "support_guided_decoder": lambda mode: mode.traits.is_plain or mode.traits.drafter,
}


class DraftManager(Protocol):
    """What `attention_need_spec_dec_mode` reads of a draft engine's resource manager."""

    is_first_draft: bool


def truth_table() -> dict[str, tuple[SpecMode, ...]]:
    """Each predicate and the modes for which it is true."""
    return {
        name: tuple(mode for mode in SpecMode if holds(mode)) for name, holds in PREDICATES.items()
    }


def _is_native(backend: str) -> bool:
    return backend.upper() == NATIVE_BACKEND


def _verifies_itself(backend: str, sm: int) -> bool:
    return _is_native(backend) and sm < FIRST_SM_WITHOUT_SPEC_DEC
