"""Medusa: heads over the target's last hidden state, in every layout, and in the step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.inspect.bounds import prove
from compilespec.methods.medusa import METHOD, MedusaDrafter, random_heads
from tests.support.models import (
    VOCAB,
    Ask,
    ask_all,
    assert_nothing_held,
    check_preempted,
    target_info,
    tiny_target,
)
from tests.support.seen_drafts import drafts_by_tokens

SIZES = ((5, 18), (23, 25), (2, 30), (33, 9), (17, 22))
MAX_SEQ_LEN = 64
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip
NUM_HEADS, NUM_BLOCKS = 3, 2
CONFIG = {
    "medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_BLOCKS,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask], MedusaDrafter]:
    """A target, its tokens, and heads of which some drafts are right."""
    model = tiny_target("llama", num_layers=2)
    heads = random_heads(target_info(model, MAX_SEQ_LEN), NUM_HEADS, num_blocks=NUM_BLOCKS)
    return model, ask_all(model, SIZES), heads


def published(heads: MedusaDrafter) -> dict[str, Tensor]:
    """The tensors by the authors' names."""
    tensors = {}
    for i, head in enumerate(heads.heads):
        for j, block in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"] = block.weight
            tensors[f"{i}.{j}.linear.bias"] = block.bias
        tensors[f"{i}.{len(head.blocks)}.weight"] = head.lm_head.weight
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def logits_of(tensors: dict[str, Tensor], head: int, x: Tensor) -> Tensor:
    """The authors' head, from its tensors."""
    for j in range(NUM_BLOCKS):
        names = (f"{head}.{j}.linear.weight", f"{head}.{j}.linear.bias")
        x = x + functional.silu(functional.linear(x, *(tensors[name] for name in names)))
    return x @ tensors[f"{head}.{NUM_BLOCKS}.weight"].T


def as_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        i, j, *rest = name.split(".")
        new = f"lm_heads.{i}.weight" if rest == ["weight"] else f"blocks.{i}.layers.{j}.{rest[-1]}"
        named[new] = tensor
    return named


def saved(directory: Path, tensors: dict[str, Tensor], config: Any = CONFIG, to: str = "") -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    place = directory / (to or "medusa_lm_head.safetensors")
    if place.suffix == ".safetensors":
        save_file(tensors, place)
    else:
        torch.save(tensors, place)
    return directory


# --- checkpoints ---


@pytest.mark.parametrize("layout", ["pickle", "safetensors", "medusa_head", "medusa_heads", "vllm"])
def test_every_layout_gives_the_authors_logits(tmp_path, target, layout) -> None:
    model, _, heads = target
    tensors, config, to = published(heads), dict(CONFIG), "model.safetensors"
    named = tensors
    if layout == "vllm":
        named = as_vllm(tensors)
        config = {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_BLOCKS, "medusa_fc_bias": True}
    elif layout.startswith("medusa"):
        named = {f"{layout}.{name}": tensor for name, tensor in tensors.items()}
        named["model.norm.weight"] = torch.ones(48)  # of the whole model beside them
    else:
        to = "medusa_lm_head." + {"pickle": "pt"}.get(layout, layout)
    info = target_info(model, MAX_SEQ_LEN)
    drafter = METHOD.load(saved(tmp_path, named, config, to), info, {})
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.num_draft_tokens == NUM_HEADS
    x = torch.randn(7, info.hidden_size, dtype=info.dtype)
    for index, head in enumerate(drafter.heads):
        wanted = logits_of(tensors, index, x)
        torch.testing.assert_close(head.logits(x), wanted)
        assert head.propose(x).tolist() == wanted.argmax(-1).tolist()


def test_all_heads_of_a_file_are_taken_and_may_share_their_product(tmp_path, target) -> None:
    """The authors' config.json says fewer heads than there are; vLLM's may keep one product."""
    model, _, heads = target
    info, tensors = target_info(model, MAX_SEQ_LEN), published(heads)
    few = {**CONFIG, "medusa_num_heads": 2}
    assert METHOD.load(saved(tmp_path, tensors, few), info, {}).num_draft_tokens == NUM_HEADS
    named = as_vllm(tensors)
    one = {
        name: x
        for name, x in named.items()
        if name not in ("lm_heads.1.weight", "lm_heads.2.weight")
    }
    drafter = METHOD.load(saved(tmp_path, one, {"original_lm_head": True}), info, {})
    for head in drafter.heads:
        assert torch.equal(head.lm_head.weight, named["lm_heads.0.weight"])


