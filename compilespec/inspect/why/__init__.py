"""Why drafts are lost: every one put to a cause, and set-ups that are wrong found by trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from compilespec.errors import InvalidRequest
from compilespec.inspect.why.asked import answer_marks, other_forms
from compilespec.inspect.why.causes import Findings, LostStep, assign, fault_of_model
from compilespec.inspect.why.reading import DraftReader, TargetReader, draft_reader
from compilespec.inspect.why.records import Cause, CauseName, Explanation
from compilespec.inspect.why.texts import Text, read_texts
from compilespec.inspect.why.trials import OtherReading, Tried, trials_of
from compilespec.program import SpecProgram, Traced
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.prompts import as_prompt_list
from compilespec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Engine

__all__ = ["Cause", "CauseName", "Explanation", "explain"]

NUM_TOKENS = 128  # of an answer, unless params say otherwise
MAX_ASKED = 8  # prompts that are asked again in another form
Originals = Callable[[], tuple[Traced, Any]]


def explain(
    engine: Engine,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    program: SpecProgram,
    originals: Originals | None = None,
    stored: Callable[[], Mapping[str, Any]] = dict,
) -> Explanation:
    """Run the prompts, or read outputs of earlier runs, and say why their drafts were lost.

    Args:
        prompts: as for `generate`; or `GenerationOutput`s of runs with this K, as they are.
        originals: loads target and drafter as their checkpoints are, where an option quantizes.
        stored: reads the drafter's config.json.
    Raises: InvalidRequest where there is nothing to explain; as `generate`.
    """
    items, outputs = as_prompt_list(prompts)[0], []
    each = _params_of(params, len(items))
    if not program.capabilities.drafts_in_step:
        raise InvalidRequest(
            f"explain: spec={program.method!r} makes no drafts in the step; compile a method that "
            "drafts"
        )
    if recorded := [one for one in items if isinstance(one, GenerationOutput)]:
        outputs = recorded
    else:
        outputs = run_all(engine, items, each)
    texts = read_texts(outputs, each[: len(outputs)])
    count = program.config.num_draft_tokens
    reader = draft_reader(program)
    findings = Findings(num_draft_tokens=count, reader=reader)
    if reader is None:
        findings.tried.append(
            f"a drafter of spec={program.method!r} is not run over a text, so that its taps, norms "
            "and ids were not tried"
        )
    _read_all(findings, texts, program, reader, originals)
    if not recorded:
        _ask_again(findings, engine, texts)
    fault_of_model(findings, program, stored())
    return Explanation(
        method=program.method,
        num_draft_tokens=count,
        num_texts=len(texts),
        **_figures(texts, count),
        num_lost=sum(one.lost.count for one in findings.pieces),
        causes=assign(findings),
        tried=tuple(findings.tried),
    )


def _params_of(given: Any, count: int) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams(max_new_tokens=NUM_TOKENS)
    each = [given] * count if isinstance(given, SamplingParams) else list(given)
    if len(each) != count or any(one.n != 1 for one in each):
        raise InvalidRequest("explain: give one SamplingParams, or one for each prompt, with n=1")
    return each


def run_all(
    engine: Engine, prompts: Sequence[Any], params: Sequence[SamplingParams]
) -> list[GenerationOutput]:
    """The outputs, with every step verifying the most drafts."""
    with engine.most_drafts():
        outputs = engine.generate(list(prompts), list(params))
    if failed := [one.error for one in outputs if one.error is not None]:
        raise failed[0]
    return outputs


def _figures(texts: Sequence[Text], count: int) -> dict[str, Any]:
    steps = [emitted for text in texts for emitted in text.emitted]
    rates = (sum(one > place for one in steps) / len(steps) for place in range(1, count + 1))
    return {
        "num_steps": len(steps),
        "acceptance_length": sum(steps) / len(steps),
        "acceptance_rate_by_place": tuple(rates),
    }


def _read_all(
    findings: Findings,
    texts: Sequence[Text],
    program: SpecProgram,
    reader: DraftReader | None,
    originals: Originals | None,
) -> None:
    """Read every text once, with the drafter as it is and in every trial."""
    target = TargetReader(program.target)
    trials = [] if reader is None else trials_of(reader, target.num_layers)
    if originals is not None and reader is not None:
        trials.append(_as_stored(originals))
    findings.trials = [Tried(trial=one) for one in trials]
    for number, text in enumerate(texts):
        said = target.read(text.tokens, text.start)
        guesses = None if reader is None else reader.guess(text.tokens, text.start, said)
        if reader is not None and guesses is not None:
            findings.own.append(guesses)
            second = None
            for tried in findings.trials:
                base = guesses
                if tried.trial.depth == 2:
                    second = second or reader.guess(text.tokens, text.start, said, depth=2)
                    base = second
                tried.add(base, tried.trial.guess(text, said))
        findings.texts.append(text)
        for lost in text.lost(number, findings.num_draft_tokens):
            findings.pieces.append(_piece(lost, text, said, guesses))


def _piece(lost: Any, text: Text, said: Any, guesses: Any) -> LostStep:
    """The facts about the drafts that one step lost."""
    row = said.logits_TV[lost.index - text.start].float()
    token = text.tokens[lost.index]
    best = int(row.argmax())
    rival = best if best != token else int(row.topk(2).indices[1])
    if guesses is not None and lost.index >= guesses.first:
        guess = int(guesses.draft_G[lost.index - guesses.first])
        rival = rival if guess == token else guess
    is_known = guesses is None or bool(guesses.known_G[lost.index - guesses.first])
    return LostStep(
        lost=lost,
        is_best=best == token,
        odds=float((row[rival] - row[token]).exp()),
        is_known=is_known,
        is_right=None if guesses is None else guesses.is_right(lost.index),
        params=text.params,
    )


def _as_stored(originals: Originals) -> OtherReading:
    """The trial of both models without quantization; they are loaded when it is first run."""
    loaded: list[tuple[TargetReader, DraftReader]] = []

    def guess(text: Text, said: Any) -> Any:
        if not loaded:
            traced, drafter = originals()
            loaded.append((TargetReader(traced), DraftReader(drafter=drafter)))
        target, reader = loaded[0]
        return reader.guess(text.tokens, text.start, target.read(text.tokens, text.start))

    return OtherReading(cause="precision", what="the weights of the checkpoints", guess=guess)


def _ask_again(findings: Findings, engine: Engine, texts: Sequence[Text]) -> None:
    """Ask prompts of another form than the chat template's again, as it writes them."""
    if engine.tokenizer is None:
        return
    found: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for number, text in enumerate(texts):
        prompt = text.tokens[: text.start]
        for what, other in other_forms(prompt, engine.tokenizer).items():
            found.setdefault(what, []).append((number, other))
    limit = engine.geometry.config.max_seq_len
    for what, others in found.items():
        asked = [(n, ids) for n, ids in others if len(ids) < limit - NUM_TOKENS // 4][:MAX_ASKED]
        params = [
            dataclasses.replace(
                texts[n].params,
                max_new_tokens=min(texts[n].params.max_new_tokens, limit - len(ids)),
            )
            for n, ids in asked
        ]
        outputs = run_all(engine, [list(ids) for _, ids in asked], params) if asked else []
        before = torch.tensor([float(e) for n, _ in asked for e in texts[n].emitted])
        after = torch.tensor([float(e) for one in outputs for e in one.emitted_per_step[:-1]])
        if len(before) > 1 and len(after) > 1:
            marks = answer_marks(engine.tokenizer)
            findings.note_form(what, {n for n, _ in others}, before, after, marks)
