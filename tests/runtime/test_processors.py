"""Logits processors: traced into the step, and on the host; drafts change no token."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation import logits_process as hf

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest, ProcessorFailed
from compilespec.methods.eagle3 import random_head
from compilespec.ops import host_process
from compilespec.ops.sample.philox import gumbel, noise_bits
from compilespec.pipeline.options import CompileOptions
from compilespec.program import ProgramConfig
from compilespec.runtime.engine import Engine
from tests.support.models import VOCAB, DialDrafter, assert_nothing_held, target_info, tiny_target

MAX_SEQ_LEN, COUNT = 64, 14
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [11], [90, 3, 90, 3, 90])
SIZES: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                         "max_prefill_tokens": 8}  # fmt: skip


class Everything(nn.Module):
    """Reads all there is: a ban of what followed the last token before, in the output a push away
    from its own count of the prompt's tokens, odd ids up at every third place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.push = nn.Parameter(torch.linspace(-1.5, 1.5, VOCAB, dtype=torch.float64))

    def forward(
        self,
        logits_BSV: Tensor,
        context_BL: Tensor,
        ids_BS: Tensor,
        position_BS: Tensor,
        prompt_len_B: Tensor,
    ) -> Tensor:
        place_L = torch.arange(context_BL.shape[1], device=context_BL.device)
        before_BSL = place_L < position_BS.unsqueeze(-1) - 1
        follows_BSL = before_BSL & (context_BL.unsqueeze(1) == ids_BS.unsqueeze(-1))
        follower_BL = context_BL.roll(-1, 1)
        id_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device)
        is_follower_BLV = follower_BL.unsqueeze(-1) == id_V
        banned_BSV = torch.einsum(
            "bsl,blv->bsv", follows_BSL.to(self.push.dtype), is_follower_BLV.to(self.push.dtype)
        )
        is_third_BS1 = (position_BS % 3 == 0).unsqueeze(-1)
        pushed_BSV = logits_BSV + is_third_BS1 * self.push * (prompt_len_B.view(-1, 1, 1) % 4)
        return pushed_BSV.masked_fill(banned_BSV > 0, -torch.inf)


def everything_by_hand(num_prompt: int, tokens: list[int], logits_V: Tensor) -> Tensor:
    """The same in plain Python."""
    scores = logits_V.clone()
    if len(tokens) % 3 == 0:
        push = torch.linspace(-1.5, 1.5, VOCAB, dtype=torch.float64)
        scores += (push * (num_prompt % 4)).to(scores.dtype)
    for one, two in itertools.pairwise(tokens):
        if one == tokens[-1]:
            scores[two] = -torch.inf
    return scores


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_target("llama", num_layers=2)


@pytest.fixture(scope="module")
def dial(model) -> DialDrafter:
    head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    return DialDrafter(head, max_seq_len=MAX_SEQ_LEN, dtype=torch.float64)


def params_of(temperature: float, seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=COUNT, temperature=temperature, seed=seed, ignore_eos=True, **fields
    )


def by_hand(
    model: nn.Module,
    prompt: list[int],
    params: SamplingParams,
    process: Callable[[list[int], Tensor], Tensor],
) -> list[int]:
    """The whole model anew for each token, the processor in plain Python, reference noise."""
    tokens = list(prompt)
    for _ in range(params.max_new_tokens):
        with torch.no_grad():
            scores_V = process(tokens, model(torch.tensor([tokens])).logits[0, -1].clone())
        if params.temperature:
            about = {"seed_low": params.seed, "seed_high": 0, "sample": 0, "stream": 0}
            noise = noise_bits(torch.arange(VOCAB), position=len(tokens), **about)
            scores_V = scores_V / params.temperature + gumbel(noise)
        tokens.append(int(scores_V.argmax()))
    return tokens[len(prompt) :]


def scripts(dial: DialDrafter, known: list[list[int]]) -> Iterator[None]:
    """Drafts at random, right ones, and ones that err here and there."""
    dial.know(known)
    for script in (None, lambda position: False, lambda position: position % 4 == 0):
        dial.draft_at_random() if script is None else dial.draft_from_script(script)
        yield


# --- traced ---


