"""Guides (T25): what may come after each draft, on the host; tokens that drafts do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import GuideFailed, InvalidRequest
from compilespec.methods.eagle3 import random_head
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.runtime.engine import Engine
from compilespec.runtime.guides import Choice, JsonSchema, Regex, Vocabulary
from compilespec.runtime.guides.follower import GuideFollower
from tests.support.models import VOCAB, DialDrafter, assert_nothing_held, target_info, tiny_target

EOS, MAX_SEQ_LEN = 2, 64
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [11], [90, 3, 90, 3, 90])
OPTIONS = [[10, 11, 12, 13, 14], [10, 11, 20], [10, 11], [31, 96, 64, 63, 32, 33], [5, 5, 5, 5]]


def ids_of(words: Tensor) -> list[list[int]]:
    """The ids of a mask, row by row."""
    bits = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    return [row.nonzero().flatten().tolist() for row in bits.flatten(-2)]


def follower(options: list[list[int]] = OPTIONS, **about: Any) -> GuideFollower:
    vocabulary = Vocabulary(None, VOCAB)
    return GuideFollower(
        Choice(options).matcher(vocabulary), vocabulary.num_words, **{"end_ids": {EOS}, **about}
    )


# --- the follower ---


def test_masks_look_ahead_and_come_back():
    guide = follower()
    for _ in range(2):
        assert ids_of(guide.masks()) == [[5, 10, 31]]
        assert ids_of(guide.masks([10, 11, 12])) == [[5, 10, 31], [11], [EOS, 12, 20], [13]]
        assert ids_of(guide.masks([10, 12, 13])) == [[5, 10, 31], [11]]  # 12 may not come
        assert ids_of(guide.masks([31, 96, 64, 63])) == [[5, 10, 31], [96], [64], [63], [32]]
    assert guide.follow([10]) == (1, None)
    assert ids_of(guide.masks([11, 20, EOS, 7])) == [[11], [EOS, 12, 20], [EOS], []]
    assert guide.follow([11, EOS, 50, 51]) == (2, None)  # nothing counts after the end
    assert guide.is_complete


def test_a_token_that_may_not_come():
    guide = follower()
    count, error = guide.follow([10, 11, 13])
    assert count == 2
    assert isinstance(error, GuideFailed)
    assert "token 13 after 2 tokens" in str(error)
    assert guide.follow([EOS]) == (1, None)


def test_end_ids_come_only_at_the_end():
    """Also where there are several, and where the guide has them as ordinary tokens."""
    guide = follower([[EOS, 63, 31]], end_ids={EOS, 31})
    with pytest.raises(GuideFailed, match="leaves nothing to choose after 0 tokens"):
        guide.masks()
    guide = follower([[7], [7, 8]], end_ids={31, 95})
    assert ids_of(guide.masks([7, 95])) == [[7], [8, 31, 95], []]


def test_without_end_ids_the_last_token_completes():
    guide = follower(end_ids=())
    assert guide.follow([10, 11]) == (2, None)
    assert not guide.is_complete  # more may come
    assert guide.follow([20, 9, 9]) == (1, None)
    assert guide.is_complete


def test_a_boundary_inside_the_window():
    guide = follower(starts_after=77)
    free = list(range(-(-VOCAB // 32) * 32))
    masks = ids_of(guide.masks([4, 77, 10, 11, 9]))
    assert masks == [free, free, [5, 10, 31], [11], [EOS, 12, 20]]
    assert guide.follow([4, 77, 5]) == (3, None)
    assert ids_of(guide.masks([77])) == [[5]]  # the second time it is a token like any other


def test_drafts_that_the_guide_knows():
    """Where one id may come it is the draft, with or without a drafter's; else the drafter's stays
    if it may come.
    """
    guide = follower()
    for drafts, chosen in (
        ([31], [31, 96, 64, 63, 32]),
        ([31, 7, 7, 7, 7], [31, 96, 64, 63, 32]),
        ([10, 11, 12], [10, 11, 12, 13, 14]),
        ([10], [10, 11]),
        ([10, 9, 20], [10, 11, 20, EOS]),
        ([9], []),
        ([], []),
    ):
        found, masks = guide.steer(drafts, 5)
        assert found == chosen
        assert torch.equal(masks, guide.masks(chosen)[: len(chosen) + 1])
        assert len(masks) == len(chosen) + 1
    assert guide.steer([10, 11, 12], 1)[0] == [10]
    late = follower(starts_after=50)
    assert late.steer([7, 50, 9, 9], 3)[0] == [7, 50]
    assert follower(banned={96}).steer([31], 5)[0] == [31]
    with pytest.raises(GuideFailed, match="after 0 tokens"):
        follower([[EOS, 63, 31]], end_ids={EOS, 31}).steer([], 3)


def test_banned_and_held_ids():
    guide = follower(banned={11}, held_ids={EOS}, min_new_tokens=3)
    assert guide.follow([10]) == (1, None)
    assert len(guide.masks([11])) == 1  # the operator bans it, and what follows does not matter
    assert guide.follow([11])[1] is not None
    guide = follower(held_ids={EOS}, min_new_tokens=3)
    assert guide.follow([10, 11]) == (2, None)
    assert guide.follow([EOS])[0] == 0
    assert guide.follow([12, 13, 14, EOS]) == (4, None)


REFUSED: dict[str, tuple[Any, str]] = {
    "number": (3, "expected a JsonSchema, a Regex, a Choice"),
    "nothing": ([], "at least one option"),
    "empty": ([[1], []], "an option is empty"),
    "mixed": (["a", [1]], "all texts, or all lists"),
    "schema": ({"type": {1, 2}}, "no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_guides_that_are_refused(name):
    value, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(guide=value).guide.matcher(Vocabulary(None, VOCAB))


def test_shorthands():
    assert SamplingParams(guide={"type": "null"}).guide == JsonSchema({"type": "null"})
    assert SamplingParams(guide="a|b").guide == Regex("a|b")
    assert SamplingParams(guide=["a", "b"]).guide == Choice(["a", "b"])
    assert SamplingParams(guide=[(1, 2)]).guide == Choice([[1, 2]])


class _GivesUp:
    """A matcher whose parser reaches a limit after the second token."""

    def __init__(self) -> None:
        self.came = 0

    def allowed(self) -> Tensor:
        if self.came > 1:
            raise GuideFailed("too complex")
        return torch.full((4,), -1, dtype=torch.int32)

    def may_end(self) -> bool:
        return False

    def advance(self, token: int) -> bool:
        self.came += 1
        return True

    def rewind(self, count: int) -> None:
        self.came -= count


def test_a_matcher_that_gives_up_fails_where_the_output_goes_there():
    guide = GuideFollower(_GivesUp(), 4)
    assert len(guide.masks([7, 8, 9])) == 2
    assert guide.follow([7, 8]) == (2, None)
    with pytest.raises(GuideFailed, match="too complex"):
        guide.masks()


# --- in the engine ---


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_target("llama", num_layers=2)


@pytest.fixture(scope="module")
def dial(model) -> DialDrafter:
    head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    return DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64)


SIZES: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                         "max_prefill_tokens": 8}  # fmt: skip


@pytest.fixture(scope="module")
def plain(model) -> Iterator[Engine]:
    with compilespec.compile(model, **SIZES) as engine:
        yield engine


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 4], ids="K{}".format
)
def coupled(model, dial, request) -> Iterator[Engine]:
    count = request.param
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=count, **SIZES
    ) as engine:
        yield engine


def guided(seed: int = 3, temperature: float = 1.0, **fields: Any) -> SamplingParams:
    about = {"guide": OPTIONS, "max_new_tokens": 20, "temperature": temperature, "seed": seed}
    return SamplingParams(**{**about, **fields})


def by_hand(model: nn.Module, prompt: list[int], params: SamplingParams) -> list[int]:
    """The whole model anew for each token; the options and EOS spelt out; reference noise."""
    came: list[int] = []
    while len(came) < params.max_new_tokens and came[-1:] != [EOS]:
        with torch.no_grad():
            logits_V = model(torch.tensor([[*prompt, *came]])).logits[0, -1]
        allowed = {o[len(came)] for o in OPTIONS if o[: len(came)] == came and len(o) > len(came)}
        allowed |= {EOS} if came in OPTIONS else set()
        scores_V = torch.full_like(logits_V, -torch.inf)
        scores_V[list(allowed)] = logits_V[list(allowed)]
        if params.temperature:
            about = {"seed_low": params.seed, "seed_high": 0, "sample": 0, "stream": 0}
            noise = noise_bits(torch.arange(VOCAB), position=len(prompt) + len(came), **about)
            scores_V = scores_V / params.temperature + gumbel(noise)
        came.append(int(scores_V.argmax()))
    return came


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0], ids="T{}".format)
def test_tokens_are_the_masked_models(model, plain, coupled, dial, temperature):
    """First tokens included, mixed with requests that have no guide; with drafts at random (few of
    which the guide admits), right ones, and ones that err; EOS inside the window.
    """
    params = [guided(seed, temperature) for seed in range(3)]
    params.append(SamplingParams(max_new_tokens=20, temperature=temperature, seed=9))
    outputs = plain.generate(list(PROMPTS), params)
    tokens = [output.token_ids for output in outputs]
    assert tokens[:3] == [
        by_hand(model, p, one) for p, one in zip(PROMPTS[:3], params, strict=False)
    ]
    assert all(ids[:-1] in OPTIONS and ids[-1] == EOS for ids in tokens[:3])
    dial.know([*prompt, *ids, 50, 51] for prompt, ids in zip(PROMPTS, tokens, strict=True))
    for script in (None, lambda position: False, lambda position: position % 3 == 0):
        dial.draft_at_random() if script is None else dial.draft_from_script(script)
        drafted = coupled.generate(list(PROMPTS), params)
        assert [output.token_ids for output in drafted] == tokens
        assert [output.finish_reason for output in drafted[:3]] == ["stop"] * 3
    assert_nothing_held(coupled)


def test_rejected_drafts_leave_no_trace(plain, coupled, dial):
    """Drafts that are another option: the matcher goes down it and comes back, every step."""
    params = guided(guide=[[8] * 12, [8] * 6 + [9] * 6, [8] * 3 + [7] * 9], max_new_tokens=30)
    (output,) = plain.generate([PROMPTS[0]], params)
    others = [one for one in params.guide.options if list(one) != output.token_ids[:-1]]
    for other in others:
        dial.know([[*PROMPTS[0], *other, EOS, 1]])
        dial.draft_from_script(lambda position: False)
        (drafted,) = coupled.generate([PROMPTS[0]], params)
        assert drafted.token_ids == output.token_ids


def test_what_a_guide_forces_is_drafted(plain, coupled, dial):
    """Wrong drafts where one token may come are replaced, and their step gives K + 1 tokens."""
    params = guided(guide=[[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]], max_new_tokens=30)
    (output,) = plain.generate([PROMPTS[0]], params)
    dial.know([[*PROMPTS[0], *output.token_ids, 1]])
    dial.draft_from_script(lambda position: True)
    (drafted,) = coupled.generate([PROMPTS[0]], params)
    assert drafted.token_ids == output.token_ids
    count = coupled.geometry.config.num_draft_tokens
    *whole, _ = drafted.emitted_per_step
    assert whole == [count + 1] * len(whole)


def test_a_boundary_in_the_engine(plain, coupled, dial):
    """Free tokens up to the boundary, which the bias makes come early; then an option."""
    for seed in range(4):
        params = guided(seed, 1.5, guide_after_token_id=77, logit_bias={77: 7.0, EOS: -9.0},
                        max_new_tokens=40)  # fmt: skip
        (output,) = plain.generate([PROMPTS[1]], params)
        tokens = output.token_ids
        begin = tokens.index(77) + 1
        assert tokens[begin:-1] in OPTIONS
        assert tokens[-1] == EOS
        dial.know([[*PROMPTS[1], *tokens, 50, 51]])
        for is_wrong in (lambda position: False, lambda position: position % 4 == 0):
            dial.draft_from_script(is_wrong)
            assert coupled.generate([PROMPTS[1]], params)[0].token_ids == tokens
        free = guided(seed, 1.5, guide=None, logit_bias={77: 7.0, EOS: -9.0}, max_new_tokens=40)
        assert plain.generate([PROMPTS[1]], free)[0].token_ids[:begin] == tokens[:begin]


def test_no_end_of_sequence(plain, coupled, dial):
    """With ignore_eos the output ends where nothing can follow, inside the window too."""
    params = guided(ignore_eos=True, guide=OPTIONS[:2] + OPTIONS[3:])
    (output,) = plain.generate([PROMPTS[0]], params)
    assert output.token_ids in OPTIONS
    assert output.finish_reason == "stop"
    dial.know([[*PROMPTS[0], *output.token_ids, 50, 51, 52]])
    dial.draft_from_script(lambda position: False)
    assert coupled.generate([PROMPTS[0]], params)[0].token_ids == output.token_ids


def test_a_request_that_cannot_go_on_ends_alone(plain, coupled, dial):
    dial.draft_at_random()
    wanted = plain.generate([PROMPTS[1]], guided())[0].token_ids
    hopeless = [guided(bad_token_ids=(11,), guide=OPTIONS[:2]), guided(guide=[[EOS, 5]]), guided()]
    for engine in (plain, coupled):
        first, second, third = engine.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1]], hopeless)
        assert (first.finish_reason, second.finish_reason) == ("error", "error")
        assert isinstance(first.error, GuideFailed)
        assert isinstance(second.error, GuideFailed)
        assert first.token_ids == [10]
        assert third.token_ids == wanted
        assert_nothing_held(engine)


def test_samples_of_a_guided_prompt(plain, coupled, dial):
    dial.draft_at_random()
    params = guided(temperature=5.0, n=4)
    outputs = plain.generate([PROMPTS[0]], params)
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    again = coupled.generate([PROMPTS[0]], params)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


def test_rejection_keeps_to_the_guide(model, dial, plain):
    """Its distributions are masked: over many seeds it gives what plain decoding gives, no more."""
    params = [guided(seed, 5.0) for seed in range(60)]
    dial.know([[*PROMPTS[0], *OPTIONS[3], EOS, 1]])
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=3, acceptance="rejection", **SIZES
    ) as engine:
        outputs = []
        for script in (None, lambda position: False):
            dial.draft_at_random() if script is None else dial.draft_from_script(script)
            outputs += engine.generate([PROMPTS[0]] * len(params), params)
    assert all(o.token_ids[:-1] in OPTIONS and o.finish_reason == "stop" for o in outputs)
    came = {tuple(o.token_ids) for o in outputs}
    assert came == {tuple(o.token_ids) for o in plain.generate([PROMPTS[0]] * 60, params)}


def test_steps_of_several_k(model, dial, plain):
    """Also after steps without drafts, and replays that draft anew."""
    params = [guided(seed, 3.0, max_new_tokens=30, guide=[[8, 9] * 10, [8, 7] * 10, [9] * 20])
              for seed in range(3)]  # fmt: skip
    wanted = [o.token_ids for o in plain.generate(list(PROMPTS[:3]), params)]
    dial.know([*p, *tokens, 50, 51] for p, tokens in zip(PROMPTS[:3], wanted, strict=True))
    dial.draft_from_script(lambda position: position % 5 == 0)
    with compilespec.compile(
        model, spec="eagle3", draft=dial, num_draft_tokens=(0, 1, 3), **SIZES
    ) as engine:
        outputs = engine.generate(list(PROMPTS[:3]), params)
        assert [o.token_ids for o in outputs] == wanted


def test_requests_that_are_refused(plain):
    with pytest.raises(InvalidRequest, match="ids from 0 to 96, got 97"):
        plain.generate(PROMPTS[0], guided(guide=[[97]]))
    with pytest.raises(InvalidRequest, match=r"guide_after_token_id: expected an id .*got 97"):
        plain.generate(PROMPTS[0], guided(guide_after_token_id=97))
    with pytest.raises(InvalidRequest, match="a guide with it"):
        SamplingParams(guide_after_token_id=3)
