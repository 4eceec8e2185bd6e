"""Every lost draft put to one cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compilespec.inspect.why.reading import DraftReader, Guesses
from compilespec.inspect.why.records import Cause, CauseName
from compilespec.inspect.why.texts import LostDrafts, Text
from compilespec.inspect.why.trials import Tried, learned_rows, unloaded_norms
from compilespec.program import SpecProgram
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.tracing.weight_marks import KEY, fingerprint

NEAR = 0.5  # of the token's probability, for the target to waver
STALE_SHARE = 0.05  # of steps whose first draft is wrong, but right without a cache
OVERSURE = 0.5  # nats by which a drafter is less right than it believes; healthy heads are below 0
LEARNED = 0.1  # of drafts more that are right with what rows meant elsewhere, for ids to be wrong
BETTER_FORM = 1.1  # of the acceptance length, for a prompt's form to count as a cause


@dataclass(frozen=True, kw_only=True)
class LostStep:
    """The lost drafts of one step, and what is known of them."""

    lost: LostDrafts
    is_best: bool
    """The target's token is its likeliest."""
    odds: float
    """The draft's probability over the token's, by the target."""
    is_known: bool
    """The drafter can propose the token."""
    is_right: bool | None
    """The drafter proposes it after the true tokens; None: it was not run."""
    params: SamplingParams


@dataclass(kw_only=True)
class Findings:
    """All that was found, before it is put in order."""

    num_draft_tokens: int
    reader: DraftReader | None
    texts: list[Text] = field(default_factory=list)
    pieces: list[LostStep] = field(default_factory=list)
    own: list[Guesses] = field(default_factory=list)
    trials: list[Tried] = field(default_factory=list)
    faults: dict[CauseName, str] = field(default_factory=dict)
    """Causes that are set up wrongly, with their evidence, the surest first."""
    best: Tried | None = None
    """The trial that foresees the answers best, if it is better."""
    form_texts: set[int] = field(default_factory=set)
    """Texts whose prompts have another form than the template's."""
    form_share: float = 0.0
    """The share of their lost drafts that the template saves."""
    form_marks: list[tuple[int, ...]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)

    def note_form(
        self,
        what: str,
        texts: set[int],
        before: Tensor,
        after: Tensor,
        marks: list[tuple[int, ...]],
    ) -> None:
        """Record the gain of asking again in another form, in tokens of each verify step."""
        gain = float(after.mean() / before.mean())
        error = float((before.var() / len(before) + after.var() / len(after)).sqrt())
        says = (
            f"asked with {what} acceptance length is {float(after.mean()):.2f}, not "
            f"{float(before.mean()):.2f}"
        )
        is_sure = gain > BETTER_FORM and float(after.mean() - before.mean()) > 2 * error
        if not (is_sure or what.startswith("the generation prompt")):
            self.tried.append(says)
            return
        most = self.num_draft_tokens + 1
        lost_before, lost_after = (float((most - one).mean()) for one in (before, after))
        self.form_share = max(0.0, 1 - lost_after / max(lost_before, 1e-6))
        self.form_texts, self.form_marks = texts, marks
        self.faults["prompt_form"] = f"{len(texts)} of {len(self.texts)} prompts; {says}"


def fault_of_model(findings: Findings, program: SpecProgram, stored: Mapping[str, Any]) -> None:
    """Faults of the drafter's set-up: by trial, by its rows, by what it believes of itself."""
    reader, own = findings.reader, findings.own
    if reader is None or not own:
        return
    right, learned = learned_rows(own, findings.texts)
    is_mapped = learned < right + LEARNED
    better = [one for one in findings.trials if one.is_better]
    better = [one for one in better if is_mapped or one.trial.cause == "draft_ids"]
    findings.best = max(better, key=lambda one: one.gain, default=None)
    if findings.best is not None:
        findings.faults = {findings.best.trial.cause: findings.best.describe(), **findings.faults}
    elif not is_mapped:
        says = f"rows that mean what they meant before make {learned:.0%} right, not {right:.0%}"
        findings.faults = {"draft_ids": says, **findings.faults}
    findings.tried += [one.describe() for one in findings.trials if one is not findings.best]
    if (ones := unloaded_norms(reader.drafter)) and "norm" not in findings.faults:
        says = f"all weights of {', '.join(ones)} are 1, as if never loaded"
        findings.faults = {"norm": says, **findings.faults}
    _note_other_model(findings, program, stored)
    _note_stale(findings)


