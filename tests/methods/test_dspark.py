"""DSpark: drafts chosen in turn over a block, against the formulas of its Markov heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, NotSupported
from compilespec.inspect.bounds import prove
from compilespec.methods.dspark import METHOD, DSparkDrafter, random_drafter
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo
from tests.support.blocks import block_after
from tests.support.models import Ask, ask_all, tiny_target
from tests.support.models import target_info as info_of
from tests.support.seen_drafts import drafts_by_tokens

DFLASH = Path(__file__).parents[1] / "data" / "oracles" / "b_dflash"
SIZES = ((5, 18), (23, 25), (2, 20), (33, 9))
MAX_SEQ_LEN = 64
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip
KINDS = ("vanilla", "gated", "rnn")


def biases(drafter: DSparkDrafter, hidden_WD: Tensor, before_W: Tensor) -> Tensor:
    """The bias of each row of a block whose tokens are known, [W, Vd], as it is trained."""
    head, before = drafter.markov_head, drafter.markov_head.markov_w1(before_W)
    if head.kind == "vanilla":
        return head.markov_w2(before)
    if head.kind == "gated":
        joint = torch.cat([hidden_WD, before], 1)
        return head.markov_w2(torch.sigmoid(head.gate_proj(joint)) * before)
    state, rows = torch.zeros_like(before[0]), []
    for row, embedded in zip(hidden_WD, before, strict=True):
        gate, new, out = head.joint_proj(torch.cat([state, embedded, row])).chunk(3)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
        rows.append(head.markov_w2(torch.tanh(out)))
    return torch.stack(rows)


@torch.no_grad()
def assert_chosen(drafter: DSparkDrafter, hidden_WD: Tensor, token: int, drafts: list[int]) -> None:
    """Each draft is the best of the row's logits with the bias after the draft before it."""
    from_anchor = drafter.config.sample_from_anchor
    before = [token, *drafts] if from_anchor else [token, token, *drafts]
    before_W = torch.tensor(before[: len(hidden_WD)])
    biased = drafter.logits(hidden_WD[: len(before_W)]) + biases(
        drafter, hidden_WD[: len(before_W)], before_W
    )
    rows = biased[int(not from_anchor) :][: len(drafts)]
    ids = drafter.draft_ids
    best = rows.argmax(-1)
    assert drafts == (best if ids is None else ids[best]).tolist()


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask]]:
    model = tiny_target("llama", num_layers=3)
    return model, ask_all(model, SIZES)


def drafter_of(model: nn.Module, kind: str, **fields: Any) -> DSparkDrafter:
    known = {"block_size": 4, "draft_vocab_size": 61, "aux_layers": (0, 3), "num_layers": 1}
    info = info_of(model, MAX_SEQ_LEN)
    return random_drafter(info, markov_type=kind, **{**known, **fields})


@pytest.mark.parametrize(
    ("kind", "from_anchor"),
    [
        pytest.param("vanilla", True, marks=pytest.mark.slow),
        pytest.param("gated", False, marks=pytest.mark.slow),
        pytest.param("gated", True, marks=pytest.mark.slow),
        pytest.param("rnn", True, marks=pytest.mark.slow),
        ("rnn", False),
    ],
)
def test_drafts_are_chosen_in_turn_on_true_rows(target, kind, from_anchor) -> None:
    model, asks = target
    draft = drafter_of(model, kind, sample_from_anchor=from_anchor)
    with compilespec.compile(model, "dspark", draft=draft, num_draft_tokens=3, **OPTIONS) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
    assert len(found) > 40
    for tokens, drafts in found.items():
        assert_chosen(draft, block_after(model, draft, tokens), tokens[-1], drafts)


def test_the_markov_head_changes_drafts(target) -> None:
    model, _ = target
    draft = drafter_of(model, "vanilla", draft_vocab_size=None)
    hidden = block_after(model, draft, tuple(range(5, 25)))
    plain = draft.propose(hidden).tolist()
    chosen, token = [], torch.tensor([24])
    state = draft.state(hidden[None], token)
    for row in hidden[:, None]:
        features, state = draft.follow(row, token, state)
        token = draft.biased(draft.logits(row), features).argmax(-1)
        chosen.append(int(token))
    assert_chosen(draft, hidden, 24, chosen)
    assert chosen != plain


