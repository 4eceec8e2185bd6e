"""State rows, parameters and scores of sampled requests, and how well draws fit a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from compilespec import SamplingParams
from compilespec.ops.sample import (
    layout,
)
from compilespec.runtime.host_writes import HostWrites
from compilespec.runtime.sampling_rows import RowSampling, read_bias, write_row
from tests.support.models import VOCAB

STOPS = (2, 7)


@dataclass(frozen=True)
class State:
    buffers: dict[str, Tensor]
    prompts: tuple[tuple[int, ...], ...]

    def arguments(self) -> tuple[Tensor, ...]:
        names = ("sampling_RF", "sampling_RI", "bias_RV", "context_RL", "mask_RSW")
        return tuple(self.buffers[name].clone() for name in names)


def make_state(
    params: list[SamplingParams], vocab: int, *, max_seq_len: int = 40, num_prompt: int = 9
) -> State:
    """One row a request and the spare one, written over what other requests left."""
    count = len(params) + 1
    buffers = {
        "sampling_RF": torch.full((count, layout.NUM_FLOATS), 1e30),
        "sampling_RI": torch.full((count, layout.NUM_INTS), -7, dtype=torch.int32),
        "bias_RV": torch.full((count, vocab), math.nan),
        "context_RL": torch.full((count, max_seq_len), -(2**31), dtype=torch.int32),
        "mask_RSW": torch.zeros(count, 400, -(-vocab // 32), dtype=torch.int32),
    }
    prompts, host = [], HostWrites(buffers, torch.device("cpu"))
    for row, one in enumerate([*params, SamplingParams()]):
        prompts.append(tuple(torch.randint(0, vocab, (num_prompt,)).tolist()))
        write_row(
            host, row,
            RowSampling(params=one, bias=read_bias(one),
                        seed=1000 + row if one.seed is None else one.seed,
                        token_ids=prompts[-1], num_prompt_tokens=len(prompts[-1]),
                        stop_token_ids=STOPS),
        )  # fmt: skip
    return State(buffers, tuple(prompts))


def window(batch: int, steps: int, vocab: int, start: int) -> tuple[Tensor, Tensor]:
    """Tokens fed to S rows from position `start` on, and what those rows draw."""
    ids = torch.randint(0, vocab, (batch, steps), dtype=torch.int32)
    drawn = torch.arange(start + 1, start + 1 + steps, dtype=torch.int32).expand(batch, steps)
    return ids, drawn.contiguous()


PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_bonus": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7},
    "logit_bias": {"logit_bias": {0: 4.0, 3: -2.5, 11: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": (1, 2, 5, 8, 12)},
    "bad_token_ids": {"bad_token_ids": tuple(range(0, 13, 2))},
    "min_new_tokens": {"min_new_tokens": 3},
    "top_k": {"top_k": 4},
    "top_k_of_all": {"top_k": 10**6},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.15},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
        "logit_bias": {1: 2.0}, "bad_token_ids": (4, 9), "min_new_tokens": 2,
        "allowed_token_ids": tuple(range(11)), "top_k": 6, "top_p": 0.9, "min_p": 0.02,
    },
}  # fmt: skip


# Of requests to a model with the vocabulary of `tests.support.models`.
REQUEST_PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {5: 3.0, 17: -1.0, 60: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(10, 40))},
    "bad_token_ids": {"bad_token_ids": tuple(range(0, VOCAB, 2))},
    "min_new_tokens": {"min_new_tokens": 15, "stop_token_ids": tuple(range(50))},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0, 60: 2.0}, "bad_token_ids": (1, 3, 8), "min_new_tokens": 9,
        "stop_token_ids": (4, 9, 30), "allowed_token_ids": tuple(range(70)), "top_k": 20,
        "top_p": 0.95, "min_p": 0.01,
    },
}  # fmt: skip


def transformers_scores(
    logits_V: Tensor,
    context: list[int],
    num_prompt: int,
    params: SamplingParams,
    stops: Sequence[int] = STOPS,
) -> Tensor:
    """The row after transformers' classes; the two penalties that it lacks are spelt out."""
    ids, scores = torch.tensor([context]), logits_V.unsqueeze(0).clone()
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in context[num_prompt:]:
        scores[0, token] -= params.frequency_penalty
    for token in set(context[num_prompt:]):
        scores[0, token] -= params.presence_penalty
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(bias)(ids, scores)
    banned = list(params.bad_token_ids or ())
    if params.allowed_token_ids is not None:
        banned += sorted(set(range(len(logits_V))) - set(params.allowed_token_ids))
    if banned:
        scores = hf.SuppressTokensLogitsProcessor(banned)(ids, scores)
    if params.min_new_tokens:
        hold = hf.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_new_tokens, list(stops))
        scores = hold(ids, scores)
    if params.temperature:
        for warper in (
            hf.TemperatureLogitsWarper(params.temperature),
            *([hf.TopKLogitsWarper(params.top_k)] if params.top_k else []),
            *([hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []),
            *([hf.MinPLogitsWarper(params.min_p)] if params.min_p else []),
        ):
            scores = warper(ids, scores)
    return scores[0]


def all_params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_new_tokens=9, **fields)
        for fields in PARAMETERS.values()
    ]


def chi_square_p(counts_V: Tensor, probability_V: Tensor) -> float:
    """Chance of a fit as bad as this or worse."""
    expected_V = probability_V.double() * counts_V.sum()
    possible_V = expected_V > 0
    assert int(counts_V[~possible_V].sum()) == 0
    statistic = ((counts_V - expected_V) ** 2 / expected_V)[possible_V].sum()
    freedom = torch.tensor((int(possible_V.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