def _note_other_model(findings: Findings, program: SpecProgram, stored: Mapping[str, Any]) -> None:
    """The target that the drafter's config.json means; or a drafter that believes itself far more
    than it is right.
    """
    says = []
    own, meant = fingerprint(program.target.weights), stored.get(KEY)
    if meant is not None and own not in (None, meant):
        says.append(f"its config.json says that it learned from weights {meant}, these are {own}")
    verifier = (stored.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    names = [str(one).rstrip("/").rpartition("/")[2].casefold() for one in (name, program.model)]
    if name and names[0] not in names[1] and names[1] not in names[0]:
        says.append(f"its config.json names {name}, the target is {program.model}")
    cost = float(torch.cat([one.cost_G for one in findings.own]).mean())
    expected = float(torch.cat([one.entropy_G for one in findings.own]).mean())
    if cost - expected > OVERSURE and not findings.faults:
        says.append(
            f"the text costs it {cost:.2f} nats a token, and it expects {expected:.2f}: its inputs "
            "are not those it learned from, and no other reading of it is better"
        )
    if says:
        findings.faults = {"other_model": "; ".join(says), **findings.faults}


def _note_stale(findings: Findings) -> None:
    firsts = [one for one in findings.pieces if one.lost.place == 1]
    firsts = [one for one in firsts if not one.params.temperature]
    stale = [one for one in firsts if one.is_right and one.is_best and one.odds < NEAR]
    num_steps = sum(len(text.emitted) for text in findings.texts)
    if len(stale) < max(2, STALE_SHARE * num_steps):
        return
    says = (
        f"{len(stale)} of {len(firsts)} wrong first drafts are right where the drafter reads the "
        "whole text at once"
    )
    findings.faults = {"stale_cache": says, **findings.faults}


def assign(findings: Findings) -> tuple[Cause, ...]:
    """The causes with the drafts that each lost: faults first, then by lost drafts."""
    names = [_cause_of(piece, findings) for piece in findings.pieces]
    _spread_form(findings, names)
    causes = []
    for name in dict.fromkeys([*findings.faults, *names]):
        lost = [
            piece.lost for piece, own in zip(findings.pieces, names, strict=True) if own == name
        ]
        causes.append(
            Cause(
                name=name,
                num_lost=sum(one.count for one in lost),
                num_first=sum(one.count for one in lost if one.place == 1),
                evidence=findings.faults.get(name, ""),
            )
        )
    surest = list(findings.faults)
    causes.sort(
        key=lambda one: (
            surest.index(one.name) if one.name in surest else len(surest),
            -one.num_lost,
        )
    )
    return tuple(causes)


def _cause_of(piece: LostStep, findings: Findings) -> CauseName:
    """The first cause that holds, of those that are surest first."""
    lost, faults = piece.lost, findings.faults
    if findings.best is not None and not piece.is_right:
        trial = findings.best
        if lost.place >= trial.trial.depth and trial.guesses[lost.text].is_right(lost.index):
            return trial.trial.cause
    if "stale_cache" in faults and lost.place == 1 and piece.is_right and piece.is_best:
        return "stale_cache"
    if "draft_ids" in faults and not piece.is_right:
        return "draft_ids"
    if not piece.is_best and piece.params.guide is not None:
        return "guide"
    is_drawn = piece.params.temperature > 0  # drafts are drawn, too, with the same noise
    if (is_drawn and (piece.is_right or not piece.is_best)) or piece.odds > 1.1:
        return "sampling"
    if not piece.is_known:
        return "draft_vocabulary"
    if piece.odds >= NEAR:
        return "near_tie"
    if piece.is_right and lost.place > 1:
        return "later_places"
    if piece.is_right:
        return "near_tie"  # rounding chose another draft
    if _is_long(piece, findings):
        return "long_context"
    rest: tuple[CauseName, ...] = ("norm", "other_model")
    return next((name for name in rest if name in faults and findings.best is None), "drafter")


def _is_long(piece: LostStep, findings: Findings) -> bool:
    """True past the positions that the drafter was made for."""
    config = getattr(findings.reader and findings.reader.drafter, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return limit is not None and piece.lost.index >= limit


def _spread_form(findings: Findings, names: list[CauseName]) -> None:
    """Put to the prompts' form what the template saves, and the marks that answers begin with."""
    if "prompt_form" not in findings.faults:
        return
    pieces = findings.pieces
    own = [at for at, one in enumerate(pieces) if one.lost.text in findings.form_texts]
    left = findings.form_share * sum(pieces[at].lost.count for at in own)
    rank: Sequence[CauseName] = ("drafter", "later_places", "draft_vocabulary", "near_tie")
    free = [at for at in own if names[at] in rank]
    free.sort(key=lambda at: (not _in_mark(findings, pieces[at].lost), rank.index(names[at])))
    for at in free:
        if left <= 0 and not _in_mark(findings, pieces[at].lost):
            break
        left -= pieces[at].lost.count
        names[at] = "prompt_form"


def _in_mark(findings: Findings, lost: LostDrafts) -> bool:
    """True where the answer begins with what the prompt should have ended with, up to there."""
    text = findings.texts[lost.text]
    answer = text.tokens[text.start :]
    return any(
        answer[: len(mark)] == mark and lost.index - text.start <= len(mark)
        for mark in findings.form_marks
    )
