"""spec="user": a function or module of the user's, and a user's whole method, as spec=."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import DraftFailed, DraftMismatch, DraftNotFound, InvalidOption
from compilespec.methods.base import MethodConfig
from compilespec.methods.capabilities import FINAL_NORM, Capabilities
from compilespec.methods.direct import DirectDrafter
from tests.support.direct_methods import MAX_SEQ_LEN, SIZES, Script, check_traffic
from tests.support.models import VOCAB, ask_all, assert_nothing_held, tiny_target

OPTIONS = {"backend": "eager", "max_batch_size": 5, "max_seq_len": MAX_SEQ_LEN}


@functools.cache
def asked(family):
    model = tiny_target(family, num_layers=2)
    return model, tuple(ask_all(model, SIZES))


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 1),
        ("qwen3_moe", 3),
        ("gemma3", 5),
        *(
            pytest.param(family, count, marks=pytest.mark.slow)
            for family, count in (
                ("llama", 3), ("llama", 5), ("qwen3_moe", 1), ("qwen3_moe", 5), ("gemma3", 1),
                ("gemma3", 3),
            )
        ),
    ],
)  # fmt: skip
def test_drafts_that_match_are_all_accepted_and_the_history_is_exact(family, count):
    model, asks = asked(family)
    script = Script(([*ask.prompt, *ask.tokens] for ask in asks), count)
    with compilespec.compile(
        model, spec="user", draft=script, num_draft_tokens=count, max_prefill_tokens=16,
        buckets=[1, 2, 5], **OPTIONS,
    ) as engine:  # fmt: skip
        for request in check_traffic(engine, asks):
            *whole, last = request.emitted_per_step or [1]
            assert whole == [count + 1] * len(whole)
            assert 1 <= last <= count + 1
        script.offset.fill_(1)  # one wrong everywhere: never accepted
        for request in check_traffic(engine, asks):
            assert set(request.emitted_per_step) <= {1}


def test_pad_is_never_accepted_even_where_the_target_says_zero():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("draft", torch.full((1,), -1, dtype=torch.int32))

        def forward(self, length_B):
            return self.draft.expand(length_B.shape[0], 2) + length_B.unsqueeze(1) * 0

    model = tiny_target("llama", num_layers=2)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every argmax is 0
    drafter = Zeros()
    asks = tuple(ask_all(model, ((5, 9),)))
    assert set(asks[0].tokens) == {0}
    with compilespec.compile(
        model, spec="user", draft=drafter, num_draft_tokens=2, **OPTIONS
    ) as engine:
        (request,) = check_traffic(engine, asks)
        assert request.emitted_per_step == [1] * 8
        drafter.draft.fill_(0)
        (request,) = check_traffic(engine, asks)
        assert request.emitted_per_step == [3, 3, 2]


def test_a_function_of_ids_outside_the_vocabulary_drafts_nothing():
    model, asks = asked("llama")

    def draft(length_B: Tensor) -> Tensor:
        return length_B.unsqueeze(1).expand(-1, 3) * 0 + VOCAB

    with compilespec.compile(
        model, spec="USER_PROVIDED", draft=draft, num_draft_tokens=3, **OPTIONS
    ) as engine:
        assert all(set(r.emitted_per_step) <= {1} for r in check_traffic(engine, asks[:4]))
        assert "user drafter draft, reads length_B" in engine.plan()["why"]


def test_what_does_not_fit_is_refused():
    model, _ = asked("llama")

    def compile_with(draft, **options):
        compilespec.compile(model, spec="user", draft=draft, **OPTIONS, **options)

    with pytest.raises(InvalidOption, match="got logits"):
        compile_with(lambda logits: logits)
    with pytest.raises(InvalidOption, match="aux_layers"):
        compile_with(lambda hidden_BE: hidden_BE)
    with pytest.raises(DraftMismatch, match="K=2"):
        compile_with(lambda history_BL: history_BL[:, :4], num_draft_tokens=2)
    with pytest.raises(DraftNotFound):
        compile_with(None)


# --- called on the host between steps ---


class HostScript:
    """Known sequences by heart; proposes `count(tokens)` of what follows, the last `wrong` off."""

    num_draft_tokens = 3

    def __init__(self, asks) -> None:
        self.sequences = [[*ask.prompt, *ask.tokens] for ask in asks]
        self.count, self.wrong, self.calls = (lambda tokens: 3), 0, 0

    def __call__(self, token_ids):
        self.calls += 1
        (known,) = [s for s in self.sequences if s[: len(token_ids)] == token_ids]
        following = known[len(token_ids) :][: self.count(token_ids)]
        token_ids.clear()  # ours to spoil
        right = len(following) - self.wrong
        return [token if i < right else token + 1 for i, token in enumerate(following)]


@pytest.fixture(scope="module")
def host():
    model, asks = asked("llama")
    script = HostScript(asks)
    with compilespec.compile(
        model,
        spec="user",
        draft=script,
        traced=False,
        num_draft_tokens=3,
        max_prefill_tokens=16,
        **OPTIONS,
    ) as engine:
        yield engine, script, asks


def test_drafts_of_the_host_are_all_accepted(host):
    engine, script, asks = host
    script.count = lambda tokens: 3
    for request in check_traffic(engine, asks):
        *whole, last = request.emitted_per_step or [1]
        assert whole == [4] * len(whole)
        assert 1 <= last <= 4
    assert "user drafter HostScript, called on the host between steps" in engine.plan()["why"]


def test_the_host_may_propose_fewer_or_none(host):
    engine, script, asks = host
    script.count = lambda tokens: len(tokens) % 4
    for request, ask in zip(check_traffic(engine, asks), asks, strict=True):
        num_tokens = len(ask.prompt) + 1
        for emitted in request.emitted_per_step[:-1]:
            assert emitted == num_tokens % 4 + 1
            num_tokens += emitted
    script.count = lambda tokens: 0
    for request in check_traffic(engine, asks):
        assert set(request.emitted_per_step) <= {1}
    script.count = lambda tokens: 3
    script.wrong = 1  # also after steps that proposed nothing: no draft of an earlier step is left
    for request in check_traffic(engine, asks):
        assert set(request.emitted_per_step[:-1]) <= {3}
    script.wrong = 0


def test_what_the_function_raises_ends_its_request_only(host):
    engine, script, asks = host

    def count(tokens):
        if len(tokens) == 43:  # before the second step of the second request
            raise OSError("the index is gone\nfor good")
        return len(tokens) % 4

    script.count = count
    params = [SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True) for a in asks]
    outputs = engine.generate([list(ask.prompt) for ask in asks], params)
    failed = [index for index, output in enumerate(outputs) if output.finish_reason == "error"]
    assert failed == [1]
    assert outputs[1].token_ids == list(asks[1].tokens[:3])
    error = outputs[1].error
    assert isinstance(error, DraftFailed)
    assert isinstance(error.__cause__, OSError)
    assert str(error).endswith("raised OSError: the index is gone")
    for index, (output, ask) in enumerate(zip(outputs, asks, strict=True)):
        if index != 1:
            assert output.token_ids == list(ask.tokens)
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        ([1, 2, 3, 4], "returned 4 drafts, the engine takes 3"),
        ([1, 2.5], "must return a sequence of token ids"),
        ("abc", "must return a sequence of token ids"),
        (7, "it returned int"),
        ([True], "it returned list"),
    ],
)
def test_what_is_no_list_of_drafts_is_named(host, monkeypatch, drafts, words):
    engine, _, _ = host
    monkeypatch.setattr(HostScript, "__call__", lambda self, token_ids: drafts)
    (output,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=4))
    assert output.finish_reason == "error"
    assert words in str(output.error)


@pytest.mark.parametrize(
    "drafts", [None, (), torch.tensor([VOCAB, 3]), [-1, 3]], ids=["None", "empty", "outside", "PAD"]
)
def test_what_means_no_draft(host, monkeypatch, drafts):
    engine, _, asks = host
    monkeypatch.setattr(HostScript, "__call__", lambda self, token_ids: drafts)
    for request in check_traffic(engine, asks[4:]):
        assert set(request.emitted_per_step) <= {1}


def test_options_of_the_host_are_checked():
    model, _ = asked("llama")
    for options, words in (
        ({"traced": "no"}, "traced must be"),
        ({"traced": False, "aux_layers": (1,)}, "leave out aux_layers"),
    ):
        with pytest.raises(InvalidOption, match=words):
            compilespec.compile(model, spec="user", draft=lambda ids: ids, **OPTIONS, **options)


# --- a user's method: heads over the last hidden state, after Medusa ---


class MedusaHeads(DirectDrafter):
    """Head i: a residual block over the target's last hidden state, then its own product."""

    aux_layers = (FINAL_NORM,)

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_draft_tokens = num_heads
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        self.heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads)
        )

    def draft(self, hidden_BE: Tensor) -> Tensor:
        tokens = [
            head(hidden_BE + nn.functional.silu(block(hidden_BE))).argmax(-1)
            for block, head in zip(self.blocks, self.heads, strict=True)
        ]
        return torch.stack(tokens, 1)


