"""Steps in pieces: what crosses a cut, what is compiled once, what the cache does with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import compilespec
from compilespec import DraftTree, SamplingParams, _torch_compat, lowering
from compilespec.errors import PassError
from compilespec.lowering import artifacts, lower, pieces
from compilespec.lowering.artifacts import ArtifactCache
from compilespec.lowering.native import native_call
from compilespec.lowering.pieces import split_at_attention
from compilespec.lowering.stitching import OpStep, PieceStep, Stitched, StitchPlan
from compilespec.program import Lowered, SpecProgram
from compilespec.progress import Progress, Reporter
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.step_runner import StepRunner
from tests.support import fake_compiler
from tests.support.drafters import METHODS, traced_info
from tests.support.models import FAMILIES, HYBRIDS, tiny_target

SIN = torch.ops.aten.sin.default


@pytest.fixture
def cut_at_sin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs are cut at sines instead of attention."""
    monkeypatch.setattr(pieces, "CUTS", (SIN,))


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    """ATen graph of a function whose arguments share one symbol, their first size (7)."""
    mode = _torch_compat.fake_mode()
    fakes = [_torch_compat.fake_tensor(mode, torch.zeros(7, *shape), (0,)) for shape in shapes]
    return _torch_compat.retrace(fx.symbolic_trace(function), fakes, mode)


def stitched(gm: fx.GraphModule) -> Stitched:
    plan, found = split_at_attention(gm)
    assert StitchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    return Stitched(plan, {key: piece.graph_module.forward for key, piece in found.items()})


def assert_same(function: Callable[..., Any], *shapes: tuple[int, ...]) -> StitchPlan:
    """The pieces compute what the function does, at other sizes than the traced one, too."""
    whole = stitched(traced(function, *shapes))
    for size in (1, 7, 12):
        inputs = [torch.randn(size, *shape) for shape in shapes]
        mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
        torch.testing.assert_close(whole(*mine), function(*theirs), rtol=0, atol=0)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other), "written inputs are part of the result"
    return whole.plan


@pytest.mark.usefixtures("cut_at_sin")
def test_constants_belong_to_the_pieces_that_read_them() -> None:
    """As a static tree has them: its rows' parents."""

    def step(x: Tensor) -> tuple[Tensor]:
        constant = torch.tensor([2.0, 3.0, 5.0])
        return ((x * constant).sin() * constant,)

    def other(x: Tensor) -> tuple[Tensor]:
        return ((x * torch.tensor([2.0, 3.0, 5.0])).sin() * torch.tensor([2.0, 3.0, 7.0]),)

    (both,) = assert_same(step, (3,)).keys
    first, second = assert_same(other, (3,)).keys
    assert first == both != second