@pytest.mark.parametrize(
    "num_drafts", [*(pytest.param(k, marks=pytest.mark.slow) for k in (0, 1)), 4], ids="K{}".format
)
def test_a_traced_processor_that_reads_everything(model, dial, num_drafts):
    spec: dict[str, Any] = {"spec": "eagle3", "draft": dial, "num_draft_tokens": num_drafts}
    with compilespec.compile(
        model, **(spec if num_drafts else {}), logits_processor=Everything(), **SIZES
    ) as engine:
        params = [params_of(t, seed) for seed, t in enumerate((0.0, 1.0, 1.5, 0.0))]
        wanted = [
            by_hand(model, p, one, functools.partial(everything_by_hand, len(p)))
            for p, one in zip(PROMPTS, params, strict=True)
        ]
        known = [[*p, *tokens] for p, tokens in zip(PROMPTS, wanted, strict=True)]
        for _ in scripts(dial, known):
            outputs = engine.generate(list(PROMPTS), params)
            assert [output.token_ids for output in outputs] == wanted
            (late,) = engine.generate([PROMPTS[3]], params[3])  # in a row that another one used
            assert late.token_ids == wanted[3]


def mixes_requests(logits_BSV: Tensor) -> Tensor:
    return logits_BSV - logits_BSV.mean(0, keepdim=True)


def mixes_the_window(logits_BSV: Tensor) -> Tensor:
    return logits_BSV.cumsum(1)


def reads_ahead(logits_BSV: Tensor, context_BL: Tensor) -> Tensor:
    return logits_BSV + context_BL.sum(1).view(-1, 1, 1)


def too_narrow(logits_BSV: Tensor) -> Tensor:
    return logits_BSV[..., 1:]


def no_logits(position_BS: Tensor) -> Tensor:
    return position_BS


def unknown(logits_BSV: Tensor, seed: Tensor) -> Tensor:
    return logits_BSV


REFUSED: dict[Any, str] = {
    mixes_requests: "mixes rows", mixes_the_window: "mixes rows", reads_ahead: "mixes rows",
    too_narrow: "must return floating logits", no_logits: "parameters must be logits_BSV",
    unknown: "parameters must be logits_BSV", 7: "a function or a module",
}  # fmt: skip


@pytest.mark.parametrize("processor", REFUSED, ids=lambda p: getattr(p, "__name__", str(p)))
def test_processors_that_are_refused(processor):
    config = ProgramConfig(
        num_draft_tokens=2, max_batch_size=3, max_seq_len=20, max_prefill_tokens=8, block_size=4,
        num_blocks=9, vocab_size=7, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(InvalidOption, match=REFUSED[processor]):
        CompileOptions(logits_processor=processor).processor.capture("decode", config)


def test_passes_are_verified(model, dial):
    """A step with processors of both kinds computes what their reference in plain Python says."""
    program = compilespec.trace(
        model, spec="eagle3", draft=dial, num_draft_tokens=2, logits_processor=Everything(),
        host_processors=True, **SIZES,
    )  # fmt: skip
    report = compilespec.verify(program, passes=("process_logits", "splice_acceptance"))
    assert report.ok, str(report)
    assert {check.phase for check in report.checks} == {"prefill", "decode"}


# --- on the host ---


@pytest.fixture(
    scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 4], ids="K{}".format
)
def hosted(model, dial, request) -> Iterator[Engine]:
    spec: dict[str, Any] = {"spec": "eagle3", "draft": dial, "num_draft_tokens": request.param}
    with compilespec.compile(
        model, **(spec if request.param else {}), host_processors=True, **SIZES
    ) as engine:
        yield engine


def no_repeats(tokens: list[int], logits_V: Tensor) -> Tensor:
    """transformers' own class."""
    ids = torch.tensor([tokens])
    return hf.NoRepeatNGramLogitsProcessor(2)(ids, logits_V.unsqueeze(0))[0]