class Medusa:
    """What `spec=` needs: capabilities, and a way from `draft=` to a drafter."""

    capabilities = Capabilities(
        name="medusa", kind="direct", needs_draft_weights=True, reads_hidden_states=True
    )

    def load(self, draft, target, options):
        heads = draft if isinstance(draft, nn.Module) else torch.load(draft, weights_only=False)
        return heads.to(target.device, target.dtype)


def test_a_method_of_ones_own_runs_through_spec():
    model, asks = asked("llama")
    heads = MedusaHeads(48, VOCAB, num_heads=3)
    with compilespec.compile(
        model, spec=Medusa(), draft=heads, num_draft_tokens=3, **OPTIONS
    ) as engine:
        check_traffic(engine, asks)
        assert engine.plan()["method"] == "medusa"
        assert engine.plan()["num_draft_tokens"] == 3


def test_heads_read_the_row_that_gave_the_newest_token():
    """A head that is the target's own repeats the newest token: seen through `hidden_BE` alone."""
    model, asks = asked("qwen3_moe")
    head = model.lm_head.weight.detach().clone()

    def draft(hidden_BE: Tensor, history_BL: Tensor, length_B: Tensor) -> Tensor:
        newest = history_BL.gather(1, length_B.long().unsqueeze(1) - 1)
        repeated = (hidden_BE @ head.T).argmax(-1, keepdim=True)
        return torch.where(newest == repeated, right(history_BL, length_B), -1)

    right = Script(([*ask.prompt, *ask.tokens] for ask in asks), 3)
    with compilespec.compile(
        model, spec=MethodConfig(name="user", options={"aux_layers": (FINAL_NORM,)}), draft=draft,
        num_draft_tokens=3, max_prefill_tokens=16, **OPTIONS,
    ) as engine:  # fmt: skip
        for request in check_traffic(engine, asks):
            assert set(request.emitted_per_step[:-1]) <= {4}


def test_every_pass_is_what_its_reference_says_when_drafts_come_from_the_host():
    model, _ = asked("llama")
    program = compilespec.trace(
        model, "user", draft=lambda ids: ids[:2], traced=False, num_draft_tokens=2,
        max_batch_size=3, max_seq_len=48, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)