@pytest.mark.usefixtures("cut_at_sin")
def test_a_size_that_a_far_tensor_has_is_made_of_the_sizes_again() -> None:
    """Of a flat tensor, 4 B: measuring it in a later piece would need all that it was made of."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = (x.sin() * y).reshape(x.shape[0] * 4)
        later = flat.exp().view(x.shape[0], 4).sin()
        return (later * 2).reshape(x.shape[0] * 4).cos().view(x.shape[0], 4), later

    gm, aten = traced(step, (4,), (4,)), torch.ops.aten
    flat, _, last, _ = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    with gm.graph.inserting_before(last):
        size = gm.graph.call_function(aten.sym_size.int, (flat, 0))
    size.meta["val"] = flat.meta["val"].shape[0]
    last.args = (last.args[0], [size])
    inputs = torch.randn(5, 4), torch.randn(5, 4)
    for mine, theirs in zip(stitched(gm)(*inputs), step(*inputs), strict=True):
        assert torch.equal(mine, theirs)


def test_layers_of_one_structure_are_one_piece(cut_at_sin: None) -> None:
    def layers(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor]:
        for weight in (w1, w2, w3):
            x = torch.sin(x * weight) + x
        return (x,)

    plan = assert_same(layers, (3,), (3,), (3,), (3,))
    assert len(plan.steps) == 7
    assert [isinstance(step, OpStep) for step in plan.steps] == [False, True] * 3 + [False]
    first, middle, again, last = plan.piece_steps
    assert middle.piece == again.piece
    assert len({first.piece, middle.piece, last.piece}) == 3
    assert middle.inputs != again.inputs, "called with different weights"


def test_a_constant_makes_another_piece(cut_at_sin: None) -> None:
    def layers(x: Tensor) -> tuple[Tensor]:
        for factor in (2.0, 3.0, 3.0):
            x = torch.sin(x) * factor
        return (torch.sin(x),)

    plan = assert_same(layers, (3,))
    assert len(plan.piece_steps) == 3
    assert len(plan.keys) == 2


def test_sizes_are_read_again_inside_a_piece(cut_at_sin: None) -> None:
    def with_sizes(x: Tensor, y: Tensor) -> tuple[Tensor]:
        count = x.shape[0]
        mixed = torch.sin(y.sum(0, keepdim=True))
        return (mixed.expand(count, 3) + x.new_zeros((count * 2, 3))[:count],)

    plan = assert_same(with_sizes, (3,), (3,))
    last = plan.piece_steps[-1]
    assert 0 in last.inputs or 1 in last.inputs, "an input of the phase carries the size"


def test_a_view_with_a_product_for_a_size_is_taken_again(cut_at_sin: None) -> None:
    """[B, 4, 3] crosses; [4 * B, 3], a view of it, is made where it is read."""

    def flat(x: Tensor, w: Tensor) -> tuple[Tensor]:
        y = x * 2
        rows = y.reshape(-1, 3)
        mixed = torch.sin(x)
        return ((rows * mixed.reshape(-1, 3)).reshape(x.shape),)

    plan = assert_same(flat, (4, 3), (1,))
    first = plan.piece_steps[0]
    assert len(first.outputs) == 1


@pytest.mark.usefixtures("cut_at_sin")
def test_what_is_made_of_sizes_alone_is_made_again_in_each_piece() -> None:
    """As the arange over chosen experts, two a token, that all layers share."""

    def layers(x: Tensor) -> tuple[Tensor]:
        places = torch.arange(x.shape[0] * 2)
        for _ in range(3):
            pairs = x.repeat_interleave(2, 0, output_size=x.shape[0] * 2) * places[:, None]
            x = torch.sin(pairs.view(-1, 2, 3).sum(1)) * places.view(-1, 2)[:, :1]
        return (x,)

    plan = assert_same(layers, (3,))
    first, *_, again, last = plan.piece_steps
    assert [len(step.outputs) for step in plan.piece_steps] == [1] * 4, "no arange crosses"
    assert len({first.piece, again.piece, last.piece}) == 3 == len(plan.keys)


@pytest.mark.usefixtures("cut_at_sin")
@pytest.mark.parametrize("make", [torch.zeros, torch.rand], ids=["written", "random"])
def test_what_is_written_or_drawn_is_not_made_again(make: Callable[..., Tensor]) -> None:
    def step(x: Tensor) -> tuple[Tensor]:
        made = make(x.shape[0] * 2, dtype=torch.float32)
        made[:2].add_(1)
        return (torch.sin(x) + made[: x.shape[0], None],)

    gm = traced(step, (3,))
    if make is torch.rand:  # as it is, not written
        (written,) = (n for n in gm.graph.nodes if "add_" in str(n.target))
        written.replace_all_uses_with(written.args[0])
        gm.graph.erase_node(written)
    with pytest.raises(PassError, match="has a size that is an expression"):
        split_at_attention(gm)


def test_what_cannot_cross_is_an_error(cut_at_sin: None) -> None:
    def flat(x: Tensor) -> tuple[Tensor]:
        rows = x.reshape(-1, 3) * 2  # [4 * B, 3], no view
        return (torch.sin(x).reshape(-1, 3) * rows,)

    with pytest.raises(PassError, match="has a size that is an expression"):
        split_at_attention(traced(flat, (4, 3)))


def test_writes_happen_in_order_and_once(cut_at_sin: None) -> None:
    def writes(state: Tensor, x: Tensor) -> tuple[Tensor]:
        before = state * 1
        state.add_(x)
        y = torch.sin(state)
        state.mul_(2)
        z = torch.sin(y)
        return (z + state + before,)

    assert_same(writes, (3,), (3,))


def test_results_of_a_split_cross_one_by_one(cut_at_sin: None) -> None:
    def parts(x: Tensor) -> tuple[Tensor]:
        left, right = (x * 2).split([1, 2], 1)
        return (torch.sin(left) + right[:, :1],)

    assert_same(parts, (3,))


@pytest.mark.usefixtures("cut_at_sin")
def test_a_view_with_gaps_is_made_again_in_the_piece_that_reads_it() -> None:
    """As the drafts of a chain are, all but the last token."""

    def step(x: Tensor) -> tuple[Tensor]:
        tokens = x * 2
        drafts = tokens[:, :3]
        return (torch.sin(drafts * 1) + drafts,)

    assert_same(step, (4,))
    _, found = split_at_attention(traced(step, (4,)))
    assert all(fake.is_contiguous() for piece in found.values() for fake in piece.fakes)


def test_values_die_after_their_last_reader() -> None:
    plan = StitchPlan(
        num_inputs=1,
        steps=(
            PieceStep(piece="a", inputs=(0,), outputs=(1, 2, 3)),
            OpStep(target="aten.sin.default", args=(("value", 1),), output=4),
            PieceStep(piece="b", inputs=(4, 2), outputs=(5,)),
        ),
        outputs=(5,),
    )
    assert [sorted(dead) for dead in plan.dies_after] == [[3], [1], [2, 4]]
    assert plan.dies_next(1)
    assert not plan.dies_next(0)


# --- whole steps ---


def program(num_layers: int, family: str = "llama", **options: Any) -> SpecProgram:
    return compilespec.trace(
        tiny_target(family, num_layers=num_layers), "none", max_batch_size=3, max_seq_len=48,
        max_prefill_tokens=24, keep_graphs=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shallow() -> SpecProgram:
    return program(3)


IN_PIECES: Any = {"decode": "pieces", "prefill": "pieces"}


def tokens(lowered: Lowered, steps: int = 5) -> list[Any]:
    runner = StepRunner(lowered)
    for name, buffer in runner.buffers.items():
        if name.startswith(("cache.", "recurrence.", "causal_conv.")):
            buffer.fill_(float("nan"))
    runner.set_blocks(0, [4, 1, 0])
    runner.set_blocks(2, [5, 3, 2])
    chunks = [
        PrefillChunk(row=0, start=0, tokens=(5, 6, 7, 8, 9), next_token=None),
        PrefillChunk(row=2, start=0, tokens=(11,), next_token=None),
    ]
    return [runner.prefill(chunks), *(runner.decode([2, 0]) for _ in range(steps))]


def test_number_of_pieces_does_not_grow_with_depth(shallow: SpecProgram) -> None:
    deep = program(4)
    for phase in ("decode", "prefill"):
        plans = [split_at_attention(p.graphs[phase].graph_module)[0] for p in (shallow, deep)]
        assert [len(plan.piece_steps) for plan in plans] == [4, 5]
        assert [len(plan.keys) for plan in plans] == [3, 3]
        inner = [plan.piece_steps[1].piece for plan in plans]
        assert inner[0] == inner[1], "a deeper model finds the layer in the cache"


def test_writes_of_an_accepted_path_are_between_the_pieces() -> None:
    """Else a piece would have the caches of all layers as its inputs."""
    model = tiny_target("llama", num_layers=3)
    made = compilespec.trace(
        model, "eagle3", **METHODS["eagle3"](model, traced_info(model), 2), max_seq_len=48,
        draft_tree=DraftTree(top_k=2, depth=2, num_nodes=3), keep_graphs=False,
    )  # fmt: skip
    for phase, graph in made.graphs.items():
        plan, _ = split_at_attention(graph.graph_module)
        writes = [step for step in plan.steps if "write_cache" in getattr(step, "target", "")]
        assert len(writes) == (3 if phase.phase == "decode" else 0)
        caches = {step.inputs[2] for step in writes}
        for piece in plan.piece_steps:
            assert not caches & set(piece.inputs), "no piece reads a cache of the target"


def test_pieces_give_the_tokens_of_the_whole_step(shallow: SpecProgram) -> None:
    whole = tokens(lower(shallow, backend="eager"))
    assert tokens(lower(shallow, backend="eager", units=IN_PIECES)) == whole


class Layouts(fx.Interpreter):
    """Runs a graph on its fake inputs; `wrong` are nodes whose `meta` says another layout."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.wrong: list[str] = []
        self.num_checked = 0

    def run_node(self, n: fx.Node) -> Any:
        made, said = super().run_node(n), n.meta.get("val")
        if isinstance(made, Tensor):
            assert isinstance(said, Tensor)
            self.num_checked += 1
            strides = zip(made.shape, made.stride(), said.stride(), strict=True)
            if made.shape != said.shape or any(size != 1 and a != b for size, a, b in strides):
                self.wrong.append(f"{n.name}: {said.shape}, {said.stride()} is {made.stride()}")
        return made


