"""Lost drafts by cause: planted faults are found and named first."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidRequest
from compilespec.inspect.why.asked import other_forms
from compilespec.inspect.why.causes import Findings, LostStep, assign
from compilespec.inspect.why.reading import DraftReader
from compilespec.inspect.why.records import KNOWN
from compilespec.inspect.why.texts import LostDrafts
from compilespec.methods.parts.d2t import target_ids
from compilespec.tracing.weight_marks import fingerprint
from compilespec.training.trainer import note_target

PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
)
GREEDY = SamplingParams(max_new_tokens=72, ignore_eos=True)
FAULTS = {name for name, (is_fault, *_) in KNOWN.items() if is_fault}


def build(spec="eagle3", **keywords):
    return compilespec.compile(
        "demo", spec, backend="eager", num_draft_tokens=3, dtype="float32", max_batch_size=4,
        max_seq_len=192, progress=False, **keywords,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with build() as made:
        yield made


@pytest.fixture(scope="module")
def healthy(engine):
    return engine.explain(PROMPTS, GREEDY)


def first(explanation):
    return explanation.causes[0].name


def drafter_of(engine):
    return engine._options.program.drafter


def test_a_healthy_pair_has_no_fault(healthy):
    assert not FAULTS & {one.name for one in healthy.causes}
    assert healthy.acceptance_length > 2.5
    assert len(healthy.tried) >= 6


def test_every_lost_draft_has_one_cause(healthy):
    assert sum(one.num_lost for one in healthy.causes) == healthy.num_lost
    most = healthy.num_steps * 3
    kept = healthy.acceptance_length * healthy.num_steps - healthy.num_steps
    assert healthy.num_lost == most - round(kept)


def test_its_forms_agree(healthy):
    known = json.loads(json.dumps(healthy.as_dict()))
    assert [one["name"] for one in known["causes"]] == [one.name for one in healthy.causes]
    for one in healthy.causes:
        assert f"{one.name}: {one.title}" in str(healthy)
        assert one.cure in str(healthy)


@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [("aux_layers", (3, 5, 6), "tap_layers"), ("norm_before_residual", True, "norm")],
)
def test_a_wrong_option_is_found(option, value, cause, healthy):
    with build(**{option: value}) as planted:
        found = planted.explain(PROMPTS, GREEDY)
    assert first(found) == cause
    assert found.acceptance_length <= healthy.acceptance_length
    right = {"tap_layers": "hs[2, 4, 5]", "norm": "norm_before_residual=False"}[cause]
    assert right in found.causes[0].evidence


@contextlib.contextmanager
def changed(engine, values):
    """Tensors of the drafter with other values, in its module and in the engine's weights."""
    module = drafter_of(engine).state_dict(keep_vars=True)
    weights = engine.executor.weights
    held = {name: [module[name].data] for name in values}
    for name, tensors in held.items():
        assert f"draft.{name}" in weights or name == "d2t"
        tensors += [one for key, one in weights.items() if key == f"draft.{name}"]
    before = {name: tensors[0].clone() for name, tensors in held.items()}
    ids = weights["draft.coupled_ids"]  # the target ids that d2t leads to
    ids_before = ids.clone()
    for name, tensors in held.items():
        for one in tensors:
            one.copy_(values[name])
    if "d2t" in values:
        ids.copy_(target_ids(values["d2t"]))
    try:
        yield
    finally:
        for name, tensors in held.items():
            for one in tensors:
                one.copy_(before[name])
        ids.copy_(ids_before)


def test_permuted_ids_are_found(engine, healthy):
    d2t = drafter_of(engine).d2t
    ids = target_ids(d2t)
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    with changed(engine, {"d2t": mixed - torch.arange(len(ids))}):
        found = engine.explain(PROMPTS, GREEDY)
    assert found.acceptance_length < 1.2 < healthy.acceptance_length
    assert first(found) == "draft_ids"
    assert "ascending" in found.causes[0].evidence


def test_ascending_ids_of_another_head_are_found(engine):
    """Only how rows are used can tell: each id is another token's, and the order is kept."""
    d2t = drafter_of(engine).d2t
    ids = target_ids(d2t)
    shifted = (ids + 1).clamp(max=2047)
    with changed(engine, {"d2t": shifted - torch.arange(len(ids))}):
        found = engine.explain(PROMPTS, GREEDY)
    assert first(found) == "draft_ids"
    assert "meant before" in found.causes[0].evidence


def test_a_norm_that_was_never_loaded_is_found(engine):
    norm = drafter_of(engine).layers[0].hidden_norm
    with changed(engine, {"layers.0.hidden_norm.weight": torch.ones_like(norm.weight)}):
        found = engine.explain(PROMPTS, GREEDY)
    assert first(found) == "norm"
    assert "layers.0.hidden_norm" in found.causes[0].evidence


def test_a_hole_in_the_drafters_cache_is_found(engine, monkeypatch):
    buffers, launch = engine.executor.buffers, engine.executor.launch_decode

    def with_hole(rows, count=None):
        for name, buffer in buffers.items():
            if name.startswith("cache.draft"):
                buffer[:] = 0
        return launch(rows, count)

    monkeypatch.setattr(engine.executor, "launch_decode", with_hole)
    found = engine.explain(PROMPTS, GREEDY)
    engine.reset_prefix_cache()
    assert first(found) == "stale_cache"


