"""draft_vocab_size=: drafters propose only the tokens that were chosen, and no token changes."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import InvalidOption, NotSupported, SpecError
from compilespec.inspect.bounds import prove
from compilespec.inspect.cost import estimate
from compilespec.inspect.devices import find_device
from compilespec.inspect.verify import verify
from compilespec.methods import dflash, eagle3, peagle, shared_kv
from compilespec.passes.proofs.sizes import B
from compilespec.pipeline import build
from compilespec.pipeline.draft_vocab import DraftVocabulary, choose_draft_ids, count_tokens
from compilespec.pipeline.options import CompileOptions
from compilespec.runtime.engine import Engine
from compilespec.runtime.token_counts import read_counts, save_counts
from compilespec.tracing.load import Target, load_target
from tests.support.drafters import METHODS, traced_info
from tests.support.knowing import KnowingDrafter, Method
from tests.support.markov import PROMPT, markov_target, params_of
from tests.support.markov import VOCAB as MARKOV_VOCAB
from tests.support.models import VOCAB, DialDrafter, assert_nothing_held, target_info, tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

SIZE, MAX_SEQ_LEN = 31, 50
OPTIONS: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                           "max_prefill_tokens": 9}  # fmt: skip
PROMPTS = ([5, 6, 7], list(range(30, 47)), [11], [90, 3, 90, 3], list(range(40)), [8] * 5)
PARAMS = tuple(
    SamplingParams(max_new_tokens=count, ignore_eos=True, temperature=temperature, seed=seed)
    for seed, (count, temperature) in enumerate(
        ((20, 0.0), (13, 1.0), (1, 0.0), (30, 0.6), (10, 0.0), (17, 1.6))
    )
)
COUNTS = (torch.arange(VOCAB) * 37 % VOCAB + 1).tolist()  # no two alike, in no order
TREES = {
    "static": DraftTree(choices=[(0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 2)]),
    "dynamic": DraftTree(top_k=3, depth=3, num_nodes=8),
}
KEPT = sorted(sorted(range(VOCAB), key=lambda token: -COUNTS[token])[:SIZE])


@functools.cache
def lab() -> tuple[nn.Module, Any]:
    model = tiny_target("llama", num_layers=2)
    return model, traced_info(model)


@functools.cache
def plain_tokens() -> list[list[int]]:
    return plain_run()[0]


@functools.cache
def plain_run() -> tuple[list[list[int]], dict[int, int], str]:
    """The tokens of plain decoding, how often each occurs, and the file that says so."""
    with compilespec.compile(lab()[0], **OPTIONS) as engine, tempfile.TemporaryDirectory() as place:
        outputs = engine.generate(list(PROMPTS), list(PARAMS))
        path = engine.save_token_counts(Path(place) / "counts.json")
        tokens = [list(output.token_ids) for output in outputs]
        return tokens, engine.token_counts(), path.read_text(encoding="utf-8")


def drafting(method: str, k: int) -> dict[str, Any]:
    """A drafter with a head of the whole vocabulary."""
    model, info = lab()
    if method in ("eagle3", "peagle"):
        make = eagle3.random_head if method == "eagle3" else peagle.random_head
        return {"draft": make(info, aux_layers=(0, 1, 2))}
    if method == "dflash":
        return {"draft": dflash.random_drafter(info, aux_layers=(0, 2), block_size=k + 1)}
    return METHODS[method](model, info, k)


def trimmed(method: str, k: Any = 3, **options: Any) -> dict[str, Any]:
    """Keywords of `compile` and `trace`."""
    largest = k if isinstance(k, int) else max(k)
    own = {"draft_vocab_size": SIZE, "draft_vocab_counts": COUNTS, "num_draft_tokens": k}
    return {**OPTIONS, **own, **drafting(method, largest), **options}


def run(engine: Engine) -> tuple[list[list[int]], set[int]]:
    """The tokens of all requests, which join and leave, and every draft that was written."""
    requests = [engine.submit(p, a) for p, a in zip(PROMPTS, PARAMS, strict=True)]
    drafts: set[int] = set()
    state = engine.executor.buffers["tokens_RS"]  # type: ignore[attr-defined]
    while engine.has_work:
        engine.step()
        rows = [r.row for r in requests if not r.finished and r.output_token_ids]
        drafts |= {*state[rows, 1:].flatten().tolist()}
    assert_nothing_held(engine)
    return [list(request.output_token_ids) for request in requests], drafts


CHOSEN = {("eagle3", 3)}
CASES = [
    pytest.param(method, k, marks=() if (method, k) in CHOSEN else pytest.mark.slow)
    for method in (
        "eagle3", "eagle", "mtp", "mtp_eagle", "mtp_multi", "shared_kv", "draft_model", "peagle",
        "dflash",
    )
    for k in (1, 2, 3, 5)
]  # fmt: skip


@pytest.mark.parametrize(("method", "k"), CASES)
def test_tokens_are_those_of_plain_decoding(method: str, k: int) -> None:
    """Greedy requests beside sampled ones; drafts are of the chosen tokens."""
    with compilespec.compile(lab()[0], method, **trimmed(method, k)) as engine:
        tokens, drafts = run(engine)
        (note,) = (line for line in engine.plan()["why"] if "trimmed" in line)
    assert tokens == plain_tokens()
    assert len(drafts) > 1
    assert drafts <= {*KEPT}
    coverage = sum(COUNTS[token] for token in KEPT) / sum(COUNTS)
    assert f"{SIZE} of {VOCAB} rows, which are {coverage:.1%} of the tokens counted" in note


@pytest.mark.parametrize("kind", ["gemma2", "biased"])
def test_heads_of_draft_models(kind: str) -> None:
    """Logits with a soft cap, of a head that is the embedding; a head with a bias."""
    other: Any = tiny_target("plain" if kind == "biased" else kind, num_layers=1)
    if kind == "biased":
        other.head.bias = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))
    keywords = trimmed("draft_model", 2, draft=other)
    program = compilespec.trace(lab()[0], "draft_model", **keywords)
    assert verify(program, passes={"trim_draft_head"}, batch_sizes=(2,)).ok
    with compilespec.compile(lab()[0], "draft_model", **keywords) as engine:
        tokens, drafts = run(engine)
    assert tokens == plain_tokens()
    assert drafts <= {*KEPT}


@pytest.mark.parametrize("method", ["eagle3", "mtp_eagle", "draft_model"])
def test_steps_of_several_k(method: str) -> None:
    """Also the replay of what steps of K = 0 kept."""
    counts = (1, 3) if method == "draft_model" else (0, 2, 3)
    with compilespec.compile(lab()[0], method, **trimmed(method, counts)) as engine:
        tokens, drafts = run(engine)
    assert tokens == plain_tokens()
    assert drafts <= {*KEPT, -1}


# --- drafters that know the target, whose acceptance tells what they may propose ---


def accepted(engine: Engine) -> list[Any]:
    outputs = engine.generate(
        [PROMPT] * 12, [params_of(kind, seed=seed) for seed in range(4) for kind in
                        ("plain", "filters", "one_draft")]
    )  # fmt: skip
    assert max(count for output in outputs for count in output.emitted_per_step) > 2
    return [(output.token_ids, output.emitted_per_step) for output in outputs]


def knowing(
    chain: str, rule: str, ids: Tensor | None, tree: DraftTree | None = None, **options: Any
) -> Engine:
    model = markov_target()
    spec = Method(KnowingDrafter(model, ids, windowed=chain != "recycled"), chain)
    form: dict[str, Any] = {"num_draft_tokens": 3} if tree is None else {"draft_tree": tree}
    return compilespec.compile(
        model, spec, acceptance=rule, backend="eager", max_seq_len=16, max_batch_size=3, **form,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "rule"),
    [
        pytest.param("module_rows", "auto", marks=pytest.mark.slow),
        ("recycled", "rejection"),
        pytest.param("target_rows", "auto", marks=pytest.mark.slow),
        pytest.param("recycled", "auto", marks=pytest.mark.slow),
        pytest.param("recycled", "block", marks=pytest.mark.slow),
    ],
)
def test_a_trimmed_head_is_one_with_a_reduced_vocabulary(chain: str, rule: str) -> None:
    """The same tokens and the same drafts accepted as with a head of these rows and their ids."""
    ids = torch.arange(0, MARKOV_VOCAB, 2)
    counts = dict.fromkeys(ids.tolist(), 1)
    with knowing(chain, rule, ids) as engine:
        wanted = accepted(engine)
    options = {"draft_vocab_size": len(ids), "draft_vocab_counts": counts}
    with knowing(chain, rule, None, **options) as engine:
        assert accepted(engine) == wanted


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        pytest.param("static", "rejection", marks=pytest.mark.slow),
        pytest.param("static", "auto", marks=pytest.mark.slow),
        ("dynamic", "rejection"),
        pytest.param("dynamic", "auto", marks=pytest.mark.slow),
    ],
)
def test_trees_of_a_trimmed_head_are_those_of_a_reduced_vocabulary(tree: str, rule: str) -> None:
    ids = torch.arange(0, MARKOV_VOCAB, 2)
    with knowing("recycled", rule, ids, TREES[tree]) as engine:
        wanted = accepted(engine)
    options = {"draft_vocab_size": len(ids), "draft_vocab_counts": dict.fromkeys(ids.tolist(), 1)}
    with knowing("recycled", rule, None, TREES[tree], **options) as engine:
        assert accepted(engine) == wanted


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_trees_give_the_tokens_of_plain_decoding(method: str, tree: str) -> None:
    keywords = trimmed(method, TREES[tree].shape.depth, draft_tree=TREES[tree])
    del keywords["num_draft_tokens"]
    program = compilespec.trace(lab()[0], method, **keywords)
    assert verify(program, batch_sizes=(2,)).ok
    assert prove(program).num_open == 0
    with compilespec.compile(lab()[0], method, **keywords) as engine:
        tokens, drafts = run(engine)
    assert tokens == plain_tokens()
    assert drafts <= {*KEPT}


@pytest.mark.parametrize("rule", ["auto", "rejection"])
def test_all_rows_change_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with knowing("recycled", rule, None) as engine:
        wanted = accepted(engine)
    everything = DraftVocabulary(
        ids=torch.arange(MARKOV_VOCAB), coverage=1.0, num_rows=MARKOV_VOCAB, source="all"
    )
    monkeypatch.setattr(build, "choose_draft_ids", lambda *args: everything)
    with knowing("recycled", rule, None) as engine:
        assert any("trimmed" in line for line in engine.plan()["why"])
        assert accepted(engine) == wanted


def test_a_head_of_one_row() -> None:
    with knowing("recycled", "auto", None, draft_vocab_size=1, draft_vocab_counts={4: 9}) as engine:
        outputs = engine.generate([PROMPT], params_of("plain", seed=3))
    with knowing("recycled", "auto", None) as engine:
        assert [o.token_ids for o in engine.generate([PROMPT], params_of("plain", seed=3))] == [
            output.token_ids for output in outputs
        ]


# --- what a step reads ---


@functools.cache
def traced(method: str, size: int | None = SIZE) -> compilespec.SpecProgram:
    keywords = trimmed(method)
    if size is None:
        del keywords["draft_vocab_size"], keywords["draft_vocab_counts"]
    return compilespec.trace(lab()[0], method, keep_graphs=False, **keywords)


@pytest.mark.parametrize("method", [
    "eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "draft_model"))
])  # fmt: skip
def test_steps_read_the_chosen_rows_alone(method: str) -> None:
    """And a head of the whole vocabulary only where the target, or an embedding, is the same."""
    program, model = traced(method), lab()[0]
    for graph in program.graphs.values():
        names = {source for spec in graph.inputs for source in spec.sources}
        (kept,) = (name for name in names if name.endswith(".kept"))
        whole = kept.removesuffix(".kept")
        assert torch.equal(program.weights[kept], program.weights[whole][KEPT])
        assert program.weights["draft.kept_ids"].tolist() == KEPT
        assert (whole in names) is (method == "eagle")
        assert (whole == "target.lm_head.weight") is (method == "eagle")
        assert "target.lm_head.weight" in names
        assert model.lm_head.weight.shape[0] == VOCAB


def test_indices_of_the_table_are_proved() -> None:
    report = prove(traced("eagle3"))
    assert report.num_open == 0
    table = [bound for bound in report.bounds if bound.what == "index into draft.kept_ids"]
    assert len(table) == 2 * 3  # the drafts of prefill and of decode
    assert {bound.status for bound in table} == {"proved"}
    assert {bound.numbers for bound in table} == {f"[0, {SIZE - 1}]"}
    drafts = [bound for bound in report.bounds if bound.what == "what is written to tokens_RS"]
    assert {bound.status for bound in drafts} == {"proved"}


def test_the_cost_of_a_step_has_the_smaller_head() -> None:
    """Three drafts, each of one row."""
    device = find_device("cpu", torch.float64)
    reports = [estimate(traced("eagle3", size), device=device) for size in (None, SIZE)]
    flops = [
        float(report.graphs["decode"].total.cost.at({**report.sizes, B: 1}).flops)
        for report in reports
    ]
    assert flops[0] - flops[1] == 2 * 3 * (VOCAB - SIZE) * 48


# --- counts ---


def counted(given: Any, tokenizer: Any = None) -> Tensor:
    target = load_target(lab()[0], tokenizer=tokenizer)
    return count_tokens(given, target, VOCAB)[0]


def chosen(target: Target, given: Any, size: int = SIZE) -> DraftVocabulary:
    options = CompileOptions(draft_vocab_size=size, draft_vocab_counts=given)
    kept = choose_draft_ids(options, target, VOCAB, {})
    assert kept is not None
    return kept


def test_counts_of_an_engine_serve_a_later_one(tmp_path: Path) -> None:
    tokens, counts, text = plain_run()
    wanted = Counter(token for output in tokens for token in output)
    assert counts == wanted
    path = tmp_path / "counts.json"
    path.write_text(text, encoding="utf-8")
    assert read_counts(path, VOCAB).tolist() == [wanted[token] for token in range(VOCAB)]
    best = sorted(range(VOCAB), key=lambda token: (-wanted[token], token))[:SIZE]
    kept = chosen(load_target(lab()[0]), path)
    assert kept.ids.tolist() == sorted(best)
    assert kept.coverage == sum(wanted[token] for token in best) / wanted.total()
    assert str(path) in kept.describe()


def test_a_file_beside_the_target_is_found(tmp_path: Path) -> None:
    target = dataclasses.replace(load_target(lab()[0]), directory=tmp_path)
    with pytest.raises(InvalidOption, match=r"holds no token_counts\.json: give"):
        chosen(target, None)
    save_counts(tmp_path / "token_counts.json", {6: 2, 3: 1}, VOCAB)
    assert chosen(target, None, size=3).ids.tolist() == [0, 3, 6]


def test_every_form_of_counts(tmp_path: Path) -> None:
    counts_V = torch.tensor(COUNTS)
    wanted = counts_V.to(torch.float64)
    save_file({"counts": counts_V}, tmp_path / "counts.safetensors")
    (tmp_path / "list.json").write_text(json.dumps(COUNTS))
    (tmp_path / "ids.json").write_text(json.dumps(dict(enumerate(COUNTS))))
    files = ("counts.safetensors", "list.json", "ids.json")
    for given in (COUNTS, counts_V, dict(enumerate(COUNTS)), *(tmp_path / name for name in files)):
        assert torch.equal(counted(given), wanted)


def test_texts_are_counted_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(["<s>", *(bytes([32 + i]) for i in range(95))], eos="<s>")
    (tmp_path / "corpus.txt").write_text("abba\nc ")
    for given in (tmp_path / "corpus.txt", str(tmp_path / "corpus.txt")):
        counts = counted(given, tokenizer)
        assert {chr(31 + i): int(n) for i, n in enumerate(counts) if n} == {
            "a": 2.0, "b": 2, "c": 1, " ": 1
        }  # fmt: skip
    assert torch.equal(counted(["abba", "c "], tokenizer), counts)


# --- refusals ---

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no counts": ({"draft_vocab_counts": None}, r"none were given: give draft_vocab_counts= a"),
    "no size": ({"draft_vocab_size": None}, "draft_vocab_counts= needs draft_vocab_size="),
    "all rows": ({"draft_vocab_size": VOCAB}, f"below the {VOCAB} ids .*; got {VOCAB}: leave it"),
    "no row": ({"draft_vocab_size": 0}, "a positive integer; got 0"),
    "another vocabulary": ({"draft_vocab_counts": [1] * 96}, f"{VOCAB} ids; what was given has 96"),
    "an id too large": ({"draft_vocab_counts": {VOCAB: 1}}, f"has the id {VOCAB}: count"),
    "nothing counted": ({"draft_vocab_counts": {}}, "some above it; .* holds 0 to 0"),
    "below 0": ({"draft_vocab_counts": {1: -1, 2: 5}}, "holds -1 to 5"),
    "not numbers": ({"draft_vocab_counts": [None] * VOCAB}, "one number for each token id"),
    "no file": ({"draft_vocab_counts": "none.json"}, "there is no none.json"),
    "no tokenizer": ({"draft_vocab_counts": ["a"]}, "no tokenizer to count the texts given with"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_counts_are_refused(name: str) -> None:
    changes, says = WRONG[name]
    keywords = {"draft_vocab_size": SIZE, "draft_vocab_counts": COUNTS, **changes}
    with pytest.raises(InvalidOption, match=says) as caught:
        choose_draft_ids(CompileOptions(**keywords), load_target(lab()[0]), VOCAB, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", '{"a": 1}', '{"vocab_size": 5, "counts": {}}', "3"])
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(InvalidOption, match=r"^draft_vocab_counts: expected .*counts\.json"):
        read_counts(path, VOCAB)
    with pytest.raises(InvalidOption, match="to hold counts by token id"):
        read_counts(tmp_path / "none.safetensors", VOCAB)


@pytest.mark.parametrize("method", ["none", "ngram", "user", "save_hidden_states", "auto"])
def test_methods_without_a_head_refuse_it(method: str) -> None:
    with pytest.raises(InvalidOption, match=rf"draft_vocab_size=5 needs .* spec='{method}'"):
        compilespec.trace("no such model", method, draft_vocab_size=5)


def refused() -> dict[str, tuple[dict[str, Any], type[SpecError], str]]:
    model, info = lab()
    small = eagle3.random_head(info, aux_layers=(0, 1, 2), draft_vocab_size=61)
    clusters = shared_kv.random_drafter(info, num_centroids=VOCAB, centroid_top_k=4)
    own = DialDrafter(
        eagle3.random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2)),
        max_seq_len=MAX_SEQ_LEN, dtype=torch.float64,
    )  # fmt: skip
    return {
        "eagle3": ({"draft": small}, InvalidOption, f"reduced to 61 of {VOCAB}: leave it out"),
        "shared_kv": ({"draft": clusters}, NotSupported, "argmax over a product with its head"),
        "eagle": ({"draft": own}, NotSupported, "argmax over a product with its head"),
        "dspark": ({}, NotSupported, "argmax over a product with its head"),
    }


@pytest.mark.parametrize(
    "method",
    [
        "eagle3",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("shared_kv", "eagle", "dspark")),
    ],
)
def test_other_heads_are_refused(method: str) -> None:
    changes, kind, says = refused()[method]
    with pytest.raises(kind, match=says) as caught:
        compilespec.trace(lab()[0], method, **trimmed(method, **changes))
    assert "\n" not in str(caught.value)


def test_a_quantized_head_is_refused_and_the_rest_is_not() -> None:
    pytest.importorskip("torchao")
    model = tiny_target("llama", torch.float32, num_layers=2)
    head = eagle3.random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    options = trimmed("eagle3", draft=head)
    with pytest.raises(NotSupported, match="cannot cut a quantized head; leave the head out"):
        compilespec.trace(model, "eagle3", draft_quantize="int8", **options)
    rest = compilespec.Quantize("int8", skip=["lm_head"])
    program = compilespec.trace(model, "eagle3", draft_quantize=rest, **options)
    assert "draft.kept_ids" in program.weights
