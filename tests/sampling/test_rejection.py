"""Rules that judge by probabilities keep the target's distribution (T21), position by position.

Every chi-square is seeded and cannot flake.  Drawn anew, a single one would fail once in 100,000
runs (FALSE_ALARM), this file once in about 1,000.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.methods import dflash, dspark, peagle
from compilespec.ops.sample import layout
from compilespec.ops.sample.probabilities import (
    draw_weighted,
    draw_weighted_reference,
    filtered_probs,
    filtered_probs_dense,
    filtered_probs_reference,
    uniform,
    uniform_reference,
)
from compilespec.passes.splice.acceptance.registry import FUNCTIONS
from compilespec.passes.splice.acceptance.rejection import ratio_test
from compilespec.runtime.engine import Engine
from compilespec.tracing.target_info import TargetInfo
from tests.support.fits import (
    CERTAIN,
    COUNT,
    FALSE_ALARM,
    chain,
    check_distribution,
    fit,
    noisy,
    noisy_drafter,
    worst_fit,
)
from tests.support.knowing import KnowingDrafter, Method
from tests.support.markov import KINDS, LENGTH, PROMPT, SAMPLES, VOCAB, K, markov_target, params_of
from tests.support.models import PlainModel, greedy_reference, target_info
from tests.support.sampling import (
    PARAMETERS,
    all_params,
    make_state,
    transformers_scores,
    window,
)

# --- one window, many rows ---


def judged_windows(
    rule: Callable[..., tuple[Tensor, Tensor]],
    target_VV: Tensor,
    draft_VV: Tensor,
    num_drafts: int,
    *,
    judged: int | None = None,
    draft_stream: int = layout.STREAM_DRAFT,
    accept_stream: int = layout.STREAM_ACCEPT,
) -> tuple[Tensor, Tensor]:
    """Tokens [COUNT, K+1] after token 0, and how many drafts were accepted.  What stands after the
    window's last token is drawn from the target, so that whole sequences can be compared.
    """
    rows, start = torch.arange(COUNT), 5
    words = torch.zeros(COUNT, layout.NUM_INTS, dtype=torch.int32)
    words[:, layout.SEED_LOW] = rows.int()

    def place(step: Tensor | int, stream: Tensor | int) -> tuple[Tensor, Tensor]:
        whole = torch.zeros(COUNT, dtype=torch.int32)
        return whole + start + step, (whole + stream + layout.STEP * step).int()

    token, drafts, draft_probs, probs, numbers = torch.zeros(COUNT).long(), [], [], [], []
    probs.append(target_VV[token])
    for step in range(1, num_drafts + 1):
        draft_probs.append(draft_VV[token])
        token = draw_weighted(draft_probs[-1], rows, *place(step, draft_stream), words).long()
        drafts.append(token.int())
        probs.append(target_VV[token])
        position, stream = place(step, accept_stream)
        numbers.append(uniform(rows, position[:, None], stream[:, None], words)[:, 0])
    draft_BK = torch.stack(drafts, 1)
    num_B = torch.full((COUNT,), num_drafts if judged is None else judged, dtype=torch.int32)
    count_B, weights_BV = rule(
        torch.stack(probs, 1), torch.stack(draft_probs, 1), draft_BK, num_B, torch.stack(numbers, 1)
    )
    assert bool((count_B <= num_B).all())
    last_stream = torch.where(count_B < num_B, layout.STREAM_RECOVER, layout.STREAM_BONUS)
    last = draw_weighted(weights_BV, rows, *place(count_B + 1, last_stream), words)
    tokens = torch.zeros(COUNT, num_drafts + 1, dtype=torch.int64)
    for step in range(num_drafts + 1):
        before = tokens[:, step - 1] if step else torch.zeros(COUNT).long()
        fresh = target_VV[before].multinomial(1).squeeze(1)
        tokens[:, step] = torch.where(count_B == step, last.long(), fresh)
        if step < num_drafts:
            tokens[:, step] = torch.where(count_B > step, draft_BK[:, step].long(), tokens[:, step])
    return tokens, count_B


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("vocab", "num_drafts", "sharpness"), [(7, 3, 0.7), (11, 1, 2.0), (17, 2, 1.0), (8, 2, 0.0)]
)
def test_the_target_distribution_is_kept_at_every_position(name, vocab, num_drafts, sharpness):
    """Near drafters and far ones; the last case drafts evenly for a target that is sharp."""
    target = chain(vocab, sharpness or 2.0, 1)
    tokens, count = judged_windows(FUNCTIONS[name], target, chain(vocab, sharpness, 2), num_drafts)
    assert worst_fit(tokens, target) > FALSE_ALARM
    assert {*range(num_drafts + 1)} == set(count.tolist())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("judged", [0, 1, 2])
def test_fewer_drafts_than_k_are_judged(name, judged):
    """Those beyond are not looked at: the token after the last judged one is the target's own."""
    target = chain(9, 1.0, 1)
    tokens, count = judged_windows(FUNCTIONS[name], target, chain(9, 1.0, 2), 3, judged=judged)
    assert int(count.max()) == judged
    assert worst_fit(tokens, target) > FALSE_ALARM