def test_a_reduced_vocabulary_drafts_ids_of_the_target(tmp_path, target) -> None:
    model, asks, heads = target
    named = as_vllm(published(heads))
    named["token_map"] = torch.arange(3, VOCAB, 2)
    info = target_info(model, MAX_SEQ_LEN)
    drafter = METHOD.load(saved(tmp_path, named, {"truncated_vocab_size": 47}), info, {})
    x = torch.randn(7, info.hidden_size, dtype=info.dtype)
    wanted = logits_of(published(heads), 0, x)[:, 3::2].argmax(-1) * 2 + 3
    assert drafter.heads[0].propose(x).tolist() == wanted.tolist()
    with compilespec.compile(
        model, "medusa", draft=drafter, num_draft_tokens=3, **OPTIONS
    ) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
    assert {token for drafts in found.values() for token in drafts} <= set(range(3, VOCAB, 2))


@pytest.mark.parametrize(
    ("config", "tensors", "error", "says"),
    [
        ({"medusa_num_heads": 4}, {}, CheckpointError, "says 4 heads of 2 .* of 3 of 2; copy"),
        ({"medusa_num_layers": 1}, {}, CheckpointError, "says 3 heads of 1 .* of 3 of 2; copy"),
        ({"logit_scale": 0.5}, {}, NotSupported, "logit_scale=0.5"),
        ({}, {"1.0.linear.bias": None}, CheckpointError, "missing: heads.1.blocks.0.bias"),
        ({}, {"fc.weight": torch.ones(1)}, CheckpointError, "unexpected: fc.weight"),
        ({}, {"0.2.weight": torch.ones(VOCAB, 40)}, DraftMismatch, "width 40, the target's are 48"),
        ({}, {"0.2.weight": torch.ones(98, 48)}, DraftMismatch, "is 98, the target's is 97"),
        ({}, {"1.2.weight": torch.ones(VOCAB, 40)}, CheckpointError, "wrong shape: heads.1"),
        ({}, {"token_map": torch.tensor([1, 1])}, CheckpointError, "different ids below 97"),
    ],
    ids=[
        "heads", "blocks", "scale", "no bias", "foreign", "narrow", "vocabulary", "one narrow",
        "ids twice",
    ],
)  # fmt: skip
def test_faults_of_a_checkpoint_are_named(tmp_path, target, config, tensors, error, says) -> None:
    model, _, heads = target
    named = {k: x for k, x in (published(heads) | tensors).items() if x is not None}
    with pytest.raises(error, match=says) as caught:
        METHOD.load(saved(tmp_path, named, CONFIG | config), target_info(model, MAX_SEQ_LEN), {})
    assert "\n" not in str(caught.value)


