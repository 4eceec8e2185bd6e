"""Rules that judge drafts: strict, forced (T04) and relaxed (T09), in the engine."""

from __future__ import annotations

import logging

import pytest
import torch

import compilespec
from compilespec.errors import InvalidOption
from compilespec.methods.base import MethodConfig
from compilespec.methods.eagle3 import random_head
from compilespec.passes.splice.acceptance.options import (
    FORCE_VARIABLES,
    resolve_acceptance,
    warn_if_lossy,
)
from compilespec.passes.splice.acceptance.registry import describe, is_lossless
from compilespec.passes.splice.acceptance.rule import STRICT, Acceptance, Relaxed
from tests.support.models import (
    VOCAB,
    Ask,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)

K = 3
BEGIN, END = 59, 51  # both are among the tokens that the model likes to give
RELAXED = {
    "relaxed_topk": 25,
    "relaxed_delta": 0.15,
    "begin_thinking_token_id": BEGIN,
    "end_thinking_token_id": END,
}
OPTIONS = {
    "backend": "eager", "num_draft_tokens": K, "max_batch_size": 4, "max_seq_len": 90,
    "max_prefill_tokens": 16, "buckets": [1, 3, 4],
}  # fmt: skip


# --- options ---


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in FORCE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_default_is_strict_and_lossless():
    for name in ("auto", "strict"):
        assert resolve_acceptance(name) == STRICT
    assert is_lossless(STRICT)
    assert describe(STRICT) == "strict"


@pytest.mark.parametrize("name", ["Strict", "", "user", None, 3])
def test_unknown_rules(name):
    with pytest.raises(InvalidOption, match="auto, strict, relaxed, rejection, block, or a funct"):
        resolve_acceptance(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relaxed_topk": None}, "no defaults; give relaxed_topk"),
        ({"relaxed_topk": 0}, "1 or more"),
        ({"relaxed_topk": 2.0}, "integer"),
        ({"relaxed_delta": -0.1}, "difference of probabilities"),
        ({"relaxed_delta": 1.5}, "difference of probabilities"),
        ({"relaxed_delta": True}, "difference of probabilities"),
        ({"begin_thinking_token_id": -1}, "0 or more"),
        ({"end_thinking_token_id": BEGIN}, "must differ"),
    ],
)
def test_relaxed_options(changes, message):
    with pytest.raises(InvalidOption, match=message):
        resolve_acceptance("relaxed", **{**RELAXED, **changes})


def test_relaxed_options_without_the_rule():
    with pytest.raises(InvalidOption, match="relaxed_topk: only with acceptance='relaxed'"):
        resolve_acceptance("auto", relaxed_topk=3)


def test_t04_invalid_text_in_the_environment_is_zero_with_a_warning(monkeypatch, caplog):
    """I1."""
    for name in FORCE_VARIABLES:
        monkeypatch.setenv(name, "two")
        with caplog.at_level(logging.WARNING, "compilespec"):
            assert resolve_acceptance("auto") == STRICT
        assert f"{name}='two'" in caplog.text
        monkeypatch.delenv(name)


def test_t04_environment_and_option(monkeypatch, caplog):
    """The option wins, then our variable, then the reference's; a lossy choice is logged."""
    monkeypatch.setenv(FORCE_VARIABLES[1], "2")
    assert resolve_acceptance("auto").force_num_accepted == 2
    monkeypatch.setenv(FORCE_VARIABLES[0], "1")
    caplog.clear()
    assert resolve_acceptance("auto") == Acceptance(force_num_accepted=1)
    warn_if_lossy(resolve_acceptance("auto"))
    assert "LOSSY" in caplog.text
    caplog.clear()
    assert resolve_acceptance("auto", 0) == STRICT
    warn_if_lossy(STRICT)
    assert not caplog.text


def test_t04_negative_is_an_error(monkeypatch):
    """H-1: the reference accepts -1 drafts."""
    monkeypatch.setenv(FORCE_VARIABLES[1], "-1")
    with pytest.raises(InvalidOption, match="force_num_accepted"):
        resolve_acceptance("auto")
    for wrong in (-1, 1.0, True, "2"):
        with pytest.raises(InvalidOption, match="force_num_accepted"):
            resolve_acceptance("auto", wrong)