OTHERS = [family for family in (*FAMILIES, *HYBRIDS, "plain") if family not in ("llama", "qwen3_5")]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_5", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)],
)
def test_layouts_are_those_that_the_graph_says(family: str) -> None:
    """Inductor believes them where a tensor crosses a cut: a gate of Qwen3.5's, a column of a
    merged product, was read as if its rows were neighbours.
    """
    for graph in program(4, family).graphs.values():
        gm = graph.graph_module
        fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        layouts = Layouts(gm)
        with _torch_compat.running_fakes(fakes[0].fake_mode):
            layouts.run(*fakes)
        assert layouts.num_checked > 50
        assert not layouts.wrong


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_layouts_at_the_cuts_are_those_that_the_graph_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the operators return where they run, too, not their fakes alone."""
    num_checked, split = [0], lowering.split_at_attention

    def checked(gm: fx.GraphModule) -> Any:
        plan, found = split(gm)
        for piece in found.values():

            def forward(
                *given: Any, piece: Any = piece, run: Any = piece.graph_module.forward
            ) -> Any:
                for one, fake in zip(given, piece.fakes, strict=True):
                    for size, stride, said in zip(
                        one.shape, one.stride(), fake.stride(), strict=True
                    ):
                        assert size == 1 or not isinstance(said, int) or stride == said
                        num_checked[0] += 1
                return run(*given)

            piece.graph_module.forward = forward
        return plan, found

    monkeypatch.setattr(lowering, "split_at_attention", checked)
    tokens(lower(program(4, family), backend="eager", units=IN_PIECES))
    assert num_checked[0] > 100


@pytest.mark.parametrize(
    "family",
    [
        "gemma2", "gpt_neox", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "mixtral", "plain",
        "qwen3_next", "nemotron_h", "falcon_h1", "lfm2",
    ],
)  # fmt: skip
def test_families_in_pieces_give_the_tokens_of_the_whole_step(family: str) -> None:
    one = program(4, family)
    assert tokens(lower(one, backend="eager", units=IN_PIECES)) == tokens(
        lower(one, backend="eager")
    )


def test_compiled_pieces_give_the_interpreted_tokens(shallow: SpecProgram, tmp_path: Path) -> None:
    """Inductor on each piece: layouts at the cuts are those that the graph says."""
    expected = tokens(lower(shallow, backend="eager"))
    cache = ArtifactCache(tmp_path)
    for is_warm in (False, True):
        lowered = lower(shallow, cache=cache, units=IN_PIECES)
        assert [phase.from_cache for phase in lowered.graphs.values()] == [is_warm] * 2
        assert tokens(lowered) == expected
        if _torch_compat.HAS_CPP_ENTRIES:
            for step in (phase.stitched for phase in lowered.graphs.values()):
                assert native_call(step.plan, step.pieces) is not None, "no Python within a step"


# --- the cache, with a compiler that takes no time ---


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that were compiled."""
    return fake_compiler.install(monkeypatch)


