"""A user's acceptance rule: its contract, what the engine makes of it, and that verify knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams, acceptance_rule
from compilespec.errors import InvalidOption, TraceError
from compilespec.methods.eagle3 import random_head
from compilespec.passes.splice.acceptance.options import resolve_acceptance
from compilespec.passes.splice.acceptance.registry import describe, is_lossless
from compilespec.passes.splice.acceptance.rule import RULE_INPUTS
from tests.support import loops
from tests.support.markov import LENGTH, PROMPT, markov_target, params_of
from tests.support.models import VOCAB, greedy_reference, target_info, tiny_target

K = 2
SIZES: dict[str, Any] = {"num_draft_tokens": K, "max_batch_size": 4, "max_seq_len": 43}


@acceptance_rule(lossless=False)
def typical(probs_BSV, draft_BK, num_drafts_B):
    """Keep drafts that the target gives a tenth at least; then draw from the target."""
    place_BK1 = draft_BK.clamp(min=0).long().unsqueeze(-1)
    is_kept_BK = probs_BSV[:, :-1].gather(-1, place_BK1).squeeze(-1) >= 0.1
    kept_B = torch.minimum(is_kept_BK.int().cumprod(1).sum(1), num_drafts_B)
    place_B1V = kept_B.long().view(-1, 1, 1).expand(-1, 1, probs_BSV.shape[-1])
    return kept_B, probs_BSV.gather(1, place_B1V).squeeze(1)


@acceptance_rule(lossless=False)
def everything_then_seven(draft_BK, logits_BSV):
    """Asks for more than may be had, and for an id that does not exist."""
    many_B = torch.full_like(draft_BK[:, 0], 99)
    return many_B, logits_BSV[:, 0].argmax(-1) * 0 + 7000


class Cautious(nn.Module):
    """A rule with its own weights: accepts nothing, and draws from no one."""

    lossless = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, probs_BSV, num_drafts_B):
        return num_drafts_B * 0 - 3, probs_BSV[:, 1] * self.scale - 1


# --- the contract ---


def test_a_rule_states_whether_it_is_lossless():
    for function, states in ((typical, False), (Cautious(), True)):
        chosen = resolve_acceptance(function)
        assert chosen.rule == "user"
        assert is_lossless(chosen) is states
        assert not chosen.couples_drafts
    assert describe(resolve_acceptance(typical)) == (
        "user: typical, which states that it is lossy; LOSSY: the output is not the target's own"
    )
    with pytest.raises(InvalidOption, match="a rule states whether it is lossless"):
        resolve_acceptance(lambda probs_BSV: probs_BSV)
    with pytest.raises(InvalidOption, match="lossless must be True or False; got 1"):
        acceptance_rule(lossless=1)


def test_shipped_rules_are_under_the_same_contract():
    for name in ("rejection", "block"):
        chosen = resolve_acceptance(name)
        assert is_lossless(chosen)
        assert chosen.reads_draft_probs
        assert set(chosen.function.inputs) <= set(RULE_INPUTS)
        assert describe(chosen) == name
    assert not resolve_acceptance(typical).reads_draft_probs


def test_what_a_rule_reads_is_checked_before_anything_is_loaded():
    @acceptance_rule(lossless=True)
    def curious(probs_BSV, secrets_B):
        return secrets_B, probs_BSV

    @acceptance_rule(lossless=True)
    def blind():
        return None

    with pytest.raises(InvalidOption, match="got secrets_B"):
        resolve_acceptance(curious)
    with pytest.raises(InvalidOption, match="got no parameter"):
        resolve_acceptance(blind)


def wrong(result: Any) -> Any:
    @acceptance_rule(lossless=True)
    def rule(probs_BSV, num_drafts_B):
        return result(probs_BSV, num_drafts_B)

    return rule


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (lambda p, n: (n, p[:, 0, :5]), InvalidOption),
        (lambda p, n: (n, p[:, 0] if n.sum() > 3 else p[:, 1]), TraceError),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (lambda p, n: (n, p), InvalidOption),
                (lambda p, n: (n, p[:, 0, 0]), InvalidOption),
                (lambda p, n: (p[:, 0], p[:, 0]), InvalidOption),
                (lambda p, n: n, TraceError),
            )
        ),
    ],
)
def test_what_a_rule_returns(result, error):
    with pytest.raises(error):
        compilespec.trace(markov_target(), "ngram", acceptance=wrong(result), num_draft_tokens=2,
                          max_seq_len=16)  # fmt: skip


# --- in the engine ---


def outputs_of(rule: Any, params: list[SamplingParams], **options: Any) -> tuple[Any, dict]:
    def repeat(history_BL, length_B):
        last_B1 = history_BL.gather(1, (length_B - 1).long().unsqueeze(1))
        return torch.cat([last_B1, last_B1], 1)

    with compilespec.compile(
        markov_target(), "user", draft=repeat, acceptance=rule, backend="eager", max_seq_len=16,
        num_draft_tokens=2, **options,
    ) as engine:  # fmt: skip
        return engine.generate([PROMPT] * len(params), params), engine.plan()


def test_counts_and_ids_stay_inside():
    """Never more than there are drafts to judge; the last id of the vocabulary instead of 7000."""
    params = [params_of("plain"), params_of("one_draft"), params_of("no_draft")]
    outputs, plan = outputs_of(everything_then_seven, params)
    assert plan["lossless"] is False
    last = [3, 2, 1]
    for output, count in zip(outputs, last, strict=True):
        *whole, _ = output.emitted_per_step
        assert whole == [count] * len(whole)
        first, *rest = output.token_ids
        token, wanted = first, []
        while len(wanted) < LENGTH - 1:
            wanted += [*[token] * (count - 1), 12]
            token = 12
        assert rest == wanted[: LENGTH - 1]


@acceptance_rule(lossless=False)
def everything(probs_BSV, num_drafts_B):
    """Keeps every draft; the weights after it are those of its row."""
    place_B1V = num_drafts_B.long().view(-1, 1, 1).expand(-1, 1, probs_BSV.shape[-1])
    return num_drafts_B, probs_BSV.gather(1, place_B1V).squeeze(1)


GUIDE = [[3, 4, 5, 6, 7, 8], [3, 4, 9, 10, 11, 12], [11, 1, 6, 1, 7, 0]]
ANYTHING_GOES = {
    "relaxed_topk": 13, "relaxed_delta": 1.0, "begin_thinking_token_id": 3,
    "end_thinking_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "rule", ["rejection", "block", pytest.param(everything, id="everything"), "relaxed"]
)
def test_a_draft_that_a_guide_forbids_is_never_kept(rule):
    """The drafter repeats the last token, which the guide forbids; nothing may follow it."""
    params = [params_of("plain", seed=seed, guide=GUIDE, max_new_tokens=6) for seed in range(16)]
    outputs, _ = outputs_of(rule, params, **(ANYTHING_GOES if rule == "relaxed" else {}))
    assert [output.error for output in outputs] == [None] * len(params)
    assert {tuple(output.token_ids) for output in outputs} <= {tuple(one) for one in GUIDE}


def test_rows_without_weights_take_the_targets_own():
    """A module is a rule, too."""
    outputs, plan = outputs_of(
        Cautious(), [params_of("plain", temperature=0.0), params_of("plain")]
    )
    assert plan["lossless"] is True
    assert plan["acceptance"] == "user: Cautious, which states that it is lossless"
    assert outputs[0].token_ids == greedy_reference(markov_target(), PROMPT, LENGTH)
    for output in outputs:
        assert set(output.emitted_per_step) == {1}


def test_a_lossy_rule_accepts_more():
    params = [params_of("plain", seed=seed) for seed in range(30)]
    steps = {}
    for rule in (typical, "rejection"):
        outputs, _ = outputs_of(rule, params)
        steps[rule] = sum(len(output.emitted_per_step) for output in outputs)
    assert steps[typical] < steps["rejection"]


# --- verify ---


@pytest.fixture(scope="module")
def parts() -> tuple[nn.Module, Any]:
    model = tiny_target("qwen2", num_layers=2)
    return model, random_head(target_info(model, 64), aux_layers=(0, 1, 2), draft_vocab_size=61)


CHECKED = ["splice_acceptance", "splice_draft_loop", "commit_state", "check_mutations"]


@pytest.mark.parametrize(
    "rule", ["rejection", pytest.param("block", marks=pytest.mark.slow),
             pytest.param(typical, marks=pytest.mark.slow),
             pytest.param("strict", marks=pytest.mark.slow)]
)  # fmt: skip
def test_every_pass_of_a_program_with_probabilities_computes_what_it_must(parts, rule):
    """Sampled rows among greedy ones."""
    model, head = parts
    program = compilespec.trace(
        model, "eagle3", draft=head, acceptance=rule, max_prefill_tokens=64, **SIZES
    )
    report = compilespec.verify(program, passes=CHECKED)
    assert report.ok, str(report)
    assert {check.pass_name for check in report.checks} == set(CHECKED)


@pytest.mark.parametrize("rule", ["rejection", "block", typical, everything_then_seven])
def test_ids_are_proved(rule):
    from compilespec.inspect.bounds import prove

    program = compilespec.trace(
        tiny_target("llama", num_layers=1), "ngram", acceptance=rule, **SIZES
    )
    assert not prove(program).num_open


@pytest.mark.parametrize("kind", loops.KINDS)
def test_verify_of_rejection_with_every_kind_of_loop(kind):
    program = loops.traced(kind, acceptance="rejection")
    report = compilespec.verify(program, passes=["splice_acceptance", "splice_draft_loop"])
    assert report.ok, str(report)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_compiled_equals_interpreted(parts, rule, inductor_cache_dir):
    """T22: the same tokens from both backends, float64; nothing recompiles."""
    model, head = parts
    params = [SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=t, seed=s)
              for s, t in enumerate((0.0, 0.5, 1.0, 1.5))]  # fmt: skip
    tokens = []
    for backend in ("eager", "inductor"):
        with compilespec.compile(
            model, "eagle3", draft=head, acceptance=rule, backend=backend, **SIZES
        ) as engine:
            outputs = engine.generate([[5, 6, 7], [9], [11, 12], [VOCAB - 1]], params)
            tokens.append([(o.token_ids, o.emitted_per_step) for o in outputs])
            assert engine.stats().num_recompiles == 0
    assert tokens[0] == tokens[1]