def test_options_reach_the_program_and_plan_says_so():
    model = tiny_target("llama", num_layers=1)
    sizes = {"max_batch_size": 2, "max_seq_len": 40, "backend": "eager"}
    spec = MethodConfig(name="ngram", options={"force_num_accepted": 2, "max_ngram": 2})
    with compilespec.compile(model, spec, num_draft_tokens=5, **sizes) as engine:
        assert engine.plan()["lossless"] is False
        assert "2 drafts accepted by force; LOSSY" in engine.plan()["acceptance"]
    with compilespec.compile(model, spec="ngram", num_draft_tokens=3, **sizes) as engine:
        assert engine.plan()["lossless"] is True
        assert engine.plan()["acceptance"] == "strict"
    with pytest.raises(InvalidOption, match="0 to 96; got 97"):
        compilespec.trace(
            model, spec="ngram", acceptance="relaxed", **{**RELAXED, "end_thinking_token_id": VOCAB}
        )


# --- in the engine ---


def drafts_after(token: int) -> list[int]:
    return [(token * 7 + 3 + 5 * step) % VOCAB for step in range(K)]


def draft(history_BL: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
    newest_B1 = history_BL.gather(1, (length_B - 1).clamp(min=0).long().unsqueeze(1))
    return (
        newest_B1 * 7
        + 3
        + 5 * torch.arange(K)
        - (newest_B1 * 7 + 3 + 5 * torch.arange(K)) // (VOCAB) * VOCAB
    )


class Thinking:
    """The margin of one request, token by token; M10 with H-12 and H-13 mended."""

    def __init__(self, prompt):
        self.margin, self.changes, self.num_near = 0.0, 0, 0
        self.read(prompt)

    def read(self, tokens):
        for token in tokens:
            if token in (BEGIN, END):
                self.margin = RELAXED["relaxed_delta"] if token == BEGIN else 0.0
                self.changes += 1

    def count(self, drafts, scores):
        kept = 0
        while kept < K and self.keeps(drafts[kept], scores[kept]):
            kept += 1
        return kept

    def keeps(self, token, scores):
        best = int(scores.argmax())
        if token == best:
            return True
        chances = torch.softmax(scores, -1).tolist()
        ranked = sorted(range(VOCAB), key=lambda other: (-float(scores[other]), other))
        near = (
            self.margin > 0
            and token in ranked[: RELAXED["relaxed_topk"]]
            and chances[token] >= chances[best] - self.margin
        )
        self.num_near += near
        return near


def expected(model, prompt, count, force=None):
    """The tokens, and how many each step gives.  With `force` the cache holds the drafts."""

    def scores(context, rows):
        with torch.no_grad():
            return model(torch.tensor([context])).logits[0, -rows:]

    thinking = Thinking(prompt)
    context = [*prompt, int(scores(prompt, 1)[0].argmax())]
    output, steps = context[-1:], []
    thinking.read(output)
    while len(output) < count:
        drafts = drafts_after(output[-1])
        judged = scores([*context, *drafts], K + 1)
        choices = judged.argmax(-1).tolist()
        if force is not None:
            kept = min(force, K)
            tokens = choices[: kept + 1]
        else:
            kept = thinking.count(drafts, judged)
            tokens = [*drafts[:kept], choices[kept]]
        thinking.read(tokens)
        context += [*drafts[:kept], choices[kept]]
        steps.append(min(kept + 1, count - len(output)))
        output += tokens
    return output[:count], steps, thinking


PROMPTS = (
    [BEGIN, 5, 6],
    [7],
    [8, 9],  # takes a row that a thinking request had
    [40, BEGIN, *range(60, 94)],  # three chunks, the marker in the first
    [50, BEGIN, *range(61, 75), END, *range(80, 90)],  # END in a later chunk
    [45, *range(70, 89), END, 30, BEGIN],
    [BEGIN],
    [52, 53, END],
)


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama", num_layers=2)


@pytest.fixture(scope="module")
def relaxed_engine(model):
    with compilespec.compile(
        model, spec="user", draft=draft, acceptance="relaxed", **RELAXED, **OPTIONS
    ) as engine:
        yield engine


def test_t09_relaxed_tokens_and_steps_equal_a_scalar_oracle(model, relaxed_engine):
    """Rows are reused, prompts come in chunks, and requests begin and end thinking as they go."""
    assert relaxed_engine.plan()["lossless"] is False
    wanted = [expected(model, prompt, 30) for prompt in PROMPTS]
    asks = [
        Ask(prompt=tuple(prompt), tokens=tuple(tokens))
        for prompt, (tokens, _, _) in zip(PROMPTS, wanted, strict=True)
    ]
    for batches in ((1,), (2, 3, 4)):
        requests = run_traffic(relaxed_engine, asks, batches)
        for request, (tokens, steps, _) in zip(requests, wanted, strict=True):
            assert request.output_token_ids == tokens
            assert request.emitted_per_step == steps
        assert_nothing_held(relaxed_engine)
    assert sum(thinking.num_near for _, _, thinking in wanted) > 10  # kept though not the best
    assert sum(token in (BEGIN, END) for tokens, _, _ in wanted for token in tokens) > 10
    assert {1, 2, 3, 4} == {count for _, steps, _ in wanted for count in steps}


def test_relaxed_without_thinking_is_strict(model, relaxed_engine):
    """H-13: a margin of 0 accepts the target's choice only."""
    (request,) = run_traffic(relaxed_engine, [Ask(prompt=(7,), tokens=(0,) * 12)], (1,))
    with compilespec.compile(model, spec="none", backend="eager", max_seq_len=90) as plain:
        (want,) = run_traffic(plain, [Ask(prompt=(7,), tokens=(0,) * 12)], (1,))
    assert not {BEGIN, END} & set(want.output_token_ids)
    assert request.output_token_ids == want.output_token_ids


@pytest.mark.parametrize("force", [1, K, K + 4], ids="force{}".format)
def test_t04_forced_acceptance_in_the_engine(model, force):
    """I1: n = min(force + 1, K + 1) in every decode step, 1 in prefill; the drafts stay in the
    cache, so later tokens follow from them.
    """
    prompts = ([5, 6, 7], [9], list(range(40, 70)))
    with compilespec.compile(
        model, spec="user", draft=draft, force_num_accepted=force, **OPTIONS
    ) as engine:
        asks, steps = [], []
        for prompt in prompts:
            tokens, counts, _ = expected(model, prompt, 21, force)
            asks.append(Ask(prompt=tuple(prompt), tokens=tuple(tokens)))
            steps.append(counts)
        for request, ask, counts in zip(
            run_traffic(engine, asks, (1, 3)), asks, steps, strict=True
        ):
            assert request.output_token_ids == list(ask.tokens)
            assert request.emitted_per_step == counts
            assert set(counts[:-1]) == {min(force, K) + 1}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"acceptance": "relaxed", **RELAXED}, marks=pytest.mark.slow),
        pytest.param({"force_num_accepted": 1}, marks=pytest.mark.slow),
        {"acceptance": "relaxed", **RELAXED, "force_num_accepted": 2},
    ],
    ids=["relaxed", "forced", "both"],
)
def test_every_pass_of_a_lossy_program_computes_what_it_must(options):
    model = tiny_target("qwen2", num_layers=3)
    head = random_head(target_info(model, 64), aux_layers=(0, 1, 2), draft_vocab_size=61)
    program = compilespec.trace(
        model, spec="eagle3", draft=head, num_draft_tokens=2, max_batch_size=5, max_seq_len=43,
        max_prefill_tokens=64, **options,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)
    assert {"splice_acceptance", "check_mutations"} <= {check.pass_name for check in report.checks}


