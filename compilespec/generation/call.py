"""A call of transformers' decoding loop, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from compilespec.errors import InvalidRequest, NotSupported

_OTHER_LOOPS = {
    "_beam_search": "beam search (num_beams above 1) is not served",
    "_assisted_decoding": "assisted generation by transformers is not served: the engine drafts "
    "itself, by attach(model, spec=, draft=)",
}
_OF_A_ROW = (MaxTimeCriteria, StopStringCriteria)  # they tell the same of one row as of many
_READ = {"attention_mask", "position_ids", "past_key_values"}
# Prepared by transformers for its own loop, or for its criteria, and without an effect on tokens.
_HARMLESS = {
    "use_cache", "logits_to_keep", "cache_position", "output_hidden_states", "output_attentions",
    "tokenizer",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """The prompts of a call, and when its rows end.

    Args:
        prompts: by row, the ids without padding.
        criteria: those that are asked of a row after its token; length and EOS are the engine's.
        criteria_of_all: those that are asked of all rows at once, as their author may expect.
        max_new_tokens: of each row.
        eos_token_ids: of the criteria; None where none ends a row at an id.
        needs_pads: some rows begin with padding.
    """

    input_ids: Tensor
    mask: Tensor
    prompts: Sequence[Sequence[int]]
    processors: Any
    criteria: Sequence[Any]
    criteria_of_all: Sequence[Any]
    max_new_tokens: int
    eos_token_ids: frozenset[int] | None
    config: Any
    streamer: Any

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Call:
        """Read a call.  Raises: NotSupported, InvalidRequest, which name what does not fit."""
        _check_config(model, generation_config, synced_gpus)
        for name, value in model_kwargs.items():
            if value is not None and name not in _HARMLESS and name not in _READ:
                raise NotSupported(f"generate: {name} is not read; prompts are token ids here")
        mask = _read_mask(input_ids, model_kwargs.get("attention_mask"))
        _check_positions(mask, model_kwargs.get("position_ids"))
        _check_cache(model_kwargs.get("past_key_values"))
        limits = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
        if not limits:
            raise InvalidRequest("generate: no length ends the rows; give max_new_tokens")
        ends = [c for c in stopping_criteria if type(c) is EosTokenCriteria]
        eos = frozenset(int(i) for c in ends for i in torch.as_tensor(c.eos_token_id).flatten())
        others = [
            c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        return cls(
            input_ids=input_ids,
            mask=mask,
            prompts=[row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)],
            processors=logits_processor,
            criteria=[c for c in others if type(c) in _OF_A_ROW],
            criteria_of_all=[c for c in others if type(c) not in _OF_A_ROW],
            max_new_tokens=min(limits) - input_ids.shape[1],
            eos_token_ids=eos if ends else None,
            config=generation_config,
            streamer=streamer,
        )

    @property
    def pad(self) -> int:
        """The id behind the end of a row."""
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad.flatten()[0])

    @property
    def stops_alone(self) -> bool:
        """A row that ends waits as padding; without an EOS all rows go on together."""
        return any(hasattr(c, "eos_token_id") for c in self.criteria_of_all) or (
            self.eos_token_ids is not None
        )

    @property
    def num_pads(self) -> Tensor:
        """By row: [B]."""
        return (1 - self.mask).sum(1)

    def row(self, index: int, tokens: Sequence[int]) -> Tensor:
        """A row as transformers holds it, padding included, and new tokens: [1, L + len]."""
        new = torch.tensor([list(tokens)], dtype=torch.long, device=self.input_ids.device)
        return torch.cat([self.input_ids[index : index + 1], new], dim=1)


def check_mode(loop: str) -> None:
    """Raises: NotSupported where another loop of transformers than that of one token was asked."""
    if loop in _OTHER_LOOPS:
        raise NotSupported(f"generate: {_OTHER_LOOPS[loop]}")


def _check_config(model: Any, config: Any, synced_gpus: bool) -> None:
    if model.config.is_encoder_decoder:
        raise NotSupported("generate: encoder-decoder models are not served")
    if synced_gpus:
        raise NotSupported("generate: synced_gpus is not served; each process has its own engine")
    if (config.num_beams or 1) > 1:
        check_mode("_beam_search")
    if config.prompt_lookup_num_tokens is not None or config.assistant_early_exit is not None:
        check_mode("_assisted_decoding")
    if config.penalty_alpha or config.dola_layers is not None:
        raise NotSupported("generate: contrastive search and DoLa are not served")
    if config.output_attentions and config.return_dict_in_generate:
        raise NotSupported("generate: output_attentions is not served; leave it out")
    if config.cache_implementation == "quantized":
        raise NotSupported(
            "generate: a quantized cache changes numbers; leave cache_implementation out"
        )


def _read_mask(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of prompts that are padded on the left: [B, L]."""
    if mask is None:
        return torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise InvalidRequest(
            f"generate: expected an attention_mask {list(input_ids.shape)} as input_ids have it, "
            f"got {list(mask.shape)}"
        )
    mask = mask.to(input_ids.device).bool().long()
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1:].all()):
        raise NotSupported(
            "generate: attention_mask has zeros behind a token; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return mask


def positions_of(mask: Tensor) -> Tensor:
    """The position of each token in its row, from 0 on; 0 of padding: [B, L]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _check_positions(mask: Tensor, positions: Tensor | None) -> None:
    if positions is None:
        return
    usual = positions_of(mask).expand_as(positions).to(positions.device)
    if bool(((usual != positions) & mask.bool().to(positions.device)).any()):
        raise NotSupported(
            "generate: position_ids are other than 0, 1, 2 ... of each prompt; leave them out"
        )


def _check_cache(cache: Any) -> None:
    if cache is not None and cache.get_seq_length() > 0:
        raise NotSupported(
            "generate: past_key_values holds tokens, which the engine cannot read; leave it out: "
            "the engine finds the beginnings of prompts that it has seen"
        )
