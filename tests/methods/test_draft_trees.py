"""Trees of drafts: the model's own tokens, the authors' trees, requests that come and go."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.runtime.guides import Choice, Vocabulary
from compilespec.runtime.guides.follower import GuideFollower
from tests.support.drafters import METHODS, traced_info
from tests.support.margin import assert_same_tokens, tokens_of
from tests.support.models import (
    Ask,
    ask_all,
    assert_nothing_held,
    poison,
    run_traffic,
    tiny_target,
)
from tests.support.trees import parents_of_rows, paths_of

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
MAX_SEQ_LEN = 75
SIZES = (
    (1, 30), (40, 35), (31, 12), (57, 18), (16, 9), (70, 5), (74, 1), (2, 9), (12, 6), (3, 20),
)  # fmt: skip
CHAIN = DraftTree(choices=[(0,), (0, 0), (0, 0, 0)])
TREES = {
    "chain": CHAIN,
    "bush": DraftTree(choices=[(3,), (1,), (0,), (2,)]),
    "static": DraftTree(
        choices=[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2), (0, 1, 0),
                 (0, 0, 0, 0)],
    ),
    "dynamic": DraftTree(top_k=3, depth=4, num_nodes=11),
    "wide": DraftTree(top_k=5, depth=2, num_nodes=30),
    "one": DraftTree(top_k=2, depth=1, num_nodes=1),
    "n8": DraftTree(top_k=4, depth=3, num_nodes=8),
    "n16": DraftTree(top_k=4, depth=4, num_nodes=16),
    "n32": DraftTree(top_k=6, depth=5, num_nodes=32),
    "n60": DraftTree(top_k=8, depth=6, num_nodes=60),
}  # fmt: skip
CHOSEN = (("eagle3", "gemma2", "dynamic"),)


@functools.cache
def asked(family: str) -> tuple[nn.Module, Any, list[Ask]]:
    """A target, what drafters may know of it, and its own tokens."""
    model = tiny_target(family, num_layers=2)
    return model, traced_info(model), ask_all(model, SIZES)


def compiled(method: str, family: str, tree: DraftTree | None, **options: Any) -> Any:
    model, info, _ = asked(family)
    depth = 3 if tree is None else tree.shape.depth
    given: dict[str, Any] = {"draft_tree": tree} if tree else {"num_draft_tokens": depth}
    sizes = {"max_batch_size": 4, "max_seq_len": MAX_SEQ_LEN, "backend": "eager", **options}
    return compilespec.compile(
        model, method, **METHODS[method](model, info, depth), **given, **sizes
    )


@pytest.mark.parametrize(
    ("method", "family", "tree"),
    [
        pytest.param(
            method, family, tree, id=f"{method}-{family}-{tree}",
            marks=() if (method, family, tree) in CHOSEN else pytest.mark.slow,
        )
        for method in ("eagle3", "draft_model", "eagle", "mtp_eagle")
        for family in ("gemma2", "mistral", "gpt_oss", "llama", "deepseek_v3", "plain")
        for tree in ("static", "dynamic", "bush", "wide", "one")
    ]
    + [
        pytest.param(method, family, tree, id=f"{method}-{family}-{tree}", marks=pytest.mark.slow)
        for method, family, tree in (
            ("eagle3", "gpt_oss", "n60"),
            ("draft_model", "mistral", "n32"),
            ("mtp_eagle", "llama", "n16"),
            ("eagle", "gemma2", "n8"),
            ("medusa", "gemma2", "static"),
            ("medusa", "mistral", "dynamic"),
        )
    ],
)  # fmt: skip
def test_trees_give_the_models_own_tokens(method: str, family: str, tree: str) -> None:
    """Requests join and leave; prompts are cut into chunks; up to the maximum length."""
    asks = asked(family)[2]
    with compiled(method, family, TREES[tree], max_prefill_tokens=33) as engine:
        poison(engine)
        requests = run_traffic(engine, asks, (1, 2, 3, 4))
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0
        if method == "draft_model":
            assert engine.stats().acceptance_length > 1.2


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_trees_on_inductor(tree: str, inductor_cache_dir: Any) -> None:
    """In float32, by the margin rule; nothing is compiled later."""
    model, reference = tiny_target("llama", torch.float32, num_layers=2), asked("llama")[0]
    asks, head = asked("llama")[2], METHODS["eagle3"](model, traced_info(model), 4)
    with compilespec.compile(
        model, "eagle3", **head, draft_tree=TREES[tree], max_batch_size=4, backend="inductor",
        max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        poison(engine)
        requests = run_traffic(engine, asks, (1, 2, 3, 4))
        wanted = [list(ask.tokens) for ask in asks]
        assert_same_tokens(reference, asks, tokens_of(requests), wanted)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0


@pytest.fixture(scope="module")
def tree_engine():
    options = {"kv_cache_tokens": 144, "host_processors": True}
    with compiled("draft_model", "mistral", TREES["static"], **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_engine():
    with compilespec.compile(
        asked("mistral")[0], max_batch_size=4, max_seq_len=MAX_SEQ_LEN, backend="eager",
        host_processors=True,
    ) as engine:  # fmt: skip
        yield engine


def test_requests_that_are_computed_anew_or_find_their_beginning(tree_engine):
    """Few blocks: the last in line is preempted; what another has published is found."""
    asks = ask_all(asked("mistral")[0], [(20, 40), (22, 40), (24, 40), (40, 30)])
    before = tree_engine.stats()
    for batch in (4, 1):
        requests = run_traffic(tree_engine, [*asks, asks[3]], (batch,))
        assert [r.output_token_ids for r in requests] == [
            list(ask.tokens) for ask in (*asks, asks[3])
        ]
    after = tree_engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_cached_tokens > before.num_cached_tokens


def test_sampled_tokens_are_those_of_plain_decoding(tree_engine, plain_engine):
    params = [
        SamplingParams(max_new_tokens=20, temperature=0.8, seed=1, ignore_eos=True, logprobs=2),
        SamplingParams(max_new_tokens=20, temperature=1.3, seed=2, top_p=0.8, ignore_eos=True),
        SamplingParams(max_new_tokens=20, seed=2, logit_bias={7: 3.0}, ignore_eos=True, logprobs=1),
        SamplingParams(max_new_tokens=9, temperature=0.5, top_k=5, seed=4, n=2, min_new_tokens=4),
    ]
    prompts = [list(ask.prompt) for ask in asked("mistral")[2][:4]]
    mine, plain = (engine.generate(prompts, params) for engine in (tree_engine, plain_engine))
    for one, other in zip(mine, plain, strict=True):
        assert one.token_ids == other.token_ids
        if one.logprobs is not None:
            for got, want in zip(one.logprobs, other.logprobs, strict=True):
                assert got.token_id == want.token_id
                assert got.logprob == pytest.approx(want.logprob, abs=1e-6)
                assert list(got.top) == list(want.top)
    assert max(mine[0].emitted_per_step) > 1


def shy(tokens, logits_V):
    """What came before may hardly come again soon."""
    logits_V[tokens[-6:]] -= 3.0
    return logits_V


def test_guides_and_processors_follow_each_path(tree_engine, plain_engine):
    """Requests with them, and without, in one batch; greedy and sampled."""
    choices = Choice([[first, *range(first % 7, first % 7 + 9)] for first in range(30, 60)])
    params = [
        SamplingParams(max_new_tokens=12, guide=choices),
        SamplingParams(max_new_tokens=14, logits_processor=shy, ignore_eos=True),
        SamplingParams(max_new_tokens=14, ignore_eos=True),
        SamplingParams(max_new_tokens=12, guide=choices, temperature=0.9, seed=3),
    ]
    prompts = [list(ask.prompt) for ask in asked("mistral")[2][:4]]
    mine, plain = (engine.generate(prompts, params) for engine in (tree_engine, plain_engine))
    assert [one.token_ids for one in mine] == [one.token_ids for one in plain]
    assert max(mine[1].emitted_per_step) > 1


def test_masks_after_every_node_of_a_tree():
    """Of five drafts, one may not come, what follows it is not looked at, and PAD is none."""
    guide = Choice([[1, 2, 3], [1, 4], [5, 6]])
    follower = GuideFollower(guide.matcher(Vocabulary(None, 40)), 2)
    masks = follower.masks([1, 7, 5, -1, 4, 2], [0, 0, 0, 1, 1, 2])
    ids = [[i for i in range(40) if int(row[i // 32]) >> (i % 32) & 1] for row in masks]
    assert ids == [[1, 5], [2, 4], [], [6], [], []]
    assert torch.equal(follower.masks(), masks[:1])


def test_a_request_may_want_fewer_drafts(tree_engine):
    ask = asked("mistral")[2][0]
    for own in (0, 1, 2):
        params = SamplingParams(
            max_new_tokens=len(ask.tokens), ignore_eos=True, num_draft_tokens=own
        )
        (output,) = tree_engine.generate(list(ask.prompt), params)
        assert output.token_ids == list(ask.tokens)
        assert max(output.emitted_per_step) <= own + 1


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_tree_of_one_path_is_a_chain(method):
    ask = asked("mistral")[2][1]
    params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
    steps = []
    for tree in (CHAIN, None):
        with compiled(method, "mistral", tree) as engine:
            (output,) = engine.generate(list(ask.prompt), params)
            steps.append((output.token_ids, output.emitted_per_step))
    assert steps[0] == steps[1]


def test_penalties_follow_each_path(tree_engine, plain_engine):
    """Greedy and sampled, beside a request without any."""
    some = {"max_new_tokens": 25, "ignore_eos": True}
    params = [
        SamplingParams(repetition_penalty=1.15, **some),
        SamplingParams(temperature=0.8, seed=5, frequency_penalty=0.3, **some),
        SamplingParams(**some),
        SamplingParams(temperature=0.6, seed=6, presence_penalty=0.9, repetition_penalty=1.1,
                       min_new_tokens=4, max_new_tokens=12),
    ]  # fmt: skip
    prompts = [list(ask.prompt) for ask in asked("mistral")[2][:4]]
    mine, plain = (engine.generate(prompts, params) for engine in (tree_engine, plain_engine))
    assert [one.token_ids for one in mine] == [one.token_ids for one in plain]
    assert mine[0].token_ids != mine[2].token_ids[: len(mine[0].token_ids)]
    assert max(max(one.emitted_per_step) for one in (mine[0], mine[1])) > 1


# --- the authors' generations ---


@pytest.fixture(
    scope="module",
    params=[
        "c_eagle3_full_tree",
        pytest.param("c_eagle1_tree", marks=pytest.mark.slow),
        pytest.param("c_eagle3_d2t_tree", marks=pytest.mark.slow),
    ],
)
def authors(request):
    """The engine on the case, its prompts, tokens and iterations."""
    case = ORACLES / request.param
    io, meta = load_file(case / "io.safetensors"), json.loads((case / "meta.json").read_text())
    tree = DraftTree(
        top_k=meta["top_k"], depth=meta["depth"] + 1, num_nodes=meta["total_token"] - 1
    )
    with compilespec.compile(
        str(ORACLES / "c_target"), spec=meta["kind"], draft=str(case / meta["draft"]),
        draft_tree=tree,
        backend="eager", max_batch_size=3,
    ) as engine:  # fmt: skip
        yield engine, io, meta["traces"]


@pytest.mark.parametrize("index", [0, 1, 2], ids="prompt{}".format)
def test_every_iteration_is_the_authors(authors, index):
    """Tree tokens, topology, positions, accepted path and next token."""
    engine, io, traces = authors
    steps = [step for step in traces[index] if "accept_length" in step]
    prompt = io[f"in.prompt{index}"].tolist()
    count = 1 + sum(step["accept_length"] + 1 for step in steps)
    request = engine.submit(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
    engine.step()  # the prompt, and the step that judges the first tree
    buffers = engine._executor.buffers
    for before, step in itertools.pairwise(steps):
        tokens = buffers["tokens_RS"][request.row].tolist()
        parents = buffers["parents_RS"][request.row].tolist()
        assert len(request.token_ids) - 1 == step["prefix_len"]
        assert tokens == step["tree_tokens"]
        assert parents == parents_of_rows(step["tree_mask"])
        depths = [len(path) - 1 for path in paths_of(parents)]
        assert depths == step["tree_position_ids"]
        way = before["retrieve_indices"][before["best_candidate"]][1 : before["accept_length"] + 1]
        accepted = [before["tree_tokens"][node] for node in way]
        assert request.output_token_ids[-len(way) - 1 :] == [*accepted, before["next_token"]]
        engine.step()
    assert request.finished
    want = io[f"out.eagle{index}"].tolist()[len(prompt) :]
    assert request.output_token_ids[: len(want)] == want[:count]


def test_a_batch_is_the_authors(authors):
    engine, io, traces = authors
    prompts = [io[f"in.prompt{index}"].tolist() for index in range(3)]
    lengths = [
        [step["accept_length"] + 1 for step in steps if "accept_length" in step] for steps in traces
    ]
    params = [SamplingParams(max_new_tokens=1 + sum(n), ignore_eos=True) for n in lengths]
    outputs = engine.generate(prompts, params)
    for index, output in enumerate(outputs):
        assert output.emitted_per_step == lengths[index]
        want = io[f"out.eagle{index}"].tolist()[len(prompts[index]) :]
        count = min(len(want), len(output.token_ids))
        assert output.token_ids[:count] == want[:count]


# --- bad trees ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choices": [(0,), (0,)]}, r"the path \(0,\) twice"),
        ({"choices": [(0,), (1, 0)]}, r"\(1, 0\) without the node before it, \(1,\)"),
        ({"choices": []}, "paths of ranks"),
        ({"choices": [(0,), (-1,)]}, "paths of ranks"),
        ({"choices": [(0,), "a"]}, "paths of ranks"),
        ({"choices": 3}, "paths of ranks"),
        ({"choices": [(i,) for i in range(300)]}, "at most 256 nodes"),
        ({"top_k": 3, "depth": 2}, "num_nodes=None"),
        ({"top_k": 3, "depth": 2, "num_nodes": 13}, "drafts 12 tokens"),
        ({"top_k": 3, "depth": 5, "num_nodes": 4}, "cannot be reached"),
        ({"top_k": 40, "depth": 3, "num_nodes": 257}, "at most 256 nodes"),
        ({"choices": [(0,)], "top_k": 3}, "not both"),
        ({"top_k": 0, "depth": 1, "num_nodes": 1}, "top_k=0"),
        ({"top_k": True, "depth": 1, "num_nodes": 1}, "top_k=True"),
    ],
    ids=str,
)
def test_a_tree_that_cannot_be_is_refused(given, message):
    with pytest.raises(compilespec.errors.InvalidOption, match=message) as caught:
        DraftTree(**given)
    assert "\n" not in str(caught.value)


def by_context(logits_BSV, context_BL):
    return logits_BSV


@compilespec.acceptance_rule(lossless=False)
def blind(probs_BSV, num_drafts_B):
    return num_drafts_B, probs_BSV[:, 0]


def refused(*case: Any, slow: bool = True) -> Any:
    """A case; building it takes seconds where the model is traced first."""
    return pytest.param(*case, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("eagle3", {"draft_tree": 7}, "InvalidOption", "must be a compilespec.DraftTree"),
        ("eagle3", {"num_draft_tokens": 3}, "InvalidOption", "leave num_draft_tokens= out"),
        ("eagle3", {"max_seq_len": 3}, "InvalidOption", "depth of draft_tree must be below"),
        ("eagle3", {"acceptance": "block"}, "NotSupported", "judges no trees"),
        ("eagle3", {"acceptance": blind}, "NotSupported", "a rule reads parents_BS"),
        (
            "eagle3",
            {"logits_processor": by_context},
            "NotSupported",
            "has no context_BL",
        ),
        ("eagle3", {"draft_tree": DraftTree(choices=[(97,)])}, "DraftMismatch", "98 best tokens"),
        ("ngram", {}, "InvalidOption", "spec='ngram' drafts no trees"),
        ("mtp", {}, "InvalidOption", "spec='mtp' drafts no trees"),
    ],
)
def test_what_a_tree_does_not_go_with_is_refused(method, options, error, message):
    model, info, _ = asked("mistral")
    given = {"draft_tree": CHAIN, "backend": "eager", "max_seq_len": MAX_SEQ_LEN, **options}
    with pytest.raises(getattr(compilespec.errors, error), match=message) as caught:
        compilespec.compile(model, method, **METHODS[method](model, info, 3), **given)
    assert "\n" not in str(caught.value)


def test_plain_decoding_and_recurrent_targets_have_no_trees():
    model = asked("mistral")[0]
    with pytest.raises(compilespec.errors.InvalidOption, match="give spec="):
        compilespec.compile(model, draft_tree=CHAIN, backend="eager")
    model = tiny_target("qwen3_next")
    info = traced_info(model)
    with pytest.raises(compilespec.errors.UnsupportedState, match="the target has recurrent"):
        compilespec.compile(
            model, "eagle3", **METHODS["eagle3"](model, info, 3), draft_tree=CHAIN, backend="eager"
        )
    assert torch.is_grad_enabled()