def test_ids_of_a_lossy_program_are_proved():
    """For any rule, the step's outputs and state are ids or PAD."""
    from compilespec.inspect.bounds import prove

    model = tiny_target("llama", num_layers=1)
    program = compilespec.trace(
        model, spec="ngram", acceptance="relaxed", force_num_accepted=1, **RELAXED,
        **{k: v for k, v in OPTIONS.items() if k != "backend"},
    )  # fmt: skip
    assert not prove(program).num_open


def test_relaxed_compiled_equals_interpreted(model, inductor_cache_dir):
    options = {**OPTIONS, "acceptance": "relaxed", **RELAXED, "max_batch_size": 2, "buckets": None}
    outputs = []
    for backend in ("eager", "inductor"):
        with compilespec.compile(
            model, spec="user", draft=draft, **{**options, "backend": backend}
        ) as engine:
            outputs.append([out.token_ids for out in engine.generate([[BEGIN, 5], [7, 8]])])
            assert engine.stats().num_recompiles == 0
    assert outputs[0] == outputs[1]


def test_relaxed_is_a_record():
    made = resolve_acceptance("relaxed", **RELAXED)
    assert made.relaxed == Relaxed(
        topk=25, delta=0.15, begin_thinking_token_id=BEGIN, end_thinking_token_id=END
    )
    assert describe(made) == (
        f"relaxed; topk=25, delta=0.15 from token {BEGIN} to token {END}; LOSSY: the output is not "
        f"the target's own"
    )