def test_what_is_no_checkpoint_is_refused(tmp_path, target) -> None:
    model, _, heads = target
    info = target_info(model, MAX_SEQ_LEN)
    saved(tmp_path, {"midlayer.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"not a Medusa checkpoint: .* got midlayer"):
        METHOD.load(tmp_path, info, {})
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights; expected one of medusa"):
        METHOD.load(tmp_path, info, {})
    with pytest.raises(InvalidOption, match="a directory or a MedusaDrafter, got Linear"):
        METHOD.load(nn.Linear(2, 2), info, {})
    with pytest.raises(DraftMismatch, match="width 48, the target's are 64"):
        METHOD.load(heads, dataclasses.replace(info, hidden_size=64), {})
    with pytest.raises(
        InvalidOption, match=r"num_draft_tokens=4: the drafter has 3 heads, .* at most 3$"
    ):
        compilespec.trace(model, "medusa", draft=heads, num_draft_tokens=4)
    with pytest.raises(InvalidOption, match="num_heads of 1 or more"):
        random_heads(info, 0)


# --- in the step ---


@torch.no_grad()
def from_scratch(model: nn.Module, heads: MedusaDrafter, tokens: tuple[int, ...], k: int) -> Any:
    """Drafts after the tokens: the newest is the target's, from the state one position back."""
    states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
    tensors = published(heads)
    return [int(logits_of(tensors, index, states).argmax()) for index in range(k)]


@pytest.mark.parametrize("k", [1, 3], ids="K{}".format)
def test_drafts_are_those_of_the_heads_on_the_last_state(target, k) -> None:
    """Chunks, joins, accepted and rejected drafts: always the state behind the newest token."""
    model, asks, heads = target
    with compilespec.compile(model, "medusa", draft=heads, num_draft_tokens=k, **OPTIONS) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
        assert_nothing_held(engine)
    assert len(found) > 40
    for tokens, drafts in found.items():
        assert drafts == from_scratch(model, heads, tokens, k), len(tokens)


def test_several_k_with_zero_and_preemption(target) -> None:
    model, asks, heads = target
    with compilespec.compile(
        model, "medusa", draft=heads, num_draft_tokens=(0, 1, 3), kv_cache_tokens=96, **OPTIONS
    ) as engine:
        check_preempted(engine, asks)


def test_automatic_k_asks_for_no_more_drafts_than_there_are_heads(target) -> None:
    model, _, heads = target
    program = compilespec.trace(model, "medusa", draft=heads, num_draft_tokens="auto")
    assert {key.num_draft_tokens for key in program.graphs if key.phase == "decode"} == {0, 1, 3}


def test_sampled_tokens_are_those_of_plain_decoding(target) -> None:
    model, asks, heads = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, draft in (("none", {}), ("medusa", {"draft": heads})):
        with compilespec.compile(model, spec, **OPTIONS, **draft) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"acceptance": "rejection"},
        {"draft_vocab_size": 40, "draft_vocab_counts": [1.0] * VOCAB},
    ],
    ids=["coupled", "rejection", "trimmed"],
)
def test_the_loop_is_what_its_reference_says(target, options) -> None:
    model, _, heads = target
    program = compilespec.trace(
        model, "medusa", draft=heads, num_draft_tokens=3, max_batch_size=4, max_seq_len=43,
        max_prefill_tokens=64, **options,
    )  # fmt: skip
    passes = ["splice_draft_loop", "commit_state"]
    passes += ["trim_draft_head"] if "draft_vocab_size" in options else []
    report = compilespec.verify(program, passes=passes)
    assert report.ok, str(report)
    assert {bound.status for bound in prove(program).bounds} == {"proved"}


# --- trees ---

STATIC = DraftTree(choices=[(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (1, 1, 4)])


def test_a_node_is_the_token_of_its_rank_by_the_head_of_its_depth(target) -> None:
    model, asks, heads = target
    tensors = published(heads)
    with compilespec.compile(model, "medusa", draft=heads, draft_tree=STATIC, **OPTIONS) as engine:
        found = drafts_by_tokens(engine, asks, MAX_SEQ_LEN)
        assert_nothing_held(engine)
    assert len(found) > 40
    for tokens, drafts in found.items():
        with torch.no_grad():
            state = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        best = [logits_of(tensors, i, state).argsort(descending=True) for i in range(NUM_HEADS)]
        assert drafts == [int(best[len(path) - 1][path[-1]]) for path in STATIC.shape.choices]


def test_sampled_tokens_along_a_tree_are_those_of_plain_decoding(target) -> None:
    model, asks, heads = target
    prompts = [list(ask.prompt) for ask in asks]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    texts = []
    for spec, draft in (("none", {}), ("medusa", {"draft": heads, "draft_tree": STATIC})):
        with compilespec.compile(model, spec, **OPTIONS, **draft) as engine:
            texts.append([out.token_ids for out in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (STATIC, {}),
        (STATIC, {"acceptance": "rejection"}),
        (STATIC, {"draft_vocab_size": 40, "draft_vocab_counts": [1.0] * VOCAB}),
        (DraftTree(top_k=2, depth=3, num_nodes=5), {}),
    ],
    ids=["static", "rejection", "trimmed", "dynamic"],
)
def test_trees_are_what_their_reference_says(target, tree, options) -> None:
    model, _, heads = target
    program = compilespec.trace(
        model, "medusa", draft=heads, draft_tree=tree, max_batch_size=5, max_seq_len=43,
        max_prefill_tokens=64, **options,
    )  # fmt: skip
    report = compilespec.verify(program, batch_sizes=[1, 5])
    assert report.ok, str(report)
    assert not any(check.skipped for check in report.checks)
    assert prove(program).num_open == 0


def test_a_tree_deeper_than_there_are_heads_is_refused(target) -> None:
    model, _, heads = target
    tree = DraftTree(choices=[(0,) * depth for depth in range(1, 5)])
    with pytest.raises(InvalidOption, match="drafts 4 deep: the drafter has 3 heads"):
        compilespec.trace(model, "medusa", draft=heads, draft_tree=tree)