def test_a_head_of_another_fine_tune_is_found(engine):
    """The target learns other texts for a few steps; the head stays."""
    model = copy.deepcopy(compilespec.tracing.load.load_target("demo", dtype=torch.float32).model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = " ".join(f"{title}; {cure}." for _, title, cure in KNOWN.values())
    ids = torch.tensor([engine.tokenizer.encode(text)[:200]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.update_weights(model.state_dict())
    found = engine.explain(PROMPTS, GREEDY)
    engine.update_weights(before)
    assert first(found) == "other_model"
    assert found.causes[0].num_lost > 0
    assert "learned from weights" in found.causes[0].evidence


def test_sampling_is_no_fault(engine):
    drawn = dataclasses.replace(GREEDY, temperature=1.0, seed=1)
    found = engine.explain(PROMPTS, drawn)
    names = [one.name for one in found.causes]
    assert names[0] == "sampling"
    assert not FAULTS & set(names)


def test_recorded_outputs_are_read_as_they_are(engine, healthy):
    outputs = engine.generate(list(PROMPTS), GREEDY)
    assert engine.explain(outputs).as_dict() == healthy.as_dict()


def test_what_cannot_be_explained_is_refused(engine):
    with pytest.raises(InvalidRequest, match="no text has two verify steps"):
        engine.explain(PROMPTS[0], SamplingParams(max_new_tokens=2))
    with pytest.raises(InvalidRequest, match="n=1"):
        engine.explain(PROMPTS[0], SamplingParams(max_new_tokens=32, n=2, temperature=1.0))
    request = engine.submit("x = ")
    with pytest.raises(InvalidRequest, match="finish or abort"):
        engine.explain(PROMPTS)
    engine.abort(request)


class Chat:
    """A tokenizer of characters with a chat template that can think."""

    chat_template = "{{ enable_thinking }}"
    all_special_tokens = ("^", "$")
    bos_token = "^"

    def encode(self, text, add_special_tokens=True):
        return [ord(one) for one in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages, add_generation_prompt=False, tokenize=True, return_dict=False,
        enable_thinking=True,
    ):  # fmt: skip
        text = "".join(f"^{one['role']}:{one['content']}$" for one in messages)
        text += ("^assistant:" + "" if enable_thinking else "^assistant:<>") * add_generation_prompt
        return self.encode(text) if tokenize else text


@pytest.mark.parametrize(
    ("prompt", "lacks", "other"),
    [
        ("hi", "the chat template", "^user:hi$^assistant:"),
        ("^user:hi$", "the generation prompt, where an answer begins,", "^user:hi$^assistant:"),
        ("^user:hi$^assistant:", "the other thinking mode", "^user:hi$^assistant:<>"),
        ("^user:hi$^assistant:<>", "the other thinking mode", "^user:hi$^assistant:"),
    ],
)
def test_forms_of_prompts(prompt, lacks, other):
    chat = Chat()
    (found,) = other_forms(chat.encode(prompt), chat).items()
    assert found == (lacks, tuple(chat.encode(other)))


def test_quantized_weights_are_tried_as_they_are_stored():
    with build(draft_quantize="int8_dynamic") as quantized:
        found = quantized.explain(PROMPTS[:1], GREEDY)
    told = [*found.tried, *(one.evidence for one in found.causes)]
    assert any("the weights of the checkpoints" in one for one in told)


def piece(place=1, **known):
    lost = LostDrafts(text=0, place=place, index=9, count=1)
    usual = {"is_best": True, "odds": 0.1, "is_known": True, "is_right": False}
    return LostStep(lost=lost, params=known.pop("params", GREEDY), **{**usual, **known})


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({}, "drafter"),
        ({"is_known": False}, "draft_vocabulary"),
        ({"odds": 0.6}, "near_tie"),
        ({"place": 2, "is_right": True}, "later_places"),
        ({"is_best": False, "params": SamplingParams(temperature=1.0)}, "sampling"),
        ({"is_right": True, "params": SamplingParams(temperature=1.0)}, "sampling"),
        ({"is_best": False, "odds": 2.0}, "sampling"),  # penalties, or a bias
        ({"is_best": False, "params": SamplingParams(guide={"type": "json_object"})}, "guide"),
    ],
)
def test_the_order_of_causes(known, cause):
    findings = Findings(num_draft_tokens=3, reader=None)
    findings.pieces.append(piece(**known))
    (found,) = assign(findings)
    assert (found.name, found.num_lost) == (cause, 1)


def test_places_past_the_drafters_positions_are_long():
    class Config:
        max_position_embeddings = 9

    class Drafter:
        config = Config()

    findings = Findings(num_draft_tokens=3, reader=DraftReader(drafter=Drafter()))
    findings.pieces.append(piece())
    assert assign(findings)[0].name == "long_context"
    Config.max_position_embeddings = 10
    assert assign(findings)[0].name == "drafter"


def test_a_digest_knows_weights_in_any_width():
    weights = {"a": torch.randn(40, 30), "b": torch.randn(7), "c": torch.randn(5, 3, 2)}
    own = fingerprint(weights)
    assert own == fingerprint({name: one.bfloat16() for name, one in weights.items()})
    assert own == fingerprint({**weights, "b": torch.zeros(7)})  # vectors and scales do not count
    other = weights["a"] + 0.1
    assert fingerprint({**weights, "a": other}) != own

    class Quantized(torch.Tensor):
        pass

    assert fingerprint({**weights, "a": weights["a"].as_subclass(Quantized)}) is None


def test_a_saved_drafter_knows_its_target(tmp_path):
    note_target(tmp_path, "abc")  # a folder without config.json is left alone
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 8}')
    note_target(tmp_path, None)
    assert json.loads(file.read_text()) == {"hidden_size": 8}
    note_target(tmp_path, "abc")
    assert json.loads(file.read_text()) == {"hidden_size": 8, "target_fingerprint": "abc"}
