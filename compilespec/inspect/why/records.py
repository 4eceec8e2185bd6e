"""An explanation of lost drafts: its causes, in words, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CauseName = Literal[
    "tap_layers",
    "norm",
    "draft_ids",
    "other_model",
    "prompt_form",
    "stale_cache",
    "precision",
    "draft_vocabulary",
    "guide",
    "sampling",
    "long_context",
    "near_tie",
    "later_places",
    "drafter",
]

# Of each cause: whether something is set up wrongly, the cause in words, what to do.
KNOWN: Mapping[CauseName, tuple[bool, str, str]] = {
    "tap_layers": (
        True,
        "the drafter reads other layers of the target than those it was trained on",
        "give aux_layers= the indices below, or aux_ids_are= the other meaning",
    ),
    "norm": (
        True,
        "the drafter's norms are not those it was trained with",
        "mend the flag of config.json or the tensor that is named below",
    ),
    "draft_ids": (
        True,
        "the rows of the drafter's head are not the tokens that d2t says",
        "take d2t from the checkpoint that the head came with",
    ),
    "other_model": (
        True,
        "the drafter was trained for another model than this target, such as another fine-tune",
        "take a drafter of this very target (`compilespec drafters MODEL`), or go on training "
        "this one on the target's answers (`compilespec train --start-from`)",
    ),
    "prompt_form": (
        True,
        "the prompts have another form than conversations that end where the answer begins",
        "ask through the chat template: engine.chat(messages), or `--chat`",
    ),
    "stale_cache": (
        True,
        "the engine's drafts are not those that the drafter makes of the whole text: its cache "
        "has holes, or entries of other weights",
        "report it with this explanation; engine.reset_prefix_cache() after weights were changed",
    ),
    "precision": (
        True,
        "the quantized weights draft worse than those of the checkpoints",
        "leave draft_quantize= (or quantize=) out, or choose a wider form",
    ),
    "draft_vocabulary": (
        False,
        "the target's token is not among those that the drafter can propose",
        "train a head with more draft ids, or choose them by your own texts "
        "(engine.save_token_counts)",
    ),
    "guide": (
        False,
        "the guide forbade what the target itself would have said",
        "describe the form in the prompt, too, so that the target itself follows it",
    ),
    "sampling": (
        False,
        "a token was drawn that is not the target's likeliest",
        "lower temperature=, or top_p=; fewer drafts cost less (num_draft_tokens=)",
    ),
    "long_context": (
        False,
        "the text is longer than those that the drafter was trained on",
        "train it on longer texts, or let the engine draft less there (num_draft_tokens='auto')",
    ),
    "near_tie": (
        False,
        "the target itself wavers: it gives the draft at least half the probability of its token",
        "nothing is wrong here; no drafter foresees these often",
    ),
    "later_places": (
        False,
        "the drafter is right after the true tokens, and wrong after its own drafts",
        "train with more steps of its own drafts (depth), or take a smaller num_draft_tokens=",
    ),
    "drafter": (
        False,
        "the drafter does not foresee these tokens",
        "train it longer, on the target's answers to prompts such as these, or take a larger one",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause, with the drafts that it lost."""

    name: CauseName
    num_lost: int
    """Lost drafts; each is counted at one cause."""
    num_first: int = 0
    """Of these, those lost by a wrong first draft of a step."""
    evidence: str = ""
    """What was seen or tried, with its figures."""

    @property
    def is_fault(self) -> bool:
        """True where something is set up wrongly."""
        return KNOWN[self.name][0]

    @property
    def title(self) -> str:
        """The cause in words."""
        return KNOWN[self.name][1]

    @property
    def cure(self) -> str:
        """The cure."""
        return KNOWN[self.name][2]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons why drafts were lost: faults first, each kind by the drafts that it lost."""

    method: str
    num_draft_tokens: int
    num_texts: int
    num_steps: int
    """Verify steps, without the last one of each text, which the end may have cut."""
    acceptance_length: float
    acceptance_rate_by_place: tuple[float, ...]
    """The share of steps that accepted draft 1, 2, ..."""
    num_lost: int
    causes: tuple[Cause, ...]
    tried: tuple[str, ...] = ()
    """What was tried and made nothing better, or could not be tried."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [
            dataclasses.asdict(one)
            | {"is_fault": one.is_fault, "title": one.title, "cure": one.cure}
            | {"share": one.num_lost / max(1, self.num_lost)}
            for one in self.causes
        ]
        return dataclasses.asdict(self) | {"causes": rows}

    def __str__(self) -> str:
        rates = ", ".join(
            f"{place}: {rate:.0%}" for place, rate in enumerate(self.acceptance_rate_by_place, 1)
        )
        lines = [
            f"{self.method}, K={self.num_draft_tokens}: acceptance length "
            f"{self.acceptance_length:.2f} in {self.num_steps} steps of {self.num_texts} texts; "
            f"accepted by place {rates}",
            f"{self.num_lost} drafts lost, each by the cause of the step's first wrong one:",
        ]
        for one in self.causes:
            mark = "FAULT " if one.is_fault else ""
            share = one.num_lost / max(1, self.num_lost)
            lines.append(f"{one.num_lost:6} {share:4.0%}  {mark}{one.name}: {one.title}")
            first = f"{one.num_first} by a step's first draft"
            lines.append(f"{'':13}{'; '.join(part for part in (first, one.evidence) if part)}")
            lines.append(f"{'':13}-> {one.cure}")
        if self.tried:
            lines.append("tried, and no cause: " + "; ".join(self.tried))
        return "\n".join(lines)
