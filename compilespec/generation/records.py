"""The results of a call as transformers returns them, with the values that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compilespec.generation.call import Call, positions_of
from compilespec.generation.loop import token_at


def with_records(model: Any, call: Call, tokens: Sequence[Sequence[int]]) -> Any:
    """The sequences [B, L + T], or transformers' record of them.

    Scores, logits and hidden states come from one call of the module over the sequences, so they
    differ from the step's by the rounding of another order of sums.
    """
    sequences = _sequences(call, tokens)
    config = call.config
    if not config.return_dict_in_generate:
        return sequences
    asked = {
        "scores": config.output_scores,
        "logits": config.output_logits,
        "hidden_states": config.output_hidden_states,
    }
    values = _values(model, call, sequences, asked) if any(asked.values()) else {}
    return GenerateDecoderOnlyOutput(sequences=sequences, **values)


def _sequences(call: Call, tokens: Sequence[Sequence[int]]) -> Tensor:
    steps = range(max(len(row) for row in tokens))
    new = [[token_at(row, step, call.pad) for step in steps] for row in tokens]
    ids = call.input_ids
    return torch.cat([ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)], dim=1)


def _values(
    model: Any, call: Call, sequences: Tensor, asked: dict[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """By name, what transformers keeps of each step: a tuple with an entry for each new token."""
    length, ids = call.input_ids.shape[1], sequences[:, :-1]
    mask = torch.cat([call.mask, torch.ones_like(ids[:, length:])], dim=1)
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    if bool(call.num_pads.any()):
        inputs["position_ids"] = positions_of(mask)
    num_new = sequences.shape[1] - length
    if model._supports_logits_to_keep():
        inputs["logits_to_keep"] = num_new
    output = model(
        input_ids=ids, output_hidden_states=bool(asked["hidden_states"]), return_dict=True, **inputs
    )
    found: dict[str, tuple[Any, ...]] = {}
    raw = output.logits[:, -num_new:].float().unbind(1)
    if asked["scores"]:
        found["scores"] = tuple(
            call.processors(sequences[:, : length + step], logits.clone())
            for step, logits in enumerate(raw)
        )
    if asked["logits"]:
        found["logits"] = raw
    if asked["hidden_states"]:
        ends = range(length, ids.shape[1] + 1)
        begins = [0] * num_new if call.config.use_cache is False else [0, *ends[:-1]]
        parts = [slice(begin, end) for begin, end in zip(begins, ends, strict=True)]
        found["hidden_states"] = tuple(
            tuple(layer[:, part] for layer in output.hidden_states) for part in parts
        )
    return found
