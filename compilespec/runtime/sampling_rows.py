"""A request's sampling parameters, as the state rows that the step reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from compilespec.ops.sample import layout
from compilespec.program import NO_ADAPTER
from compilespec.runtime.host_writes import HostWrites
from compilespec.runtime.sampling_params import SamplingParams

# The largest size of a request's numbers.  Times a count of tokens, and divided by the least
# temperature, it is still a number of float32, so that no sum is infinity less infinity.
LARGEST = 1e25


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A request's additions to the logits, read once, because a whole vocabulary takes a while."""

    allowed: np.ndarray | None  # int64 ids; None: all
    ids: np.ndarray  # int64, of `values`, float32
    values: np.ndarray
    bad: np.ndarray  # int64 ids

    def dense(self, vocab_size: int) -> np.ndarray:
        """Bias, -inf for bad ids and for those that are not allowed: float32 [V]."""
        bias_V = np.zeros(vocab_size, np.float32)
        if self.allowed is not None:
            bias_V.fill(-np.inf)
            bias_V[self.allowed] = 0.0
        bias_V[self.ids] += self.values
        bias_V[self.bad] = -np.inf
        return bias_V


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The choice of a row's tokens: `params`, and the engine's own facts."""

    params: SamplingParams
    bias: Bias | None  # made by `read_bias`
    seed: int  # 0 .. 2**63 - 1
    sample: int = 0  # its number among the `n` samples of a prompt
    token_ids: Sequence[int]  # prompt, and output of a request that began and is computed anew
    num_prompt_tokens: int  # of these, the first ones
    stop_token_ids: Collection[int]  # EOS included, unless it is ignored
    processor: int = 0  # handle of a logits processor on the host
    adapter: int = NO_ADAPTER  # the place of its adapter
    rope_delta: int = 0  # added to the rotary positions of its tokens
    has_long_rope: bool = False  # true: its tokens have the rotary table of long requests


def write_row(host: HostWrites, row: int, sampling: RowSampling) -> None:
    """Write everything that the row's last owner may have left: parameters; bias and prompt where
    they are read.
    """
    params, buffers = sampling.params, host.buffers
    penalises, bias = has_penalties(params), sampling.bias
    host.write("sampling_RF", row, _reals(params))
    is_biased, is_guided = bias is not None, params.guide is not None
    flags = layout.PENALISE * penalises | layout.BIAS * is_biased | layout.GUIDE * is_guided
    host.write("sampling_RI", row, _words(sampling, flags))
    if "withheld_R" in buffers:  # drafts of a step that are not judged, by the request's own K
        count, own = buffers["tokens_RS"].shape[1] - 1, params.num_draft_tokens
        host.write("withheld_R", row, [0 if own is None else max(0, count - own)])
    if "adapter_R" in buffers:
        host.write("adapter_R", row, [sampling.adapter])
    if "rope_delta_R" in buffers:
        host.write("rope_delta_R", row, [sampling.rope_delta])
    if "long_rope_R" in buffers:
        host.write("long_rope_R", row, [int(sampling.has_long_rope)])
    if "processor_R" in buffers:
        host.write("processor_R", row, [sampling.processor])
    if bias is not None:
        host.write("bias_RV", row, bias.dense(buffers["bias_RV"].shape[1]))
    if penalises:
        host.write("context_RL", row, sampling.token_ids)


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one place of the output: the log-softmax of the model's logits before
    penalties, bias, temperature and filters.
    """

    token_id: int
    """The token that was chosen."""

    logprob: float
    """Its log-probability."""

    top: Mapping[int, float]
    """The most probable tokens and their log-probabilities, best first, as many as the request
    asked for.
    """


def read_logprobs(
    buffers: Mapping[str, Tensor], row: int, tokens: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """The log-probabilities that the last step noted for the tokens of a row."""
    values = buffers["logprob_RSN"][row, : len(tokens)].tolist()
    ids = buffers["logprob_id_RSN"][row, : len(tokens)].tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=value[0],
            top=dict(zip(best[:count], value[1 : count + 1], strict=True)),
        )
        for token, value, best in zip(tokens, values, ids, strict=True)
    ]


def is_plain(sampling: RowSampling) -> bool:
    """True where the row's tokens are the argmax of the model's logits, and nothing is noted."""
    params = sampling.params
    return not (
        params.temperature >= layout.MIN_TEMPERATURE
        or has_penalties(params)
        or has_bias(params)
        or params.guide is not None
        or params.min_new_tokens
        or params.logprobs is not None
        or sampling.processor
    )


def has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )


def has_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.bad_token_ids or params.allowed_token_ids is not None)


def read_bias(params: SamplingParams) -> Bias | None:
    """The request's bias; None: nothing is added."""
    if not has_bias(params):
        return None
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    values = np.fromiter(bias.values(), np.float64, len(bias)).clip(-LARGEST, LARGEST)
    return Bias(
        allowed=None if allowed is None else np.array(allowed, np.int64),
        ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        values=values.astype(np.float32),
        bad=np.array(params.bad_token_ids or (), np.int64),
    )


def _reals(params: SamplingParams) -> list[float]:
    def held(value: float, least: float = -LARGEST) -> float:
        return min(max(value, least), LARGEST)

    values = [0.0] * layout.NUM_FLOATS
    values[layout.TEMPERATURE] = held(params.temperature)
    values[layout.TOP_P] = held(params.top_p, 1 / LARGEST)
    values[layout.MIN_P] = params.min_p
    values[layout.REPETITION] = held(params.repetition_penalty, 1 / LARGEST)
    values[layout.PRESENCE] = held(params.presence_penalty)
    values[layout.FREQUENCY] = held(params.frequency_penalty)
    return values


def _words(sampling: RowSampling, flags: int) -> list[int]:
    params = sampling.params
    stops = sorted(sampling.stop_token_ids) if params.min_new_tokens else []
    values = [0] * layout.NUM_INTS
    values[layout.SEED_LOW] = _signed(sampling.seed & 0xFFFFFFFF)
    values[layout.SEED_HIGH] = _signed(sampling.seed >> 32)
    values[layout.SAMPLE] = sampling.sample
    values[layout.FLAGS] = flags
    values[layout.TOP_K] = min(params.top_k, 2**31 - 1)
    values[layout.PROMPT_LEN] = sampling.num_prompt_tokens
    values[layout.MIN_NEW] = min(params.min_new_tokens, 2**31 - 1)
    values[layout.LOGPROBS] = 0 if params.logprobs is None else params.logprobs + 1
    values[layout.NUM_STOPS] = len(stops)
    values[layout.FIRST_STOP : layout.FIRST_STOP + len(stops)] = stops
    return values


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - (word >> 31 << 32)
