"""How well tokens fit the target's distribution, and drafters that are near it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from compilespec.runtime.engine import Engine
from tests.support.knowing import KnowingDrafter, Method
from tests.support.markov import KINDS, LENGTH, PROMPT, SAMPLES, VOCAB, K, params_of
from tests.support.models import PlainModel
from tests.support.sampling import STOPS, chi_square_p, transformers_scores

FALSE_ALARM = 1e-5
CERTAIN = 1e-12  # what a wrong rule falls below
COUNT = 20_000


def fit(ids_N: Tensor, probability: Tensor) -> float:
    """Chance of a fit as bad as this or worse; cells of fewer than 10 expected are one."""
    counts = torch.bincount(ids_N.long(), minlength=probability.numel()).double()
    expected = probability.flatten().double() * len(ids_N)
    assert int(counts[expected == 0].sum()) == 0
    is_rare = expected < 10
    cells = [torch.cat([part[~is_rare], part[is_rare].sum(0, keepdim=True)])
             for part in (counts, expected / expected.sum())]  # fmt: skip
    return chi_square_p(*cells)


def chain(vocab: int, sharpness: float, seed: int) -> Tensor:
    """What follows each token: [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(vocab, vocab, generator=generator)).softmax(-1).double()


def worst_fit(tokens: Tensor, target_VV: Tensor) -> float:
    """Over every position: the token there together with the one before; and whole sequences."""
    vocab, whole = len(target_VV), target_VV[0]
    fits, marginal = [fit(tokens[:, 0], whole)], target_VV[0]
    for step in range(1, tokens.shape[1]):
        pairs = marginal.unsqueeze(1) * target_VV
        fits.append(fit(tokens[:, step - 1] * vocab + tokens[:, step], pairs))
        marginal = pairs.sum(0)
        whole = (
            whole.unsqueeze(-1) * target_VV[torch.arange(whole.numel()).view(whole.shape) % vocab]
        )
    places = vocab ** torch.arange(tokens.shape[1]).flip(0)
    return min(*fits, fit((tokens * places).sum(1), whole))


def noisy(model: PlainModel) -> PlainModel:
    """The target's table with errors."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.add_(torch.randn_like(other.head.weight) * 0.2)
    return other


def noisy_drafter(model: PlainModel, chain_kind: str = "recycled", *, half: bool) -> Method:
    """With `half`, over every other id."""
    other = noisy(model)
    ids = torch.arange(0, VOCAB, 2) if half else None
    return Method(KnowingDrafter(other, ids, windowed=chain_kind != "recycled"), chain_kind)


def check_distribution(
    engine: Engine, model: PlainModel, kinds: Any = KINDS, num_drafts: int = K
) -> dict[str, float]:
    """Tokens at every position, with the one before; returns acceptance lengths."""
    lengths = {}
    for kind in kinds:
        fits, steps = generated_fits(engine, model, kind)
        assert min(fits) > FALSE_ALARM, (kind, fits)
        own = params_of(kind).num_draft_tokens
        most = 1 + (num_drafts if own is None else own)
        assert min(2, most) <= max(steps) <= most
        lengths[kind] = sum(steps) / len(steps)
    return lengths


def generated_fits(engine: Engine, model: PlainModel, kind: str) -> tuple[list[float], list[int]]:
    """The fit at every position, and the tokens of every step."""
    with torch.no_grad():
        logits_VV = model(torch.arange(VOCAB).unsqueeze(1))[:, 0]
    params = params_of(kind, n=SAMPLES)
    outputs = engine.generate(PROMPT, params)
    tokens = torch.tensor([output.token_ids for output in outputs])
    target = torch.stack(
        [transformers_scores(row, [], 0, params, STOPS).softmax(0) for row in logits_VV]
    )
    marginal = torch.zeros(VOCAB).double()
    marginal[PROMPT[-1]] = 1
    before, fits = torch.full((len(tokens),), PROMPT[-1]), []
    for step in range(LENGTH):
        pairs = marginal.unsqueeze(1) * target
        fits.append(fit(before * VOCAB + tokens[:, step], pairs))
        marginal, before = pairs.sum(0), tokens[:, step]
    return fits, [count for output in outputs for count in output.emitted_per_step]
