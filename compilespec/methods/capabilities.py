"""What a drafting method needs of the engine: the record that passes and the runtime branch on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a method's draft loop walks the cache (ARCHITECTURE.md, kinds of draft loops); "direct" is one
# call that gives all K drafts and has no cache: n-gram match, functions of a user; with "heads"
# each draft is its own call, all on one hidden state; with "callback" the host proposes them
# between the calls; with "shared_kv" each is one query at a constant position on the target's
# caches; with "parallel", "masked" and "block" one pass gives all K drafts; with "in_place" the
# drafter continues the target's own caches.
DraftKind = Literal[
    "none",
    "recycled",
    "parallel",
    "block",
    "windowed",
    "unshifted",
    "masked",
    "direct",
    "heads",
    "callback",
    "shared_kv",
    "in_place",
]

# Which hidden states the modules of a windowed drafter read (`draft_loops/windowed.py`).
Chain = Literal["module_rows", "target_rows"]

FINAL_NORM = -1  # an aux layer: the hidden state that enters the target's head, after the last norm


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The needs of a method.  Passes and the runtime branch on these fields only."""

    name: str
    kind: DraftKind
    brings: str = ""  # what it does for whom, in words
    needs_draft_weights: bool = False
    takes_recipe: bool = False  # `draft=` says how the drafter is made of the target
    prefers_auto: bool = False  # `num_draft_tokens` is "auto" unless it is given
    reads_hidden_states: bool = False  # the target's, tapped at the drafter's aux layers
    outputs_hidden_states: bool = False  # the step outputs them, for the drafter's `recorder`
    looks_up: bool = False  # drafts, some at least, are found in texts: steps of K = 0 look, too
    remembers_texts: bool = False  # texts beside the request's own are looked up, predictions too
    own_kv_cache: bool = False  # the drafter writes its own KV cache
    lossless: bool = True
    chooses: bool = False  # a placeholder for a method that is picked before anything is built
    drafts_with_model: bool = False  # its drafter is a causal language model, as targets are
    inside_target: bool = False  # the target's own checkpoint may hold the drafter
    folders: tuple[str, ...] = ()  # beside the target, after the one named as the method
    aliases: tuple[str, ...] = ()  # TensorRT-LLM's mode names for this method
    options: tuple[str, ...] | None = None  # names that `load` takes; None: it checks them itself

    @property
    def needs(self) -> str:
        """The thing that must be there beside the target, in words."""
        if not self.needs_draft_weights:
            return "nothing"
        if self.drafts_with_model:
            return "a smaller model"
        if self.kind in ("direct", "callback"):
            return "your function"
        return "a trained drafter" + (" (or the model's own)" if self.inside_target else "")

    @property
    def may_omit_drafts(self) -> bool:
        """True where fewer than K drafts are legal, with PAD in place of the missing ones."""
        return self.kind in ("direct", "callback") or self.looks_up

    @property
    def combines(self) -> bool:
        """True where a look-up's drafts take the place of a model's where they are surer."""
        return self.looks_up and self.kind != "direct"

    @property
    def only_looks_up(self) -> bool:
        """True where all drafts are found in texts: they cost no pass of a model."""
        return self.looks_up and self.kind == "direct"

    @property
    def drafter(self) -> str:
        """The method whose drafter is looked for: of "a+b" the second."""
        return self.name.rpartition("+")[2]

    @property
    def drafts_in_step(self) -> bool:
        """True where the step itself makes the drafts."""
        return self.kind not in ("none", "callback")
