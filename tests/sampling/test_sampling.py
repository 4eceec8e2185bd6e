"""Sampled decoding: coupled drafts change no token, for any request and any batch.

Float64 on the eager backend: one row and S rows differ by 1e-15, far less than any two scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidRequest
from compilespec.methods.eagle3 import random_head
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.runtime.engine import Engine
from tests.support.models import VOCAB, DialDrafter, ScriptedDrafter, target_info, tiny_target
from tests.support.sampling import REQUEST_PARAMETERS, transformers_scores

MAX_SEQ_LEN, COUNT = 64, 24
TEMPERATURES = (0.3, 1.0, 1.5)
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [11], [90, 3, 90, 3, 90])


def params_of(name: str, temperature: float, seed: int = 7) -> SamplingParams:
    ignore = name not in ("min_new_tokens", "all")
    return SamplingParams(
        max_new_tokens=COUNT, temperature=temperature, seed=seed, ignore_eos=ignore,
        **REQUEST_PARAMETERS[name],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Site:
    model: nn.Module
    plain: Engine
    dial: DialDrafter
    coupled: dict[int, Engine]  # by K, all drafting by the dial

    def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Plain decoding of one request alone."""
        (output,) = self.plain.generate([prompt], params)
        return output.token_ids


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    model = tiny_target("llama", num_layers=2)
    dial = DialDrafter(
        random_head(target_info(model, MAX_SEQ_LEN)), max_seq_len=MAX_SEQ_LEN, dtype=torch.float64
    )
    sizes: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                             "max_prefill_tokens": 16}  # fmt: skip
    plain = compilespec.compile(model, **sizes)
    coupled = {
        count: compilespec.compile(
            model, spec="eagle3", draft=dial, num_draft_tokens=count, buckets=buckets, **sizes
        )
        for count, buckets in ((1, [1, 2, 4]), (4, None))
    }
    yield Site(model=model, plain=plain, dial=dial, coupled=coupled)
    for engine in (plain, *coupled.values()):
        engine.close()


# --- what plain decoding draws ---


@pytest.mark.parametrize("name", REQUEST_PARAMETERS)
def test_plain_decoding_draws_what_transformers_scores_say(site, name):
    """Token by token: the whole model anew, transformers' classes, the noise of the reference."""
    prompt, params = PROMPTS[1], params_of(name, 0.9, seed=2**40 + 3)
    tokens = list(prompt)
    stops = [*params.stop_token_ids, *([] if params.ignore_eos else [2])]
    while len(tokens) < len(prompt) + COUNT:
        with torch.no_grad():
            logits_V = site.model(torch.tensor([tokens])).logits[0, -1]
        scores = transformers_scores(logits_V, tokens, len(prompt), params, stops)
        noise = gumbel(
            noise_bits(torch.arange(VOCAB), seed_low=3, seed_high=2**8, sample=0,
                       position=len(tokens), stream=0)
        )  # fmt: skip
        tokens.append(int((scores + noise).argmax()))
        if tokens[-1] in stops:
            break
    assert site.tokens(prompt, params) == tokens[len(prompt) :]


def test_parameters_change_what_is_drawn(site):
    """Else the equalities below would say little."""
    given = {
        tuple(token for prompt in PROMPTS for token in site.tokens(prompt, params_of(name, 1.5)))
        for name in REQUEST_PARAMETERS
    }
    assert len(given) == len(REQUEST_PARAMETERS)
    by_temperature = {tuple(site.tokens(PROMPTS[0], params_of("temperature", t)))
                      for t in (0.0, *TEMPERATURES)}  # fmt: skip
    by_seed = {tuple(site.tokens(PROMPTS[0], params_of("temperature", 1.0, seed)))
               for seed in (0, 1, 2**32, 2**63 - 1)}  # fmt: skip
    assert (len(by_temperature), len(by_seed)) == (4, 4)


# --- coupled drafts ---


MIXED = [(name, TEMPERATURES[index % 3]) for index, name in enumerate(REQUEST_PARAMETERS)]
MIXED += [(name, t) for name in ("temperature", "all") for t in TEMPERATURES]


