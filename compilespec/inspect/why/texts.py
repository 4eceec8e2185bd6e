"""The lost drafts of outputs, read from the tokens that each verify step gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compilespec.errors import InvalidRequest
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class LostDrafts:
    """The drafts of one step that were not kept."""

    text: int
    """The number of its text."""
    place: int
    """Of the first wrong draft in its step, from 1."""
    index: int
    """Of the token that the target put in its place, in the text."""
    count: int
    """Lost drafts: the wrong one and those after it."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt with its answer."""

    tokens: tuple[int, ...]
    start: int
    """The first token of the answer."""
    emitted: tuple[int, ...]
    """Tokens of each verify step but the last."""
    params: SamplingParams

    def lost(self, number: int, num_draft_tokens: int) -> list[LostDrafts]:
        """The lost drafts of its steps."""
        found, index = [], self.start + 1  # the answer's first token came from prefill
        for count in self.emitted:
            index += count
            if count <= num_draft_tokens:
                rest = num_draft_tokens + 1 - count
                found.append(LostDrafts(text=number, place=count, index=index - 1, count=rest))
        return found


def read_texts(outputs: Sequence[GenerationOutput], params: Sequence[SamplingParams]) -> list[Text]:
    """The texts whose steps can be told apart: not those of preempted requests.

    Raises: InvalidRequest where no text has two verify steps.
    """
    texts = [
        Text(
            tokens=(*output.prompt_token_ids, *output.token_ids),
            start=len(output.prompt_token_ids),
            emitted=tuple(output.emitted_per_step[:-1]),
            params=own,
        )
        for output, own in zip(outputs, params, strict=True)
        if output.error is None and not output.num_preemptions
    ]
    texts = [text for text in texts if text.emitted]
    if not texts:
        raise InvalidRequest(
            "explain: no text has two verify steps; give prompts with longer answers "
            "(max_new_tokens=), or outputs of an engine that drafts"
        )
    return texts