def test_each_piece_is_compiled_once_and_then_found(
    shallow: SpecProgram, compiled: list[fx.GraphModule], tmp_path: Path
) -> None:
    cache = ArtifactCache(tmp_path)
    expected = tokens(lower(shallow, backend="eager"))
    first = lower(shallow, cache=cache, units=IN_PIECES)
    assert len(compiled) == 3 + 3, "three pieces a phase, four calls"
    assert tokens(first) == expected
    assert not any(phase.from_cache for phase in first.graphs.values())
    second = lower(shallow, cache=cache, units=IN_PIECES)
    assert len(compiled) == 6
    assert all(phase.from_cache for phase in second.graphs.values())
    assert tokens(second) == expected


def test_a_piece_that_two_steps_share_is_compiled_once(
    compiled: list[fx.GraphModule], tmp_path: Path
) -> None:
    cache = ArtifactCache(tmp_path)
    lowered = lower(program(3, greedy_step=True), cache=cache, units=IN_PIECES)
    keys = [(step.phase, key) for step in lowered.graphs.values() for key in step.stitched.pieces]
    assert len(compiled) == len(set(keys)) < len(keys)


def test_what_was_begun_is_kept_where_starting_stops(
    shallow: SpecProgram, compiled: list[fx.GraphModule], tmp_path: Path
) -> None:
    def stop(record: Progress) -> None:
        if record.what.startswith("decode") and record.detail == "part 2 of 3":
            raise InterruptedError(record.what)

    cache = ArtifactCache(tmp_path)
    with pytest.raises(InterruptedError, match="decode"):
        lower(shallow, cache=cache, units=IN_PIECES, progress=Reporter(stop))
    assert len(compiled) == 3 + 1
    told: list[Progress] = []
    lower(shallow, cache=cache, units=IN_PIECES, progress=Reporter(told.append))
    assert len(compiled) == 3 + 3
    found = {one.what: one.from_cache for one in told if one.done and one.stage == "compile"}
    assert found == {"prefill": True, "decode, K=0": False, "machine code": None}