@pytest.mark.parametrize(("name", "temperature"), sorted(set(MIXED)))
def test_coupled_equals_plain(site, name, temperature):
    """T22: for every K, with drafts at random, right ones, and ones that err here and there."""
    params = [params_of(name, temperature, seed) for seed in (7, 8)]
    params += [params_of(name, 0.0), params_of("temperature", temperature)]  # mixed with others
    wanted = [site.tokens(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    site.dial.know([*prompt, *tokens] for prompt, tokens in zip(PROMPTS, wanted, strict=True))
    scripts: tuple[Callable[[int], bool] | None, ...] = (
        None,
        lambda p: False,
        lambda p: p % 3 == 0,
    )
    for (num_drafts, engine), is_wrong in itertools.product(site.coupled.items(), scripts):
        if is_wrong is None:
            site.dial.draft_at_random()
        else:
            site.dial.draft_from_script(is_wrong)
        outputs = engine.generate(list(PROMPTS), params)
        assert [output.token_ids for output in outputs] == wanted
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            if is_wrong is not None:
                assert output.emitted_per_step == site.dial.expected_steps(
                    len(prompt), len(output.token_ids), num_drafts
                )


@pytest.mark.parametrize("num_drafts", [1, 4], ids="K{}".format)
def test_tokens_do_not_depend_on_the_company(site, num_drafts):
    """Alone, beside others, joining late, in a row that another request used."""
    engine, params = site.coupled[num_drafts], params_of("all", 1.0)
    site.dial.draft_at_random()
    wanted = site.tokens(PROMPTS[1], params)
    (alone,) = engine.generate([PROMPTS[1]], params)
    assert alone.token_ids == wanted
    for late in range(3):
        others = [engine.submit(PROMPTS[i], params_of(name, 1.5, seed=i))
                  for i, name in ((0, "logit_bias"), (2, "frequency_penalty"))]  # fmt: skip
        for _ in range(late):
            engine.step()
        request = engine.submit(PROMPTS[1], params)
        while engine.has_work:
            engine.step()
        assert request.output_token_ids == wanted
        assert [r.output_token_ids for r in others] == [
            site.tokens(PROMPTS[0], params_of("logit_bias", 1.5, seed=0)),
            site.tokens(PROMPTS[2], params_of("frequency_penalty", 1.5, seed=2)),
        ]
    greedy = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)  # nothing is left in the rows
    outputs = engine.generate(list(PROMPTS), greedy)
    assert [o.token_ids for o in outputs] == [site.tokens(p, greedy) for p in PROMPTS]


@pytest.mark.parametrize("error", [0, 1])
def test_a_scripted_drafter(site, error):
    """Drafts with no cache: all of them drawn tokens, or none."""
    params = [params_of("all", 1.0, seed) for seed in range(4)]
    wanted = [site.tokens(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    drafter = ScriptedDrafter(
        [[*p, *tokens] for p, tokens in zip(PROMPTS, wanted, strict=True)],
        max_seq_len=MAX_SEQ_LEN, aux_layers=(0, 1, 2), error=error,
    )  # fmt: skip
    with compilespec.compile(
        site.model, spec="eagle3", draft=drafter, num_draft_tokens=3, backend="eager",
        max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        outputs = engine.generate(list(PROMPTS), params)
    assert [output.token_ids for output in outputs] == wanted
    lengths = [output.acceptance_length for output in outputs if len(output.token_ids) > 8]
    assert all(length == 1 for length in lengths) if error else max(lengths) > 3


def test_up_to_the_maximum_length(site):
    """The last rows of a window would draw past it."""
    params = [SamplingParams(max_new_tokens=99, ignore_eos=True, temperature=1.0, seed=seed,
                             repetition_penalty=1.2) for seed in range(4)]  # fmt: skip
    wanted = [site.tokens(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    assert [len(tokens) for tokens in wanted] == [MAX_SEQ_LEN - len(p) for p in PROMPTS]
    site.dial.know([*prompt, *tokens] for prompt, tokens in zip(PROMPTS, wanted, strict=True))
    site.dial.draft_from_script(lambda position: False)
    for engine in site.coupled.values():
        outputs = engine.generate(list(PROMPTS), params)
        assert [output.token_ids for output in outputs] == wanted


# --- seeds, samples, limits ---


def test_a_seed_is_picked_and_returned(site):
    params = SamplingParams(max_new_tokens=COUNT, temperature=1.0, ignore_eos=True)
    first, second = site.plain.generate([PROMPTS[0]] * 2, params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = SamplingParams(max_new_tokens=COUNT, temperature=1.0, ignore_eos=True, seed=first.seed)
    assert site.tokens(PROMPTS[0], again) == first.token_ids


def test_n_samples_of_a_prompt(site):
    """An output each, of one seed, in order; sample i is the same for any n and any batch."""
    site.dial.draft_at_random()
    params = SamplingParams(max_new_tokens=9, temperature=1.2, ignore_eos=True, seed=5, n=6)
    few = SamplingParams(max_new_tokens=9, temperature=1.2, ignore_eos=True, seed=5, n=2)
    outputs = site.coupled[4].generate(list(PROMPTS[:2]), params)
    assert [o.prompt_token_ids for o in outputs] == [PROMPTS[0]] * 6 + [PROMPTS[1]] * 6
    assert {o.seed for o in outputs} == {5}
    assert len({tuple(o.token_ids) for o in outputs[:6]}) == 6
    tokens = [o.token_ids for o in outputs]
    assert [o.token_ids for o in site.plain.generate(PROMPTS[1], few)] == tokens[6:8]
    deltas = list(site.plain.stream([PROMPTS[1]], few))
    assert {d.index: d.output.token_ids for d in deltas if d.output} == {0: tokens[6], 1: tokens[7]}
    with pytest.raises(InvalidRequest, match="submit takes one sample, got n=2"):
        site.plain.submit(PROMPTS[0], few)


def test_min_new_tokens_holds_stops_back(site):
    """Also for greedy requests; without it they end early."""
    for temperature in (0.0, 1.0):
        stops = tuple(range(0, VOCAB, 2))
        held = SamplingParams(max_new_tokens=COUNT, min_new_tokens=12, stop_token_ids=stops,
                              temperature=temperature, seed=1)  # fmt: skip
        free = SamplingParams(max_new_tokens=COUNT, stop_token_ids=stops, seed=1,
                              temperature=temperature)  # fmt: skip
        for prompt in PROMPTS:
            tokens = site.tokens(prompt, held)
            assert len(tokens) > 12
            assert not set(tokens[:12]) & {*stops, 2}
            assert len(site.tokens(prompt, free)) < 12


def test_logprobs_equal_plain_decoding_and_the_model(site):
    """T23: of the logits as they are, within 1e-5 (the norms of Llama are float32 in any case)."""
    params = [
        SamplingParams(max_new_tokens=COUNT, ignore_eos=True, logprobs=5),
        SamplingParams(max_new_tokens=COUNT, ignore_eos=True, logprobs=0, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=2),
        SamplingParams(max_new_tokens=COUNT, logprobs=20, temperature=1.5, seed=3, top_k=9,
                       repetition_penalty=1.5, stop_token_ids=tuple(range(0, VOCAB, 9))),
    ]  # fmt: skip
    plain = site.plain.generate(list(PROMPTS), params)
    site.dial.know([*p, *o.token_ids] for p, o in zip(PROMPTS, plain, strict=True))
    for prompt, output, one in zip(PROMPTS, plain, params, strict=True):
        if one.logprobs is None:
            assert output.logprobs is None
            continue
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        with torch.no_grad():
            logits = site.model(torch.tensor([[*prompt, *output.token_ids]])).logits[0]
        wanted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        for entry, row in zip(output.logprobs, wanted, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
            best = row.sort(descending=True)
            assert list(entry.top) == best.indices[: one.logprobs].tolist()
            assert list(entry.top.values()) == pytest.approx(
                best.values[: one.logprobs].tolist(), abs=1e-5
            )
    for script in (None, lambda position: position % 4 == 0):
        site.dial.draft_from_script(script) if script else site.dial.draft_at_random()
        for engine in site.coupled.values():
            outputs = engine.generate(list(PROMPTS), params)
            assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
            for output, alone in zip(outputs, plain, strict=True):
                entries = zip(output.logprobs or (), alone.logprobs or (), strict=True)
                for mine, theirs in entries:
                    assert (mine.token_id, list(mine.top)) == (theirs.token_id, list(theirs.top))
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                    assert list(mine.top.values()) == pytest.approx(
                        list(theirs.top.values()), abs=1e-5
                    )


REFUSED = {
    "many_logprobs": ({"logprobs": 21}, "logprobs: expected at most 20, got 21"),
    "bias_id": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: expected ids from 0 to 96, got 97"),
    "bad_id": ({"bad_token_ids": (3, 200)}, "bad_token_ids: expected ids from 0 to 96, got 200"),
    "allowed_id": ({"allowed_token_ids": (97,)}, "allowed_token_ids: expected ids from 0 to 96"),
    "nothing_left": ({"allowed_token_ids": (1, 4), "bad_token_ids": (4, 1)}, "no token is left"),
    "all_bad": ({"bad_token_ids": tuple(range(VOCAB))}, "no token is left"),
    "all_held": ({"allowed_token_ids": (2,), "min_new_tokens": 1}, "no token is left"),
    "many_stops": ({"stop_token_ids": tuple(range(3, 70)), "min_new_tokens": 1},
                   "at most 55 ids to hold back, EOS included, got 68"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_cannot_be_served(site, name):
    fields, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        site.plain.submit(PROMPTS[0], SamplingParams(**fields))
    assert not site.plain.has_work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "token ids of at least 0"),
        ({"logit_bias": {1: float("-inf")}}, "ban ids with bad_token_ids"),
        ({"logit_bias": {1: "much"}}, "finite numbers"),
        ({"temperature": -0.1}, "at least 0"),
        ({"top_p": 0.0}, "above 0"),
        ({"n": 2**31}, "below"),
    ],
)
def test_impossible_parameters(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)
