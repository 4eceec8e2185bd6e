"""Rollouts for reinforcement learning: samples with the log-probabilities of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compilespec.errors import InvalidRequest, is_integer
from compilespec.ops import _build
from compilespec.ops.device import traits_of
from compilespec.program import SpecProgram
from compilespec.runtime.outputs import GenerationOutput
from compilespec.runtime.sampling_params import SamplingParams
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.structure import head_of


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sample of a prompt."""

    output: GenerationOutput
    """The sample with its text, its end and its timings."""

    log_probs: tuple[float, ...]
    """Of each token, under the model's own logits: without temperature, filters and penalties."""

    sample: int
    """Its number among the samples of its prompt, which share a seed."""

    why_not_exact: str | None
    """The reason why `compilespec.training.log_probs` may round otherwise; None: it gives the same
    bits.
    """

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.output.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        return self.output.token_ids

    @property
    def seed(self) -> int:
        """The seed of its prompt: `rollout(prompt, n, seeds=[seed])` gives its samples again."""
        assert self.output.seed is not None, "rollouts are sampled with a seed"
        return self.output.seed

    @property
    def weights_version(self) -> int | None:
        """The version of the weights that its last tokens came from."""
        return self.output.weights_version

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verify step."""
        return self.output.acceptance_length


def rollout_params(
    count: int, num_samples: int, seeds: Any, step: int, sampling: SamplingParams
) -> list[SamplingParams]:
    """The parameters of each prompt.  Raises: InvalidRequest."""
    for name in ("n", "seed", "logprobs", "prompt_logprobs"):
        default = 1 if name == "n" else None
        if getattr(sampling, name) != default:
            raise InvalidRequest(
                f"rollout: leave {name} out of sampling=; n= and seeds= are keywords of rollout()"
            )
    if not is_integer(step) or step < 0:
        raise InvalidRequest(f"rollout: step must be an integer of at least 0, got {step!r}")
    if is_integer(seeds):
        seeds = [derived_seed(seeds, step, index) for index in range(count)]
    if seeds is not None and (not isinstance(seeds, Sequence) or len(seeds) != count):
        raise InvalidRequest(
            f"rollout: seeds must be one integer, or one for each of the {count} prompts; got "
            f"{seeds!r}"
        )
    given = [None] * count if seeds is None else seeds
    return [replace(sampling, n=num_samples, seed=seed, logprobs=0) for seed in given]


def derived_seed(seed: int, step: int, index: int) -> int:
    """The seed of a prompt, by its number in a step of training."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def by_prompt(
    outputs: Sequence[GenerationOutput], num_samples: int, why_not: str | None
) -> list[list[Rollout]]:
    """The rollouts of each prompt.  Raises: the error of a request that failed."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    starts = range(0, len(outputs), num_samples)
    return [
        [_rollout_of(outputs[first + k], k, why_not) for k in range(num_samples)]
        for first in starts
    ]


def _rollout_of(output: GenerationOutput, sample: int, why_not: str | None) -> Rollout:
    noted = output.logprobs or []
    log_probs = tuple(one.logprob for one in noted)
    return Rollout(output=output, log_probs=log_probs, sample=sample, why_not_exact=why_not)


def why_not_exact(program: SpecProgram | None) -> str | None:
    """The reason why a token's log-probability may depend on the rows that are computed with it;
    None: on the CPU, in products with matrices and attention, it does not.
    """
    if program is None:
        return "the engine runs no compiled program"
    if not traits_of(program.config.device).is_cpu:
        return f"on {traits_of(program.config.device).kind} sums depend on the number of rows"
    if not _build.load_kernels():
        return "the C++ operators, whose rows do not depend on each other, are not loaded"
    head = head_of(program.target.graph_module.graph)
    results: Any = program.target.graph_module.graph.output_node().args[0]
    if head is None or results[0] is not head.node:
        return "logits are changed after the product with the head, which steps may vectorise"
    if is_quantized(program.target.weights.get(str(head.weight.meta.get("role")))):
        return "the head is quantized; leave it out with compilespec.Quantize(..., skip='lm_head')"
    if program.target.num_recurrent_markers:
        return "recurrent layers sum a prompt and a step in other orders"
    if any(w.dim() == 3 and w.is_floating_point() for w in program.target.weights.values()):
        return "products of experts sum a prompt and a step in other orders"
    return None
