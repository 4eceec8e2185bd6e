"""The draft-to-target vocabulary map, d2t, and the head of a drafter that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from compilespec.errors import CheckpointError
from compilespec.methods.decoder_body import positive
from compilespec.methods.parts.weights import Weight


class HeadConfig(Protocol):
    """Sizes of a head over a draft vocabulary."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def has_d2t(self) -> bool: ...


class DraftHead(nn.Module):
    """The head of a drafter: `lm_head`, and `d2t` where it knows a part of the target's vocabulary.

    Then a draft id is a row of the head, and its target id is draft id + d2t[draft id].
    """

    lm_head: Weight
    d2t: Tensor | None

    def add_head(self, config: HeadConfig) -> None:
        """Make the parameters; call it in `__init__`."""
        self.lm_head = Weight(config.draft_vocab_size, config.hidden_size)
        zeros = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.has_d2t else None
        self.register_buffer("d2t", zeros)

    def logits(self, head_input: Tensor) -> Tensor:
        """Draft logits [..., Vd] over the DRAFT vocabulary, in the drafter's dtype."""
        return functional.linear(head_input, self.lm_head.weight)

    @property
    def draft_ids(self) -> Tensor | None:
        """The target id of each draft id, int64; None where they are the same."""
        return None if self.d2t is None else target_ids(self.d2t)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        draft_ids = self.logits(head_input).argmax(dim=-1)
        ids = draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
        return ids.to(torch.int32)


def target_ids(d2t: Tensor) -> Tensor:
    """The target id of each draft id, int64."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def random_d2t(num_ids: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """The map of a random ascending choice of target ids."""
    kept = torch.randperm(vocab_size, generator=generator)[:num_ids].sort().values
    return kept - torch.arange(num_ids)


def vocabulary_fields(
    draft_size: Any, vocab_size: int, shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    """Rows of the head: as in config.json, else those of its tensor, else the target's."""
    own_head = "lm_head.weight" in shapes
    rows = shapes["lm_head.weight"][0] if own_head else vocab_size
    size = positive(draft_size or rows, "draft_vocab_size")
    return {
        "draft_vocab_size": size,
        "own_lm_head": own_head or size != vocab_size,
        "has_d2t": "d2t" in shapes or size != vocab_size,
    }


def check_d2t(d2t: Tensor, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> None:
    """Check that d2t holds offsets (target id = draft id + d2t), agreeing with the mask t2d.

    A map of ABSOLUTE ids (as FR-Spec's) is recognised by the mask; without one, by ids beyond the
    vocabulary, or because it rises at every step, which offsets do only if no two neighbouring
    tokens are kept.

    Raises:
        CheckpointError: the map is absolute, not ascending, out of range or contradicts t2d.
    """
    if d2t.shape != (draft_vocab_size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(
            f"d2t: expected {draft_vocab_size} integers, got {d2t.dtype} {list(d2t.shape)} "
            "(draft_vocab_size in config)"
        )
    offsets = d2t.to(torch.int64).cpu()
    ids = target_ids(offsets)
    steps = offsets.diff()
    rising = bool((steps > 0).all()) and draft_vocab_size > 1
    advice = "expected offsets, target id = draft id + d2t[draft id]"
    if t2d is not None:
        if t2d.shape != (vocab_size,):
            raise CheckpointError(f"t2d: expected a mask of {vocab_size}, got {list(t2d.shape)}")
        kept = t2d.cpu().to(torch.bool).nonzero().flatten()
        if torch.equal(kept, ids):
            return
        if torch.equal(kept, offsets):
            raise CheckpointError(f"d2t holds absolute target ids; {advice}")
        raise CheckpointError(
            f"d2t and t2d contradict each other: t2d keeps {len(kept)} other tokens; {advice}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or rising:
        guess = (
            "d2t looks like absolute target ids"
            if rising
            else "d2t points outside the target vocabulary"
        )
        raise CheckpointError(f"{guess}, and there is no t2d to check it with; {advice}")
    if bool((steps < 0).any()):
        raise CheckpointError(f"d2t decreases, so two draft ids may mean one target id; {advice}")