def test_processors_on_the_host(model, dial, hosted):
    """Two kinds of them, beside requests without."""
    params = [
        params_of(1.0, 0, logits_processor=functools.partial(everything_by_hand, 1)),
        params_of(0.0, 1, logits_processor=no_repeats),
        params_of(0.0, 2),
        params_of(1.3, 3),
    ]
    wanted = [
        by_hand(model, p, one, one.logits_processor or (lambda tokens, logits: logits))
        for p, one in zip(PROMPTS, params, strict=True)
    ]
    known = [[*p, *tokens] for p, tokens in zip(PROMPTS, wanted, strict=True)]
    for _ in scripts(dial, known):
        outputs = hosted.generate(list(PROMPTS), params)
        assert [output.token_ids for output in outputs] == wanted
    assert not host_process._processors
    greedy = model.generate(
        torch.tensor([PROMPTS[1]]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
        pad_token_id=0, no_repeat_ngram_size=2,
    )  # fmt: skip
    assert greedy[0, len(PROMPTS[1]) :].tolist() == wanted[1]


def test_logprobs_are_those_of_the_model(model, dial, hosted):
    """Of the logits before the processor, which bans all but one id."""

    def only(tokens: list[int], logits_V: Tensor) -> Tensor:
        return torch.where(torch.arange(VOCAB) == 50, logits_V, -torch.inf)

    dial.draft_at_random()
    params = params_of(0.0, 0, logprobs=2, logits_processor=only)
    (output,) = hosted.generate([PROMPTS[0]], params)
    assert output.token_ids == [50] * COUNT
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0], *output.token_ids]])).logits[0]
    wanted = logits[len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    for entry, row in zip(output.logprobs, wanted, strict=True):
        assert entry.logprob == pytest.approx(float(row[50]), abs=1e-5)
        assert list(entry.top) == row.topk(2).indices.tolist()


def test_one_that_is_told_every_prefix_once(dial, hosted):
    """The tokens it sees are the prompt, the output and the drafts of the row, in a list of its
    own; what it does to them changes nothing.
    """
    seen: list[list[int]] = []

    def look(tokens: list[int], logits_V: Tensor) -> Tensor:
        seen.append(list(tokens))
        tokens.clear()
        return logits_V.fill_(-9.0).index_fill_(0, torch.tensor([33]), 1.0)

    dial.draft_at_random()
    (output,) = hosted.generate([PROMPTS[0]], params_of(0.0, 0, logits_processor=look))
    assert output.token_ids == [33] * COUNT
    for length in range(COUNT):
        assert [*PROMPTS[0], *[33] * length] in seen
    if hosted.geometry.config.num_draft_tokens == 0:
        assert seen == [[*PROMPTS[0], *[33] * length] for length in range(COUNT)]


def _raises(tokens: list[int], logits_V: Tensor) -> Tensor:
    if len(tokens) > 9:
        raise ZeroDivisionError("no reason\nin particular")
    return logits_V


FAILING: dict[str, tuple[Callable[[list[int], Tensor], Any], str]] = {
    "raises": (_raises, "_raises .* raised ZeroDivisionError: no reason$"),
    "shape": (lambda tokens, logits_V: logits_V[1:], r"must return logits \[97\]; it returned"),
    "nothing": (lambda tokens, logits_V: None, "it returned NoneType"),
}


@pytest.mark.parametrize("name", FAILING)
def test_one_that_fails_ends_its_request_alone(dial, hosted, name):
    function, message = FAILING[name]
    dial.draft_at_random()
    others = [params_of(1.0, 1), params_of(0.0, 2, logits_processor=no_repeats)]
    wanted = [o.token_ids for o in hosted.generate(list(PROMPTS[:2]), others)]
    params = [*others, params_of(1.0, 1, logits_processor=function)]
    outputs = hosted.generate(list(PROMPTS[:3]), params)
    assert [o.token_ids for o in outputs[:2]] == wanted
    failed = outputs[2]
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, ProcessorFailed)
    with pytest.raises(ProcessorFailed, match=message):
        raise failed.error
    assert len(failed.token_ids) < COUNT
    assert not host_process._processors
    assert_nothing_held(hosted)


def test_what_is_no_function_is_refused():
    with pytest.raises(InvalidRequest, match=r"a function of \(token_ids, logits\)"):
        params_of(0.0, 0, logits_processor="no")


def test_the_operator():
    """Rows without a processor are copies; opcheck."""
    logits = torch.randn(3, 2, 5, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 2], [3, 4], [0, 1]], dtype=torch.int32)
    handles, rows = torch.zeros(4, dtype=torch.int64), torch.tensor([2, 0, 3])
    handles[0] = host_process.register(lambda drafts, logits_SV: logits_SV * 0 + drafts[1][0])
    try:
        changed = host_process.host_process(logits, ids, rows, handles)
        assert torch.equal(changed[1], torch.full((2, 5), 4.0))
        assert torch.equal(changed[[0, 2]], logits[[0, 2]].float())
    finally:
        host_process.release(int(handles[0]))
    untouched = host_process.host_process(logits, ids, rows, handles)
    assert torch.equal(untouched, logits.float())
    torch.library.opcheck(
        torch.ops.compilespec.host_process.default, (logits, ids, rows, handles * 0)
    )
