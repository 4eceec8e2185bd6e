"""An independent causal language model of any family, size and vocabulary drafts for the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.draft_model.drafter import ModelDrafter
from compilespec.methods.draft_model.pard import pard_token
from compilespec.methods.draft_model.vocab_map import VocabMap, same_vocabulary, share_tokens
from compilespec.ops.device import traits_of
from compilespec.tracing.load import load_target
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "ModelDrafter", "VocabMap", "share_tokens"]

VOCAB_MAPS = ("auto", "same", "shared_tokens")


class DraftModelMethod:
    """A separate model with its own KV cache."""

    capabilities = Capabilities(
        name="draft_model",
        brings="any much smaller model as it is",
        kind="unshifted",
        needs_draft_weights=True,
        drafts_with_model=True,
        own_kv_cache=True,
        aliases=("DRAFT_TARGET",),
        options=("vocab_map", "draft_tokenizer", "parallel"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> ModelDrafter:
        """Load a directory in the target's dtype, or adopt a module as it is.

        Options: `vocab_map`, how ids of the two vocabularies correspond: "same" (an id is itself),
        "shared_tokens" (by the tokens' strings; other tokens are never proposed, and are fed as the
        draft's unknown token), or "auto": the latter if both tokenizers are known and differ.
        `draft_tokenizer`: tokenizer of a draft model given as a module.  `parallel`: true: all
        drafts of one pass, whose later rows hold the mask token of its config; None: if it has one.

        Raises: ModelNotFound, CheckpointError, InvalidOption (an option's value, or `draft` is not
        a module), DraftMismatch (a tokenizer is missing).
        """
        if isinstance(draft, nn.Module):
            loaded = load_target(draft)
        elif isinstance(draft, str | Path):
            keeps = traits_of(target.device).packs_weights and target.dtype.itemsize < 8
            loaded = load_target(
                draft, dtype=target.dtype, device=target.device, keeps_blocks=keeps
            )
        else:
            raise InvalidOption(
                f"spec='draft_model' needs draft= a directory or a module; got "
                f"{type(draft).__name__}"
            )
        tokenizer = options.get("draft_tokenizer", loaded.tokenizer)
        known = _vocabularies(options.get("vocab_map", "auto"), target.tokenizer, tokenizer)
        mask = pard_token(loaded.model, options.get("parallel"))
        drafter = ModelDrafter(loaded.model, loaded.max_seq_len, mask_token_id=mask, **known)
        if mask is not None:
            drafter.capabilities = dataclasses.replace(self.capabilities, kind="masked")
        return drafter


def _vocabularies(vocab_map: str, target: Any, draft: Any) -> dict[str, Any]:
    """`tokenizers` if ids must be translated, `num_ids` if the vocabularies are known to agree."""
    if vocab_map not in VOCAB_MAPS:
        raise not_one_of("vocab_map", vocab_map, VOCAB_MAPS)
    lacking = [
        f"the {who} has none: give {keyword}="
        for who, keyword, tokenizer in (
            ("target", "tokenizer", target),
            ("draft model", "draft_tokenizer", draft),
        )
        if tokenizer is None
    ]
    if vocab_map == "shared_tokens" and lacking:
        raise DraftMismatch(f"vocab_map='shared_tokens' needs both tokenizers; {lacking[0]}")
    if lacking:
        return {}
    if vocab_map == "shared_tokens" or (vocab_map == "auto" and not same_vocabulary(target, draft)):
        return {"tokenizers": (target, draft)}
    return {"num_ids": max(target.get_vocab().values()) + 1}


METHOD = DraftModelMethod()