@pytest.mark.parametrize("how", ["torn", "deleted", "plan torn"])
def test_a_lost_piece_alone_is_compiled_again(
    shallow: SpecProgram, compiled: list[fx.GraphModule], tmp_path: Path, how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    cache = ArtifactCache(tmp_path)
    expected = tokens(lower(shallow, cache=cache, units=IN_PIECES))
    if how == "plan torn":
        for path in (tmp_path / "artifacts").glob("*.plan.json"):
            path.write_text('{"plan": ')
    else:
        victim = sorted((tmp_path / "artifacts").glob("*.bin"))[0]
        if how == "torn":
            victim.write_text("no such artifact")
        else:
            victim.unlink()
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        again = lower(shallow, cache=cache, units=IN_PIECES)
    assert len(compiled) == (6 if how == "plan torn" else 7)
    assert "dropping unreadable" in caplog.text
    assert tokens(again) == expected
    lower(shallow, cache=cache, units=IN_PIECES)
    assert len(compiled) == (6 if how == "plan torn" else 7), "it was saved"


TREE = DraftTree(choices=[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
CHAINS = [pytest.param(name, None, marks=pytest.mark.slow, id=name) for name in METHODS]
TREES = [pytest.param(name, TREE, id=f"tree of {name}") for name in ("eagle3", "medusa")]


@pytest.mark.parametrize(("method", "tree"), [*CHAINS, *TREES])
def test_every_method_starts_again_in_pieces(
    method: str, tree: DraftTree | None, compiled: list[fx.GraphModule], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Deep targets are compiled in pieces, for any drafter; what a tree knows is in its pieces."""
    monkeypatch.setattr(artifacts, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(lowering, "PIECES_FROM_LAYERS", 1)
    model = tiny_target("llama", num_layers=3)
    options = {"max_batch_size": 2, "max_seq_len": 48, "max_prefill_tokens": 24, "spec": method}
    options |= {"num_draft_tokens": 3} if tree is None else {"draft_tree": tree}
    prompts, params = [[5, 6, 7, 8, 9], [11]], SamplingParams(max_new_tokens=9, ignore_eos=True)
    with compilespec.compile(model, "none", max_seq_len=48, backend="eager") as plain:
        expected = [one.token_ids for one in plain.generate(prompts, params)]
    num_compiled = []
    for _ in range(2):
        drafter = METHODS[method](model, traced_info(model), 3)
        with compilespec.compile(model, **options, **drafter) as engine:
            assert [one.token_ids for one in engine.generate(prompts, params)] == expected
        num_compiled.append(len(compiled))
    assert num_compiled[0] == num_compiled[1] > 3


def test_pieces_are_for_deep_targets(
    shallow: SpecProgram, compiled: list[fx.GraphModule], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert lower(shallow, cache=ArtifactCache(tmp_path)).graphs["decode"].stitched is None
    assert len(compiled) == 2
    monkeypatch.setattr(lowering, "PIECES_FROM_LAYERS", 3)
    assert lower(shallow, cache=ArtifactCache(tmp_path)).graphs["decode"].stitched is not None
    assert len(compiled) == 2 + 6


def test_what_cannot_be_cut_is_compiled_as_a_whole(
    shallow: SpecProgram, compiled: list[fx.GraphModule], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(gm: fx.GraphModule) -> Any:
        raise PassError("mm has a size that is an expression")

    monkeypatch.setattr(lowering, "split_at_attention", refuse)
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        lowered = lower(shallow, cache=ArtifactCache(tmp_path), units=IN_PIECES)
    assert "decode, K=0 is lowered as a whole: mm has a size" in caplog.text
    assert len(compiled) == 2
    assert tokens(lowered) == tokens(lower(shallow, backend="eager"))
