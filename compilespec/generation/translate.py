"""The logits processors of a call as parameters of requests."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from compilespec.errors import NotSupported
from compilespec.generation.call import Call
from compilespec.runtime.sampling_params import SamplingParams

# The step has these itself, in this order, after what acts on single tokens.
_WARPERS: tuple[tuple[type, str], ...] = (
    (theirs.TemperatureLogitsWarper, "temperature"),
    (theirs.TopKLogitsWarper, "top_k"),
    (theirs.TopPLogitsWarper, "top_p"),
    (theirs.MinPLogitsWarper, "min_p"),
)
_KEEP_STATE: tuple[type, ...] = (  # of a batch, or of the calls before
    theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    theirs.ClassifierFreeGuidanceLogitsProcessor,
    theirs.SynthIDTextWatermarkLogitsProcessor,
    theirs.EncoderNoRepeatNGramLogitsProcessor,
    theirs.EncoderRepetitionPenaltyLogitsProcessor,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice of a call's tokens.

    Args:
        own: fields of `SamplingParams` that the step has itself.
        needs_host: the list is called on the host, for each row.
    """

    call: Call
    own: Mapping[str, Any]
    needs_host: bool

    def params(self, engine_eos: Collection[int], seeds: Sequence[int]) -> list[SamplingParams]:
        """The parameters of each row."""
        common: dict[str, Any] = {"max_new_tokens": self.call.max_new_tokens, **self.own}
        eos = self.call.eos_token_ids
        if eos != frozenset(engine_eos):
            common |= {"ignore_eos": True, "stop_token_ids": tuple(sorted(eos or ()))}
        rows = []
        for index, seed in enumerate(seeds):
            host = RowProcessors(self.call, index) if self.needs_host else None
            rows.append(SamplingParams(**common, seed=seed, logits_processor=host))
        return rows


def translate(call: Call) -> Plan:
    """Take what the step has itself, if that is all; else the whole list runs on the host.

    Raises: NotSupported for a processor that cannot run a row at a time.
    """
    for processor in call.processors:
        if isinstance(processor, _KEEP_STATE):
            raise NotSupported(
                f"generate: {type(processor).__name__} reads more than a row and its logits, which "
                "is not served"
            )
    draws = bool(call.config.do_sample)
    own = _own(call)
    needed = {"temperature": 1.0} if draws else {}
    return Plan(call=call, own={**needed, **(own or {})}, needs_host=own is None)


def _own(call: Call) -> dict[str, Any] | None:
    """The list as fields of `SamplingParams`; None where a processor has no field, or its place in
    the list is another than the step's.
    """
    fields: dict[str, Any] = {}
    place = -1
    for processor in call.processors:
        found = [i for i, (kind, _) in enumerate(_WARPERS) if type(processor) is kind]
        if found:
            keeps_one = getattr(processor, "min_tokens_to_keep", 1) == 1
            if not (keeps_one and found[0] > place and call.config.do_sample):
                return None
            place, name = found[0], _WARPERS[found[0]][1]
            value = getattr(processor, name)
            value = value.item() if isinstance(value, Tensor) else value
            fields[name] = int(value) if name == "top_k" else float(value)
        elif place >= 0:
            return None
        else:
            one = _single(processor, call)
            if one is None or one.keys() & fields.keys():
                return None
            fields |= one
    return fields


def _single(processor: Any, call: Call) -> dict[str, Any] | None:
    """The field of a processor that acts on single tokens; None where there is none."""
    kind = type(processor)
    if kind is theirs.RepetitionPenaltyLogitsProcessor:
        skipped = processor.prompt_ignore_length
        skipped = torch.zeros_like(call.num_pads) if skipped is None else torch.as_tensor(skipped)
        is_whole = bool((skipped.to(call.mask.device) == call.num_pads).all())
        return {"repetition_penalty": float(processor.penalty)} if is_whole else None
    if kind is theirs.SuppressTokensLogitsProcessor:
        return {"bad_token_ids": tuple(processor.suppress_tokens.tolist())}
    if kind in (theirs.MinLengthLogitsProcessor, theirs.MinNewTokensLengthLogitsProcessor):
        held = frozenset(torch.as_tensor(processor.eos_token_id).flatten().tolist())
        length = call.input_ids.shape[1]
        if kind is theirs.MinLengthLogitsProcessor:
            least = processor.min_length - length
        else:
            least = processor.min_new_tokens - (length - processor.prompt_length_to_skip)
        is_ours = held == call.eos_token_ids and 0 <= least <= call.max_new_tokens
        return {"min_new_tokens": int(least)} if is_ours else None
    return None


class RowProcessors:
    """The processors of a call for one of its rows, as `SamplingParams.logits_processor`."""

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index
        self._num_prompt = len(call.prompts[index])
        self._processors = theirs.LogitsProcessorList(
            [_for_row(processor, index) for processor in call.processors]
        )

    def __call__(self, tokens: list[int], logits_V: Tensor) -> Tensor:
        """The scores [V] of the token after `tokens`, the prompt's included."""
        ids = self._call.row(self._index, tokens[self._num_prompt :])
        scores = logits_V[None].to(device=ids.device, dtype=torch.float32)
        return self._processors(ids, scores)[0]


def _for_row(processor: Any, index: int) -> Any:
    """A processor that tells rows apart sees one row; it is told which."""
    if type(processor) is theirs.RepetitionPenaltyLogitsProcessor:
        skipped = processor.prompt_ignore_length
        if isinstance(skipped, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = skipped[index : index + 1]
        return processor
    if type(processor) is not theirs.PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return theirs.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(index, ids), 1)