@pytest.mark.parametrize("name", FUNCTIONS)
def test_certain_drafts(name):
    """A drafter without probabilities: 1 at its draft."""
    target = chain(7, 1.0, 1)
    drafts = torch.eye(7).double()[target.argsort(-1)[:, -2]]
    tokens, count = judged_windows(FUNCTIONS[name], target, drafts, 2)
    assert worst_fit(tokens, target) > FALSE_ALARM
    assert 0.01 < float((count == 2).double().mean()) < 0.5


def test_a_draft_without_probability_is_refused_whatever_follows_it() -> None:
    """Rows after a forbidden draft may hold anything: here they are NaN."""
    probs_BSV = torch.full((1, 3, 3), torch.nan)
    probs_BSV[0, 0] = torch.tensor([0.5, 0.5, 0.0])
    draft_probs_BKV, draft_BK = torch.full((1, 2, 3), 1 / 3), torch.tensor([[2, 0]])
    for rule in FUNCTIONS.values():
        kept_B, _ = rule(
            probs_BSV, draft_probs_BKV, draft_BK, torch.tensor([2]), torch.full((1, 2), 0.5)
        )
        assert kept_B.tolist() == [0]


@pytest.mark.parametrize("shared", ["recover", "accept"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_noise_shared_with_the_draft_fails_the_same_test(name, shared):
    """H-15: streams must be disjoint."""
    streams = {"draft_stream": layout.STREAM_RECOVER} if shared == "recover" else {
        "accept_stream": layout.STREAM_DRAFT
    }  # fmt: skip
    target = chain(7, 1.0, 1)
    tokens, _ = judged_windows(FUNCTIONS[name], target, chain(7, 1.0, 2), 2, **streams)
    assert worst_fit(tokens, target) < CERTAIN


def test_the_bias_of_shared_noise_is_the_known_one():
    """H-15 gives it: [.100, .637, .263] instead of [.1, .6, .3]; five standard errors."""
    target = torch.tensor([0.1, 0.6, 0.3]).double().expand(3, 3)
    draft = torch.tensor([0.6, 0.2, 0.2]).double().expand(3, 3)
    for stream, known in (
        (layout.STREAM_RECOVER, (0.100, 0.637, 0.263)),
        (layout.STREAM_DRAFT, (0.1, 0.6, 0.3)),
    ):
        tokens, _ = judged_windows(ratio_test, target, draft, 1, draft_stream=stream)
        share = torch.bincount(tokens[:, 0], minlength=3) / COUNT
        assert share.tolist() == pytest.approx(known, abs=5 * (0.25 / COUNT) ** 0.5)


def test_an_accepting_rule_fails_the_same_test():
    def everything(probs_BSV, draft_probs_BKV, draft_BK, num_drafts_B, uniform_BK):
        return num_drafts_B, probs_BSV[:, -1]

    target = chain(7, 1.0, 1)
    tokens, _ = judged_windows(everything, target, chain(7, 1.0, 2), 2)
    assert worst_fit(tokens, target) < CERTAIN


def test_how_many_drafts_are_accepted():
    """Ratio test: the overlap of the two, within five standard errors; block: more."""
    target, draft = chain(7, 1.0, 1), chain(7, 1.0, 2)
    overlap = float(torch.minimum(target[0], draft[0]).sum())
    _, count = judged_windows(ratio_test, target, draft, 1)
    assert float(count.double().mean()) == pytest.approx(overlap, abs=5 * 0.5 / COUNT**0.5)
    _, single = judged_windows(FUNCTIONS["block"], target, draft, 1)
    assert torch.equal(single, count), "with one draft the two are one rule"
    means = {
        name: float(judged_windows(rule, target, draft, 4)[1].double().mean())
        for name, rule in FUNCTIONS.items()
    }
    assert means["block"] > means["rejection"] * 1.02


# --- operators ---


@pytest.mark.parametrize("way", [filtered_probs_reference, filtered_probs_dense, filtered_probs])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids="T{}".format)
@pytest.mark.parametrize("name", PARAMETERS)
def test_filtered_probabilities_are_those_of_transformers_scores(name, temperature, way):
    vocab, batch, steps, num_prompt, start = 13, 3, 3, 9, 11
    params = SamplingParams(temperature=temperature, max_new_tokens=9, **PARAMETERS[name])
    state = make_state([params] * batch, vocab, num_prompt=num_prompt)
    logits = 3 * torch.randn(batch, steps, vocab, dtype=torch.float64)
    ids, drawn = window(batch, steps, vocab, start)
    before = torch.randint(0, vocab, (batch, start - num_prompt), dtype=torch.int32)
    arguments = state.arguments()
    arguments[3][:batch, num_prompt:start] = before
    probs = way(logits, logits.argmax(-1).int(), ids, torch.arange(batch), drawn, *arguments)
    for b, s in itertools.product(range(batch), range(steps)):
        context = [*state.prompts[b], *before[b].tolist(), *ids[b, : s + 1].tolist()]
        scores = transformers_scores(logits[b, s], context, num_prompt, params)
        wanted = scores.softmax(0)
        if not temperature:
            wanted = torch.zeros_like(scores)
            wanted[scores.argmax()] = 1
        assert torch.allclose(probs[b, s], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [17, 97, 1031])
def test_kernels_equal_references(vocab, dtype):
    params = [p for t in (0.0, 0.3, 1.5) for p in all_params(t)]
    state, batch = make_state(params, vocab), len(params) + 1
    logits = (2 * torch.randn(3, batch, vocab + 3)).to(dtype).transpose(0, 1)[..., 1:-2]
    ids, drawn = window(batch, 3, vocab, 38)
    call = (logits, logits.argmax(-1).int(), ids, torch.randperm(batch), drawn)
    state.buffers["context_RL"][:, 9:] = 3
    state.buffers["sampling_RI"][1::4, layout.FLAGS] |= layout.GUIDE
    state.buffers["mask_RSW"] = torch.randint(-(2**31), 2**31, (batch, 3, -(-vocab // 32))).int()
    state.buffers["mask_RSW"][::2, 2] = 0  # behind a forbidden draft
    theirs = state.arguments()
    want = filtered_probs_reference(*call, *theirs)
    for way in (filtered_probs, filtered_probs_dense):
        mine = state.arguments()
        got = way(*call, *mine)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(got, want, atol=1e-6, rtol=0, equal_nan=True)
        assert torch.equal(mine[3], theirs[3])
    words, stream = state.buffers["sampling_RI"], torch.randint(0, 99, drawn.shape).int()
    keys = (torch.randperm(batch), drawn, stream, words)
    assert torch.equal(uniform(*keys), uniform_reference(*keys))
    weights = got[:, 0] - got[:, 1]  # negative ones, and often few above 0
    keys = (keys[0], drawn[:, 0], stream[:, 0], words)
    assert torch.equal(draw_weighted(weights, *keys), draw_weighted_reference(weights, *keys))


@pytest.mark.parametrize("way", [filtered_probs_reference, filtered_probs_dense, filtered_probs])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids="T{}".format)
def test_a_row_without_any_id_has_no_probability(way, temperature):
    """For any request; the rules can read it."""
    params = [SamplingParams(temperature=temperature, **fields)
              for fields in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1})]  # fmt: skip
    state, batch = make_state(params, 37), len(params)
    state.buffers["sampling_RI"][:, layout.FLAGS] |= layout.GUIDE
    state.buffers["mask_RSW"] = torch.full_like(state.buffers["mask_RSW"], -1)
    state.buffers["mask_RSW"][:, 1] = 0
    ids, drawn = window(batch, 3, 37, 20)
    logits = torch.randn(batch, 3, 37)
    probs = way(
        logits, logits.argmax(-1).int(), ids, torch.arange(batch), drawn, *state.arguments()
    )
    torch.testing.assert_close(probs.sum(-1), torch.tensor([[1.0, 0.0, 1.0]]).expand(batch, 3))
    for rule in FUNCTIONS.values():
        draft, uniform = ids[:, 1:], torch.full((batch, 2), 0.5)
        kept, weights = rule(probs, torch.full((batch, 2, 37), 1 / 37), draft, drawn[:, 0] * 0 + 2,
                             uniform)  # fmt: skip
        assert (kept < 2).all()
        assert weights.isfinite().all()


@pytest.mark.parametrize("way", [draw_weighted_reference, draw_weighted])
def test_draws_without_hope_give_some_id(way):
    weights = torch.tensor([[0.0] * 70, [-1.0] * 70, [float("nan")] * 70, [1e-45] * 70])
    rows, words = torch.arange(4), torch.zeros(4, layout.NUM_INTS, dtype=torch.int32)
    same = torch.ones(4, dtype=torch.int32)
    assert way(weights, rows, same, same, words).tolist() == [0] * 4


def test_uniform_numbers_are_even_and_inside():
    rows, count = torch.zeros(1).long(), 60_000
    words = torch.zeros(1, layout.NUM_INTS, dtype=torch.int32)
    position = torch.arange(count, dtype=torch.int32).unsqueeze(0)
    for stream in (layout.STREAM_ACCEPT, layout.STREAM_ACCEPT + layout.STEP):
        numbers = uniform(rows, position, torch.full_like(position, stream), words).squeeze(0)
        assert 0 < float(numbers.min()) < float(numbers.max()) < 1
        cells = (numbers * 64).long()
        assert fit(cells, torch.full((64,), 1 / 64)) > FALSE_ALARM
        assert fit(cells[1:] // 8 * 8 + cells[:-1] // 8, torch.full((64,), 1 / 64)) > FALSE_ALARM


# --- in the engine ---

# Drafters that draw all drafts from one pass; random, over some of the ids.
ONE_PASS: dict[str, Callable[[TargetInfo], Any]] = {
    "peagle": lambda info: peagle.random_head(info, aux_layers=(0, 1), draft_vocab_size=7),
    "dflash": lambda info: dflash.random_drafter(
        info, aux_layers=(0, 1), draft_vocab_size=7, block_size=K + 1
    ),
    "dspark": lambda info: dspark.random_drafter(
        info, aux_layers=(0, 1), draft_vocab_size=7, block_size=K, markov_type="rnn"
    ),
}


def compiled(model: nn.Module, spec: Any, rule: Any, **options: Any) -> Engine:
    return compilespec.compile(
        model, spec, acceptance=rule, num_draft_tokens=K, backend="eager", max_seq_len=16,
        max_batch_size=SAMPLES, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[tuple[PlainModel, Engine]]:
    """Rejection with a drafter of another, smaller vocabulary."""
    model = markov_target()
    with compiled(model, noisy_drafter(model, half=True), "rejection") as engine:
        yield model, engine


@pytest.mark.parametrize(
    "kinds", [("plain", "one_draft"), pytest.param(tuple(KINDS), marks=pytest.mark.slow)]
)
def test_generated_tokens_follow_the_target(lab, kinds):
    """T21: filters, bias, a request's own K; several steps, first drafts from prefill."""
    model, engine = lab
    assert engine.plan()["acceptance"] == "rejection"
    assert engine.plan()["lossless"] is True
    lengths = check_distribution(engine, model, kinds)
    assert 1 < lengths["one_draft"] < lengths["plain"]


def test_greedy_requests_are_strict_whoever_is_beside_them(lab):
    model, engine = lab
    prompts = [[3, 7, 5], [2], [9, 9]]
    params = [params_of("plain", temperature=0.0), params_of("plain"), params_of("bias")]
    for order in itertools.permutations(range(3)):
        outputs = engine.generate(prompts, [params[i] for i in order])
        for prompt, place, output in zip(prompts, order, outputs, strict=True):
            if place == 0:
                assert output.token_ids == greedy_reference(model, prompt, LENGTH)


def test_t22_tokens_depend_on_seed_and_prompt_alone(lab):
    """Alone, in company, late; another seed gives others."""
    _, engine = lab
    for kind in KINDS:
        (alone,) = engine.generate([PROMPT], params_of(kind))
        crowd = engine.generate([[1], PROMPT, [2, 2]], params_of(kind))
        assert crowd[1].token_ids == alone.token_ids
        assert crowd[1].emitted_per_step == alone.emitted_per_step
        others = [engine.submit([4], params_of("plain", seed=seed)) for seed in range(3)]
        engine.step()
        late = engine.submit(PROMPT, params_of(kind))
        while engine.has_work:
            engine.step()
        assert late.output_token_ids == alone.token_ids
        assert len({tuple(request.output_token_ids) for request in others}) == 3


def test_t23_logprobs_are_those_of_the_model(lab):
    """Of the tokens that were emitted, drafts or not; within 1e-5 of float64."""
    model, engine = lab
    outputs = engine.generate(
        [PROMPT] * 6, [params_of("plain", seed=s, logprobs=2) for s in range(6)]
    )
    assert max(count for output in outputs for count in output.emitted_per_step) > 1
    for output in outputs:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *output.token_ids]]))[0]
        wanted = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
        for entry, token, row in zip(output.logprobs, output.token_ids, wanted, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert list(entry.top) == row.topk(2).indices.tolist()


@pytest.mark.parametrize("rule", FUNCTIONS)
@pytest.mark.parametrize(
    "kind", ["recycled", "module_rows", "target_rows", "draft_model", "ngram", *ONE_PASS]
)
def test_every_kind_of_drafter_follows_the_target(kind, rule):
    model = markov_target()
    spec: Any = kind
    options: dict[str, Any] = {}
    if kind == "draft_model":
        options["draft"] = noisy(model)
    elif kind in ONE_PASS:
        options["draft"] = ONE_PASS[kind](target_info(model, max_seq_len=16))
    elif kind != "ngram":
        spec = noisy_drafter(model, kind, half=False)
    with compiled(model, spec, rule, **options) as engine:
        check_distribution(engine, model, ("plain", "filters", "one_draft"))


def test_plain_decoding_draws_from_the_target_as_well():
    model = markov_target()
    with compilespec.compile(
        model, acceptance="rejection", backend="eager", max_seq_len=16, max_batch_size=SAMPLES
    ) as engine:
        lengths = check_distribution(engine, model, ("plain", "filters"), num_drafts=0)
    assert set(lengths.values()) == {1}


@pytest.mark.parametrize("rule", FUNCTIONS)
@pytest.mark.parametrize("kind", ["recycled", "module_rows", "target_rows", "draft_model"])
def test_a_drafter_with_the_targets_probabilities_is_never_refused(kind, rule):
    """Each draft is judged by what it was drawn from, at its own place, over the target's ids."""
    model = markov_target()
    if kind == "draft_model":
        engine = compiled(model, kind, rule, draft=copy.deepcopy(model))
    else:
        ids = torch.randperm(VOCAB)
        engine = compiled(
            model, Method(KnowingDrafter(model, ids, windowed=kind != "recycled"), kind), rule
        )
    params = [params_of("plain", seed=s, temperature=t, max_new_tokens=12)
              for s, t in itertools.product(range(20), (0.0, 0.5, 1.0, 2.0))]  # fmt: skip
    with engine:
        for output in engine.generate([PROMPT] * len(params), params):
            *whole, _ = output.emitted_per_step
            assert whole == [K + 1] * len(whole)
