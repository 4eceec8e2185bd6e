"""Which tokens two tokenizers share: the ids of one for the ids of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import DraftMismatch

SPACE_SIGNS = ("\u0120", "\u2581")  # byte-level BPE's and SentencePiece's leading space


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabMap:
    """Ids of a draft model's vocabulary and of the target's, both ways."""

    d2t_abs: Tensor
    """int64 [Vd]: the target id of each draft id, absolute; -1 is never proposed."""

    t2d: Tensor
    """int64 [V]: the draft id of each target id, -1 where the draft model has none."""

    unknown_id: int
    """The draft id fed for those: its tokenizer's unknown token, else its end of text."""

    @property
    def num_shared(self) -> int:
        """Draft tokens that can be proposed."""
        return int((self.d2t_abs >= 0).sum())

    @property
    def num_known(self) -> int:
        """Target tokens that the draft model can be fed."""
        return int((self.t2d >= 0).sum())

    def describe(self) -> str:
        return (
            f"{self.num_shared} of its {len(self.d2t_abs)} tokens shared, which are "
            f"{self.num_known} of the target's {len(self.t2d)}"
        )


def share_tokens(target: Any, draft: Any, *, vocab_size: int, draft_vocab_size: int) -> VocabMap:
    """Pair the tokens that are the same string; a leading space is the same in any spelling.

    Args:
        target, draft: transformers tokenizers.
        vocab_size, draft_vocab_size: rows of the two models' heads, V and Vd; larger ids do not
            exist, and ids without a token are in no pair.
    Returns: a map on the CPU.  If several ids have one string, the lowest is used.
    Raises: DraftMismatch when no token is shared.
    Source: vLLM's heterogeneous vocabularies, transformers' AssistantToTargetTranslator.
    """
    target_ids = token_ids(target, vocab_size)
    draft_ids = token_ids(draft, draft_vocab_size)
    d2t_abs = torch.full((draft_vocab_size,), -1, dtype=torch.int64)
    t2d = torch.full((vocab_size,), -1, dtype=torch.int64)
    for token in draft_ids.keys() & target_ids.keys():
        d2t_abs[draft_ids[token]] = target_ids[token][0]
        t2d[target_ids[token]] = draft_ids[token][0]
    unknown = next(
        (i for i in (draft.unk_token_id, draft.eos_token_id) if _exists(i, draft_vocab_size)), 0
    )
    vocab_map = VocabMap(d2t_abs=d2t_abs, t2d=t2d, unknown_id=unknown)
    if vocab_map.num_shared == 0:
        raise DraftMismatch(
            f"the tokenizers of target ({len(target_ids)} tokens) and draft model "
            f"({len(draft_ids)} tokens) share no token; choose a draft model with a similar "
            "tokenizer"
        )
    return vocab_map


def same_vocabulary(target: Any, draft: Any) -> bool:
    """True where the two tokenizers give every token the same id."""
    return bool(target.get_vocab() == draft.get_vocab())


def token_ids(tokenizer: Any, vocab_size: int) -> dict[str, list[int]]:
    """The ids below `vocab_size` of every token string, ascending, leading spaces unified."""
    ids: dict[str, list[int]] = {}
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if _exists(index, vocab_size):
            ids.setdefault(with_space(token), []).append(index)
    return ids


def with_space(token: str) -> str:
    """The token's string with a plain leading space where its tokenizer has a sign for it."""
    return " " + token[1:] if token.startswith(SPACE_SIGNS) else token


def _exists(index: int | None, vocab_size: int) -> bool:
    return index is not None and 0 <= index < vocab_size
