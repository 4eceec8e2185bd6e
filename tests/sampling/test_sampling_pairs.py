"""Coupled sampling over a covering array: methods and families, temperatures, parameters, batches.

Sampled tokens equal those of plain decoding with the same seed: float64 on the interpreted graphs,
tokens equal.  Each engine (method, family) serves every parameter at every temperature, in batches
of changing company, so that all pairs of factors occur; the default run has one of the engines and
a third of the requests, in which every parameter and every temperature occurs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.demo import demo_directory
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.drafters import METHODS
from tests.support.models import VOCAB, assert_nothing_held, tiny_target
from tests.support.sampling import REQUEST_PARAMETERS

FAMILIES = ("llama", "gemma2", "qwen3_moe")  # plain; windows, soft caps and tied; experts
TEMPERATURES = (0.3, 1.0, 1.5)
MAX_SEQ_LEN, COUNT = 64, 18
DRAFT_LENGTHS = {"llama": 3, "gemma2": 2, "qwen3_moe": 5, "demo": 3}
DEMO_METHODS = ("eagle3", "mtp", "draft_model", "ngram")  # their drafters are in the checkpoint
DEFAULT = {("draft_model", "gemma2")}
BATCHES = (1, 4, 2, 3)  # unfinished requests, step by step; then as many as the last


def rows(share: int = 1) -> list[tuple[str, float, int]]:
    """(parameter, temperature, number): all of them, or every `share`-th; greedy ones between."""
    chosen = []
    for number, (t, name) in enumerate(itertools.product(TEMPERATURES, REQUEST_PARAMETERS)):
        if (number + number // len(REQUEST_PARAMETERS)) % share == 0:
            chosen.append((name, t, number))
    return [*chosen, ("temperature", 0.0, 97), ("all", 0.0, 98)]


def params_of(name: str, temperature: float, number: int, vocab: int) -> SamplingParams:
    ends = name in ("min_new_tokens", "all")
    fields = {key: _inside(value, vocab) for key, value in REQUEST_PARAMETERS[name].items()}
    return SamplingParams(
        max_new_tokens=COUNT, temperature=temperature, seed=1000 + number, ignore_eos=not ends,
        **fields,
    )  # fmt: skip


def _inside(value: Any, vocab: int) -> Any:
    return tuple(i for i in value if i < vocab) if isinstance(value, tuple) else value


def prompt_of(number: int, vocab: int) -> list[int]:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(3, vocab, (1 + number % 11,), generator=draw).tolist()


def run(
    engine: compilespec.Engine, asks: list[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """Serve the requests in batches of changing size."""
    waiting, limits, limit = list(asks), iter(BATCHES * 6), 1
    requests = []
    while waiting or engine.has_work:
        limit = next(limits, limit)
        live = sum(not request.finished for request in requests)
        for _ in range(min(limit - live, len(waiting))):
            prompt, params = waiting.pop(0)
            requests.append(engine.submit(prompt, params))
        engine.step()
    assert_nothing_held(engine)
    return [request.output_token_ids for request in requests]


@functools.cache
def target(family: str) -> tuple[Any, Any]:
    """The model, or where it is, and what drafters may know of it."""
    if family == "demo":
        return str(demo_directory()), None
    model = tiny_target(family, num_layers=2)
    return model, describe_target(trace_target(model), load_target(model))


@functools.cache
def plain_tokens(family: str, share: int) -> tuple[list[Any], list[list[int]]]:
    """The requests, and what plain decoding gives each of them, alone."""
    vocab = 2048 if family == "demo" else VOCAB
    asks = [(prompt_of(number, vocab), params_of(name, t, number, vocab))
            for name, t, number in rows(share)]  # fmt: skip
    with compiled("none", family) as engine:
        tokens = [engine.generate([prompt], params)[0].token_ids for prompt, params in asks]
    return asks, tokens


def compiled(method: str, family: str) -> compilespec.Engine:
    model, info = target(family)
    options: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4}
    if family == "demo":
        options["dtype"] = "float64"
    if method != "none":
        options["num_draft_tokens"] = DRAFT_LENGTHS[family]
        if family != "demo":
            options |= METHODS[method](model, info, options["num_draft_tokens"])
    return compilespec.compile(model, method, **options)


def engines() -> Iterator[Any]:
    for method, family in (
        *itertools.product(METHODS, FAMILIES),
        *((method, "demo") for method in DEMO_METHODS),
    ):
        chosen = (method, family) in DEFAULT
        if chosen:
            yield pytest.param(method, family, 3, id=f"{method}-{family}-third")
        yield pytest.param(method, family, 1, id=f"{method}-{family}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("method", "family", "share"), list(engines()))
def test_coupled_tokens_are_those_of_plain_decoding(method, family, share):
    asks, wanted = plain_tokens(family, share)
    with compiled(method, family) as engine:
        got = run(engine, asks)
        stats = engine.stats()
    for (_, params), tokens, expected in zip(asks, got, wanted, strict=True):
        assert tokens == expected, params
    assert stats.num_recompiles == 0
    if method == "draft_model" or family == "demo":
        assert stats.acceptance_length > (1.05 if method == "ngram" else 1.1)  # drafts do matter


def test_the_array_covers_every_pair():
    """Of method, family, temperature and parameter; and the default run every single one."""
    whole = [one.values for one in engines() if one.values[2] == 1]
    pairs = {(method, family) for method, family, _ in whole}
    assert pairs >= set(itertools.product(METHODS, FAMILIES))
    assert {method for method, family in pairs if family == "demo"} == set(DEMO_METHODS)
    served = {(name, t) for name, t, _ in rows()}
    assert served >= set(itertools.product(REQUEST_PARAMETERS, TEMPERATURES))
    part = rows(3)
    assert {name for name, *_ in part} == set(REQUEST_PARAMETERS)
    assert {t for _, t, _ in part} == {0.0, *TEMPERATURES}


def test_requests_differ():
    """Else the equalities above would say little."""
    _, tokens = plain_tokens("gemma2", 3)
    assert len({tuple(one) for one in tokens}) == len(tokens)