@pytest.mark.parametrize("acceptance", ["auto", pytest.param("rejection", marks=pytest.mark.slow)])
def test_the_loop_is_what_its_reference_says(target, acceptance) -> None:
    model, _ = target
    program = compilespec.trace(
        model, "dspark", draft=drafter_of(model, "rnn"), num_draft_tokens=3, acceptance=acceptance,
        max_batch_size=4, max_seq_len=43, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program, passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    assert {bound.status for bound in prove(program).bounds} == {"proved"}


@pytest.mark.parametrize("rank", [8, 0])
def test_the_confidence_head_says_how_sure_the_drafts_are(target, rank) -> None:
    """Where K is chosen by it: a step of one K does not even hold its weight."""
    model, _ = target
    draft = drafter_of(model, "rnn", markov_rank=rank)
    nn.init.normal_(draft.confidence_head.proj.weight, std=3.0)
    sizes = {"max_batch_size": 4, "max_seq_len": 43, "max_prefill_tokens": 64}
    single, several = (
        compilespec.trace(model, "dspark", draft=draft, num_draft_tokens=k, **sizes)
        for k in (3, (1, 3))
    )
    head = "draft.confidence_head.proj.weight"
    assert head not in single.weights
    assert head in several.weights
    passes = ["splice_draft_loop", "report_evidence", "commit_state"]
    report = compilespec.verify(several, passes=passes)
    assert report.ok, str(report)
    assert {bound.status for bound in prove(several).bounds} == {"proved"}


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_are_those_of_plain_decoding(target, kind) -> None:
    model, asks = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, extra in (("none", {}), ("dspark", {"draft": drafter_of(model, kind)})):
        with compilespec.compile(model, spec, **extra, **OPTIONS) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


# --- checkpoints ---


def target_info() -> TargetInfo:
    return TargetInfo(
        hidden_size=32, vocab_size=96, num_layers=8, dtype=torch.float32,
        device=torch.device("cpu"), embedding=torch.randn(96, 32), lm_head=torch.zeros(96, 32),
    )  # fmt: skip


def checkpoint(directory: Path, kind: str = "rnn", **config: Any) -> Path:
    """DFlash's oracle with the tensors of two heads."""
    rank = 8
    raw = json.loads((DFLASH / "config.json").read_text()) | {
        "speculators_model_type": "dspark", "markov_rank": rank, "markov_head_type": kind,
        "sample_from_anchor": None,
    }  # fmt: skip
    del raw["speculators_config"]
    tensors = load_file(DFLASH / "model.safetensors")
    shapes = {"markov_w1.weight": (96, rank), "markov_w2.weight": (48, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, 32 + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + 32), "joint_proj.bias": (3 * rank,)}
    tensors |= {f"markov_head.{name}": torch.randn(shape) for name, shape in shapes.items()}
    tensors["confidence_head.proj.weight"] = torch.randn(1, 32 + rank)
    tensors["confidence_head.proj.bias"] = torch.randn(1)
    (directory / "config.json").write_text(json.dumps(raw | config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_all_heads_are_read(tmp_path, kind) -> None:
    drafter = get_method("dspark").load(checkpoint(tmp_path, kind), target_info(), {})
    config = drafter.config
    assert (config.markov_type, config.markov_rank, config.has_confidence) == (kind, 8, True)
    assert config.sample_from_anchor  # unlike DFlash's, a draft of the newest token's row
    assert drafter.num_draft_tokens == drafter.num_proposing_rows == 4
    hidden, token = torch.randn(3, 32), torch.tensor([5, 95, 0])
    head, raw = drafter.confidence_head.proj, drafter.markov_head.markov_w1.weight[token]
    wanted = torch.cat([hidden, raw], 1) @ head.weight[0] + head.bias
    torch.testing.assert_close(drafter.confidence(hidden, token), wanted)
    assert f"Markov head {kind} of rank 8, confidence head" in drafter.describe()


def test_a_drafter_without_a_markov_head_is_dflash(tmp_path, target) -> None:
    model, _ = target
    draft = drafter_of(model, "vanilla", markov_rank=0)
    program = compilespec.trace(model, "dspark", draft=draft, num_draft_tokens=2)
    assert program.notes
    assert draft.markov_head is None


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"markov_head_type": "gated"}, CheckpointError, "missing: markov_head.gate_proj"),
        ({"markov_head_type": "lstm"}, NotSupported, "lstm"),
        ({"markov_rank": -1}, CheckpointError, "markov_rank must be"),
        ({"markov_rank": 9}, CheckpointError, "wrong shape"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, CheckpointError, "needs a Mark"),
        ({"enable_confidence_head": False}, CheckpointError, "unexpected: confidence_head"),
        ({"speculators_model_type": "dflash"}, NotSupported, "spec='dflash'"),
        ({"mask_token_id": None}, CheckpointError, "mask_token_id"),
    ],
)  # fmt: skip
def test_faults_of_a_checkpoint_are_named(tmp_path, config, error, says) -> None:
    with pytest.raises(error, match=says) as caught:
        METHOD.load(checkpoint(tmp_path, **config), target_info(), {})
    assert "\n" not in str(caught.value)
