"""Cases of the test catalogue without a separate file: T05, T17, T18, T24, T29."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.lowering.artifacts import artifact_key
from compilespec.methods import mtp
from compilespec.methods.eagle3 import random_head, save_head
from compilespec.methods.recycled import RecycledDrafter
from tests.support.models import Ask, ask_all, target_info, tiny_target
from tests.support.seen_drafts import drafts_by_tokens
from tests.support.windowed import fresh_drafts

SIZES = ((5, 18), (23, 25), (2, 30))
MAX_SEQ_LEN = 64
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask]]:
    model = tiny_target("llama", num_layers=3)
    return model, ask_all(model, SIZES)


def drafts_by_length(engine: Any, asks: list[Ask]) -> dict[tuple[int, ...], list[int]]:
    return drafts_by_tokens(engine, asks, MAX_SEQ_LEN)


@pytest.mark.parametrize(("own_embedding", "rows"), [(True, None), (False, 61)])
def test_t05_ids_are_mapped_once_and_shared_weights_are_one(target, own_embedding, rows):
    """Reduced and whole vocabularies, own and shared embedding: drafts are target ids."""
    model, asks = target
    info = target_info(model, MAX_SEQ_LEN)
    head = random_head(
        info, aux_layers=(0, 1, 2), draft_vocab_size=rows, own_embedding=own_embedding
    )
    with compilespec.compile(
        model, spec="eagle3", draft=head, num_draft_tokens=2, **OPTIONS
    ) as engine:
        drafts = {token for one in drafts_by_length(engine, asks).values() for token in one}
        program = engine._executor.lowered.program
    allowed = set(range(info.vocab_size))
    if rows is not None:
        allowed = {i + int(offset) for i, offset in enumerate(head.d2t)}
        assert len(allowed) == rows
        assert max(allowed) >= rows, "no id is moved: the map would not be seen"
    assert drafts <= allowed
    shape = model.get_input_embeddings().weight.shape
    embeddings = [name for name, w in program.weights.items() if "embed" in name]
    assert len(embeddings) == 1 + own_embedding, embeddings
    assert all(program.weights[name].shape == shape for name in embeddings)


class OneOutput(RecycledDrafter):
    """A head that gives one tensor for both uses, or two different ones (A3)."""

    def __init__(self, model: nn.Module, is_tuple: bool) -> None:
        super().__init__()
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.mix = nn.Linear(96, 48, bias=False, dtype=torch.float64)
        self.num_draft_tokens, self.aux_layers, self.is_tuple = 4, (2,), is_tuple

    def combine(self, aux: Tensor) -> Tensor:
        return aux

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed = self.mix(torch.cat([self.embedding(input_ids), hidden], -1))
        return (mixed, mixed.tanh()) if self.is_tuple else (mixed, mixed)

    def propose(self, head_input: Tensor) -> Tensor:
        return self.head(head_input).argmax(-1).to(torch.int32)


@pytest.mark.parametrize("is_tuple", [False, True])
def test_t17_one_tensor_and_two_from_a_head(target, is_tuple):
    """K > 1: the hidden state that goes on is the right one of the two (H-19)."""
    model, asks = target
    torch.manual_seed(4)
    drafter = OneOutput(model, is_tuple)
    with compilespec.compile(model, spec="eagle3", draft=drafter, **OPTIONS) as engine:
        drafts = drafts_by_length(engine, asks)
    assert len(drafts) > 20
    for tokens, got in drafts.items():
        ids = torch.tensor([tokens])
        states = model.model(ids[:, :-1], output_hidden_states=True).hidden_states
        hidden, token, wanted = states[2][:, -1:], ids[:, -1:], []
        for _ in range(4):
            head_input, hidden = drafter(token, token, hidden)
            wanted.append(int(drafter.propose(head_input[:, 0])))
            token = torch.tensor([wanted[-1:]])
        assert got == wanted


def test_t18_each_step_has_its_own_head(target):
    """More steps than modules: step i takes module i mod 2, head and all (S1, S2)."""
    model, asks = target
    drafter = mtp.random_modules(target_info(model, MAX_SEQ_LEN), 2, own_head=True)
    heads = [step.lm_head.weight for step in drafter.steps]
    assert not torch.equal(*heads)
    with compilespec.compile(
        model, spec="mtp_multi", draft=drafter, num_draft_tokens=5, **OPTIONS
    ) as engine:
        drafts = drafts_by_length(engine, asks)
    assert len(drafts) > 20
    for tokens, got in drafts.items():
        assert got == fresh_drafts(model, drafter, list(tokens), 5)


def test_t24_fifty_steps_on_the_device_equal_the_host_loop(target):
    """[bonus | drafts] go from step to step on the device: nothing is handed in but the row."""
    model, _ = target
    ask = ask_all(model, ((9, 55),))[0]
    options = {**OPTIONS, "max_seq_len": 80}
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.get_output_embeddings().weight.add_(
            torch.randn(97, 48, generator=torch.Generator().manual_seed(1)) * 0.1
        )
    with compilespec.compile(
        model, spec="draft_model", draft=draft, num_draft_tokens=2, **options
    ) as engine:
        params = SamplingParams(max_new_tokens=55, ignore_eos=True)
        request = engine.submit(list(ask.prompt), params)
        engine.step()
        tokens, runner = list(request.output_token_ids), engine._executor
        free = [b for b in range(engine.geometry.config.num_blocks) if b not in request.blocks]
        more = engine.geometry.config.blocks_per_row - len(request.blocks)
        runner.add_blocks(request.row, len(request.blocks), free[:more])  # for all 50 steps
        for _ in range(50):
            if len(tokens) >= 55:
                break
            tokens += runner.decode([request.row])[0]
        assert tokens[:55] == list(ask.tokens)
        engine.abort(request)
        stop = ask.tokens[20]
        first = ask.tokens.index(stop)
        (output,) = engine.generate(
            [list(ask.prompt)],
            SamplingParams(max_new_tokens=55, ignore_eos=True, stop_token_ids=(stop,)),
        )
        assert output.token_ids == list(ask.tokens[: first + 1])
        assert output.finish_reason == "stop"


def test_t29_loads_are_deterministic_and_drafters_have_artifacts_of_their_own(
    target, tmp_path: Path
):
    model, _ = target
    info = target_info(model, MAX_SEQ_LEN)
    head = random_head(info, aux_layers=(0, 1, 2), draft_vocab_size=61)
    save_head(head, tmp_path)
    sizes = {"num_draft_tokens": 2, "max_seq_len": MAX_SEQ_LEN}
    programs = [
        compilespec.trace(model, spec="eagle3", draft=str(tmp_path), **sizes) for _ in range(2)
    ]
    assert [str(name) for name in programs[0].weights] == [str(n) for n in programs[1].weights]
    assert programs[0].buffers == programs[1].buffers
    other = compilespec.trace(
        model, spec="eagle3", draft=random_head(info, aux_layers=(0, 1, 3)), **sizes
    )
    keys = [artifact_key(program.graphs["decode"], program, {}) for program in (*programs, other)]
    assert keys[0] == keys[1] != keys[2]
    weights = programs[0].weights
    places = [(w.untyped_storage().data_ptr(), w.storage_offset()) for w in weights.values()]
    assert len(places) == len(set(places)), "a weight is held twice"
    embedding = model.get_input_embeddings().weight
    assert any(w.data_ptr() == embedding.data_ptr() for w in weights.values())
