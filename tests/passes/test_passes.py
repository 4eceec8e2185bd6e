"""One section a pass: what it changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compilespec import _torch_compat
from compilespec.errors import PassError
from compilespec.methods.eagle3 import random_head
from compilespec.methods.registry import get_method
from compilespec.ops.packed_linear import pack_weight
from compilespec.passes.aten.check_mutations import check_mutations
from compilespec.passes.aten.cleanup import cleanup
from compilespec.passes.aten.merge_projections import merge_projections
from compilespec.passes.aten.prepack_linears import prepack_linears
from compilespec.passes.contracts import form
from compilespec.passes.graph.nodes import find_role, get_outputs, output_node, set_outputs
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, Pass, PassContext, run_passes
from compilespec.passes.rewrite import start_step, to_aten
from compilespec.passes.runner import check_order, snapshot
from compilespec.passes.splice.acceptance.strict import accept_matching, first_token
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.check_markers import check_markers
from compilespec.passes.splice.commit_state import commit_state
from compilespec.passes.splice.draft_loops.calls import next_token
from compilespec.passes.splice.insert_paged_attention import insert_paged_attention
from compilespec.passes.splice.narrow_logits import narrow_logits
from compilespec.passes.splice.narrow_rows import narrow_rows
from compilespec.passes.splice.read_state import place, read_decode_state, read_state
from compilespec.passes.splice.rows import Rows, one_row, packed_rows, take_rows
from compilespec.passes.splice.shift_hidden_states import shift_prompt
from compilespec.passes.splice.splice_draft_loop import splice_draft_loop
from compilespec.program import InputSpec, PassRecord, Phase, ProgramConfig, marker_kind
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.hand_graphs import call, code, emit, graph_of
from tests.support.models import VOCAB, tiny_target

ATEN = torch.ops.aten
NUM_LAYERS, NUM_DRAFT_TOKENS = 2, 2
CONFIG = ProgramConfig(
    num_draft_tokens=NUM_DRAFT_TOKENS, max_batch_size=3, max_seq_len=22, max_prefill_tokens=32,
    block_size=4, num_blocks=18, dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip
PAD = -1


# --- shared: one captured target and drafter, cut into steps once ---


@pytest.fixture(scope="module")
def parts():
    model = tiny_target("qwen2", torch.float32)  # its q, k and v have biases
    del model.model.layers[NUM_LAYERS:]
    target = trace_target(model)
    info = describe_target(target, load_target(model))
    drafter = random_head(info, aux_layers=(0, 1, 2), num_draft_tokens=NUM_DRAFT_TOKENS).eval()
    return target, drafter.capture(CONFIG, info)


def context(parts: Any, phase: Phase, **changes: Any) -> PassContext:
    target, draft = parts
    fields: dict[str, Any] = {
        "phase": phase, "config": CONFIG, "capabilities": get_method("eagle3").capabilities,
        "target": target, "draft": draft, "aux_layers": (0, 1, 2),
    }  # fmt: skip
    return PassContext(**{**fields, **changes})


def upto(name: str) -> tuple[Pass, ...]:
    """The splicing passes before `name`."""
    names = [entry.name for entry in SPLICE_PASSES]
    return SPLICE_PASSES[: names.index(name)]


def started(
    parts: Any, phase: Phase, before: str, **changes: Any
) -> tuple[fx.GraphModule, PassContext]:
    """A step graph as the pass `before` finds it."""
    ctx = context(parts, phase, **changes)
    gm = start_step(ctx)
    run_passes(gm, ctx, upto(before), level="torch")
    return gm, ctx


@dataclasses.dataclass
class Rewritten:
    """One phase through all passes, with every stage of it kept as a callable."""

    ctx: PassContext
    spliced: fx.GraphModule  # torch IR, all splices done
    aten: fx.GraphModule  # right after the retrace
    records: dict[str, PassRecord]
    final: fx.GraphModule

    def before(self, name: str) -> fx.GraphModule:
        return fx.GraphModule(self.final, self.records[name].before)

    def after(self, name: str) -> fx.GraphModule:
        return fx.GraphModule(self.final, self.records[name].after)


@pytest.fixture(scope="module", params=["prefill", "decode"])
def rewritten(parts, request) -> Rewritten:
    ctx = context(parts, request.param)
    spliced = start_step(ctx)
    run_passes(spliced, ctx, SPLICE_PASSES, level="torch")
    aten, _ = to_aten(spliced, ctx)
    first = fx.GraphModule(aten, snapshot(aten.graph))
    records = run_passes(aten, ctx, ATEN_PASSES, level="aten", keep_graphs=True)
    return Rewritten(ctx, spliced, first, {record.name: record for record in records}, aten)


def random_inputs(ctx: PassContext, seed: int) -> dict[str, Tensor]:
    """A state in the middle of a run; a batch with a padded row (decode), two chunks (prefill)."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    inputs = {}
    for name, spec in ctx.buffers.items():
        if spec.kind == "cache":
            inputs[name] = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        else:
            inputs[name] = torch.full(spec.shape, spec.fill, dtype=spec.dtype)
    blocks = torch.randperm(CONFIG.num_blocks, generator=generator).to(torch.int32)
    table = torch.full((CONFIG.max_batch_size + 1, CONFIG.blocks_per_row), -1, dtype=torch.int32)
    table[:3] = blocks.view(3, -1)
    inputs["block_table_RM"] = table
    inputs["tokens_RS"] = ints(0, VOCAB, CONFIG.max_batch_size + 1, CONFIG.num_verify_tokens)
    inputs["seq_len_R"] = ints(1, CONFIG.max_seq_len, CONFIG.max_batch_size + 1)
    batch: dict[str, list[int]] = {
        "row_B": [2, 0, -1, 1],
        "ids_T": ints(0, VOCAB, 7).tolist(),
        "next_T": [*ints(0, VOCAB, 3).tolist(), -1, *ints(0, VOCAB, 3).tolist()],
        "position_T": [0, 1, 2, 3, 5, 6, 7],
        "row_T": [2, 2, 2, 2, 0, 0, 0],
        "owner_T": [0, 0, 0, 0, 1, 1, 1],
        "last_R": [3, 6],
        "commit_row_R": [2, -1],
    }
    return inputs | {name: torch.tensor(v, dtype=torch.int32) for name, v in batch.items()}


def run(gm: fx.GraphModule, ctx: PassContext, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a graph by the roles of its inputs, on copies; its outputs and every buffer after it."""
    gm.recompile()
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        outputs = gm(*[inputs[r] if r in inputs else _weight(ctx, r) for r in roles])
    named = dict(zip(("emitted", "num_emitted"), outputs, strict=True))
    return named | {name: inputs[name] for name in ctx.buffers}


def _weight(ctx: PassContext, name: str) -> Tensor:
    plain = name.removeprefix("packed.")
    value = torch.cat([ctx.weights[part] for part in plain.split("+")])
    return pack_weight(value) if plain != name else value


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], *, bound: float = 0.0) -> None:
    """Equal outputs and buffers; floats within `bound` of each buffer's largest value."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        limit = bound * float(value.abs().max()) if value.is_floating_point() else 0.0
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


# --- the runner ---


def _noop(step: Splice) -> int:
    return 1


def test_order_is_checked():
    def first(step):
        return 0

    def second(step):
        return 0

    check_order((Pass(run=first, at_least=0), Pass(run=second, after=("first",), at_least=0)))
    with pytest.raises(AssertionError, match="second must come after"):
        check_order((Pass(run=second, after=("first",), at_least=0), Pass(run=first, at_least=0)))
    with pytest.raises(AssertionError, match="needs matches or at_least"):
        check_order((Pass(run=first),))
    with pytest.raises(AssertionError, match="needs matches or at_least"):
        check_order((Pass(run=first, at_least=0, matches=lambda ctx: 1),))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"matches": lambda ctx: 2}, r"pass _noop \(decode\): expected 2 matches, found 1"),
        ({"matches": lambda ctx: 0}, r"pass _noop \(decode\): expected 0 matches, found 1"),
        ({"at_least": 3}, r"pass _noop \(decode\): expected at least 3 matches, found 1"),
    ],
)
def test_a_wrong_number_of_matches_is_an_error(limits, message):
    gm, ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(2)))
    with pytest.raises(PassError, match=message):
        run_passes(gm, ctx, (Pass(run=_noop, **limits),), level="aten")


def test_passes_are_recorded_skipped_and_disabled_by_exact_name():
    gm, ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(2)))
    (record,) = run_passes(gm, ctx, (Pass(run=_noop, at_least=0),), level="aten", keep_graphs=True)
    assert (record.name, record.matches, record.level) == ("_noop", 1, "aten")
    assert str(record.before) == str(record.after)
    skipped = Pass(run=_noop, matches=lambda ctx: None)
    assert run_passes(gm, ctx, (skipped,), level="aten") == []
    entry = Pass(run=_noop, at_least=0)
    assert run_passes(gm, ctx, (entry,), level="aten", disabled=frozenset({"_noop"})) == []
    assert len(run_passes(gm, ctx, (entry,), level="aten", disabled=frozenset({"_no"}))) == 1


def test_a_broken_graph_is_an_error_of_the_pass():
    def breaks(step: Splice) -> int:
        first, second = step.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
        first.args = (second, 1)  # uses what comes later
        return 1

    gm, ctx = graph_of(lambda x: (x + 1) + 2, x=("batch", torch.zeros(2)))
    with pytest.raises(PassError, match="pass breaks left a broken graph"):
        run_passes(gm, ctx, (Pass(run=breaks, at_least=1),), level="aten")


def test_every_node_names_the_pass_that_made_it(rewritten):
    authors = {
        node.meta["custom"]["pass"]
        for node in rewritten.final.graph.nodes
        if node.op == "call_function"
    }
    known = {entry.name for entry in (*SPLICE_PASSES, *ATEN_PASSES)} | {"trace", "to_aten"}
    assert authors <= known
    assert {"read_state", "insert_paged_attention", "prepack_linears", "commit_state"} <= authors
    assert all("val" in n.meta for n in rewritten.final.graph.nodes if n.op == "call_function")


# --- check_markers ---


def test_check_markers_counts_and_leaves_the_graph(parts):
    ctx = context(parts, "decode")
    gm = start_step(ctx)
    before = code(gm)
    assert check_markers(Splice(gm, ctx)) == NUM_LAYERS
    assert code(gm) == before


def test_check_markers_refuses_attention_without_a_cache(parts):
    ctx = context(parts, "decode")
    gm = start_step(ctx)
    marker = next(node for node in gm.graph.nodes if marker_kind(node) == "attention")
    marker.target, marker.args = nn.functional.scaled_dot_product_attention, marker.args[:3]
    with pytest.raises(PassError, match=r"model.layers.0.self_attn calls scaled_dot_product"):
        check_markers(Splice(gm, ctx))
    marker.target = torch.add  # a layer that lost its marker
    with pytest.raises(PassError, match=r"check_markers \(decode\): expected 2 matches, found 1"):
        run_passes(gm, ctx, SPLICE_PASSES[:1], level="torch")


# --- read_state ---


def test_read_state_replaces_ids_and_positions(parts):
    gm, ctx = started(parts, "decode", "read_state")
    assert read_state(Splice(gm, ctx)) == 2
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    assert not {"input_ids", "position_ids"} & set(roles)
    assert {"row_B", "tokens_RS", "seq_len_R", "block_table_RM"} <= set(roles)
    for role in ("ids", "position", "row", "slot", "row_index", "live", "start"):
        assert find_role(gm, role)
    assert ctx.buffers["tokens_RS"].shape == (CONFIG.max_batch_size + 1, NUM_DRAFT_TOKENS + 1)
    assert ctx.buffers["block_table_RM"].fill == -1
    assert all(spec.dtype == torch.int32 for spec in ctx.buffers.values())
    with pytest.raises(PassError, match="input_ids"):
        read_state(Splice(gm, ctx))  # a graph whose ids come from the state already


def emitted_graph(function: Callable[..., Any], names: list[str], **options: Any) -> fx.GraphModule:
    """`function` as passes emit it: over proxies, into a graph of its own."""
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    inputs = [gm.graph.placeholder(name) for name in names]
    end = gm.graph.output(())
    result = emit(gm, function, *inputs, before=end, **options)
    end.args = (result,)
    gm.recompile()
    return gm


def place_oracle(
    position: int, row: int, table: list[list[int]], limit: int, block: int
) -> tuple[int, int, int]:
    """(position, row, slot) of one token, from the words of E5 and H-16."""
    if row < 0 or position >= limit:
        return 0, -1, -1
    entry = table[row][position // block]
    return position, row, entry * block + position % block if entry >= 0 else -1


def test_decode_positions_and_slots_equal_a_scalar_oracle():
    """Past the maximum length, padded rows, blocks that are not allocated, tables of any order."""
    rng = random.Random(0)
    for _ in range(60):
        block, limit = rng.choice([1, 3, 4, 16]), rng.randint(1, 37)
        num_rows, num_tokens = rng.randint(1, 5), rng.randint(1, 9)
        width = -(-limit // block)
        table = [
            [rng.choice([-1, rng.randrange(50)]) for _ in range(width)] for _ in range(num_rows)
        ]
        table.append([-1] * width)  # the spare row
        lengths = [
            rng.choice([0, limit - 1, limit, rng.randint(0, limit)]) for _ in range(num_rows + 1)
        ]
        tokens = [[rng.randint(-1, 99) for _ in range(num_tokens)] for _ in range(num_rows + 1)]
        rows = rng.sample(range(num_rows), rng.randint(0, num_rows)) + [-1] * rng.randint(0, 3)
        if not rows:
            continue
        rng.shuffle(rows)
        gm = emitted_graph(
            read_decode_state, ["row", "tokens", "length", "table"], num_verify_tokens=num_tokens,
            num_row_tokens=num_tokens, max_seq_len=limit, block_size=block, spare_row=num_rows,
        )  # fmt: skip
        batch = [torch.tensor(x, dtype=torch.int32) for x in (rows, tokens, lengths, table)]
        ids, position, row, slot, index, live, start = call(gm, *batch)
        assert [part.dtype for part in (ids, position, row, slot, start)] == [torch.int32] * 5
        assert live.tolist() == [r >= 0 for r in rows]
        assert index.tolist() == [r if r >= 0 else num_rows for r in rows]
        assert start.tolist() == [lengths[r] for r in rows]
        for b, r in enumerate(rows):
            assert ids[b].tolist() == [max(0, token) for token in tokens[r]]
            for j in range(num_tokens):
                want = place_oracle(lengths[r] + j, r, table, limit, block)
                assert (position[b, j].item(), row[b, j].item(), slot[b, j].item()) == want


def test_single_passes_go_where_the_oracle_says():
    """`next_token`: ids clamped, step t at start + t - 1, redirected like all others."""
    table = [[2, 0, -1], [1, 4, 3], [-1, -1, -1]]
    start, limit, block = [3, 9], 11, 4
    for step in (1, 2, 3, 4):
        gm = emitted_graph(
            next_token, ["token", "start", "row", "index", "live", "table"], number=step,
            max_seq_len=limit, block_size=block,
        )  # fmt: skip
        for rows in ([0, 1], [-1, 1], [1, 0]):
            live = torch.tensor([r >= 0 for r in rows])
            index = torch.tensor([r if r >= 0 else 2 for r in rows])
            begin = torch.tensor([start[r] if r >= 0 else 0 for r in rows], dtype=torch.int32)
            token = torch.tensor([7, -1], dtype=torch.int32)
            row_B = torch.tensor(rows, dtype=torch.int32)
            ids, position, row, slot = call(
                gm, token, begin, row_B, index, live, torch.tensor(table, dtype=torch.int32)
            )
            assert ids.tolist() == [[7], [0]]
            for b, r in enumerate(rows):
                want = place_oracle(int(begin[b]) + step - 1, r, table, limit, block)
                assert (position[b, 0].item(), row[b, 0].item(), slot[b, 0].item()) == want


def test_place_reads_no_block_past_the_table():
    """The position is redirected before the table is read: an index past it would be an error."""
    wanted = torch.tensor([[100, 3]], dtype=torch.int32)
    row = torch.zeros(1, 1, dtype=torch.int32)
    position, row, slot = place(
        wanted,
        row,
        row.long(),
        row >= 0,
        torch.tensor([[5]], dtype=torch.int32),
        max_seq_len=4,
        block_size=4,
    )
    assert (position.tolist(), row.tolist(), slot.tolist()) == ([[0, 3]], [[-1, 0]], [[-1, 23]])


# --- narrow_logits ---


def test_narrow_logits_runs_the_head_on_the_last_rows_only(parts):
    gm, ctx = started(parts, "prefill", "narrow_logits")
    inputs = random_inputs(ctx, 0)
    wide = _logits(gm, ctx, inputs)
    assert narrow_logits(Splice(gm, ctx)) == 1
    narrow = _logits(gm, ctx, inputs)
    assert (wide.shape, narrow.shape) == ((1, 7, VOCAB), (1, 2, VOCAB))
    torch.testing.assert_close(narrow, wide[:, inputs["last_R"].long()], rtol=1e-5, atol=1e-5)
    head = next(n for n in reversed(gm.graph.nodes) if n.target is torch._C._nn.linear)
    assert head.args[0].target == "index_select"


def test_narrow_logits_gathers_after_what_is_not_rowwise(parts):
    """A model that mixes the rows of its logits keeps them all until then."""
    gm, ctx = started(parts, "prefill", "narrow_logits")
    logits = find_role(gm, "logits")
    mixed = emit(gm, lambda x: x - x.amax(1, keepdim=True), logits, before=output_node(gm))
    mixed.meta["role"] = logits.meta.pop("role")
    set_outputs(gm, {"logits": mixed})
    inputs = random_inputs(ctx, 1)
    wide = _logits(gm, ctx, inputs)
    narrow_logits(Splice(gm, ctx))
    assert torch.equal(_logits(gm, ctx, inputs), wide[:, inputs["last_R"].long()])


def _logits(gm: fx.GraphModule, ctx: PassContext, inputs: dict[str, Tensor]) -> Tensor:
    gm.graph.lint()
    gm.recompile()
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        (logits,) = gm(*[inputs[r] if r in inputs else ctx.weights[r] for r in roles])
    return logits


# --- insert_paged_attention ---


def test_paged_attention_from_an_empty_cache_equals_the_markers(parts):
    """A whole prompt from position 0: the cache adds nothing, so the numbers are the markers'."""
    gm, ctx = started(parts, "prefill", "insert_paged_attention")
    inputs = random_inputs(ctx, 0)
    inputs["position_T"] = torch.arange(7, dtype=torch.int32)
    inputs["row_T"] = torch.ones(7, dtype=torch.int32)
    want = _logits(gm, ctx, inputs)
    assert insert_paged_attention(Splice(gm, ctx)) == NUM_LAYERS
    assert not any(marker_kind(node) for node in gm.graph.nodes)
    caches = [name for name, spec in ctx.buffers.items() if spec.kind == "cache"]
    assert caches == [
        f"cache.target.{i}.{half}" for i in range(NUM_LAYERS) for half in ("key", "value")
    ]
    assert ctx.buffers[caches[0]].shape == (CONFIG.num_blocks, CONFIG.block_size, 2, 12)
    inputs |= {name: torch.full(ctx.buffers[name].shape, float("nan")) for name in caches}
    torch.testing.assert_close(_logits(gm, ctx, inputs), want, rtol=1e-4, atol=1e-4)
    assert insert_paged_attention(Splice(gm, ctx)) == 0  # leaves paged attention alone


def test_paged_attention_needs_known_shapes(parts):
    gm, ctx = started(parts, "decode", "insert_paged_attention")
    marker = next(node for node in gm.graph.nodes if marker_kind(node) == "attention")
    del marker.args[1].meta["example"]
    with pytest.raises(
        PassError, match=r"cache\.target\.0\.key: its attention marker has no known"
    ):
        insert_paged_attention(Splice(gm, ctx))


# --- splice_acceptance ---


def accept_oracle(ids: list[int], logits: list[list[float]]) -> tuple[list[int], list[int], int]:
    target = [
        max(range(len(row)), key=lambda v: (row[v], -v)) for row in logits
    ]  # first index wins
    count = 1
    while count < len(ids) and ids[count] == target[count - 1]:
        count += 1
    return target, [*target[:count], *[PAD] * (len(ids) - count)], count


def accept_greedy(ids: Any, logits: Any, *, num_draft_tokens: int) -> tuple[Any, ...]:
    target = logits.argmax(-1).to(torch.int32)
    return target, *accept_matching(ids, target, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("num_draft_tokens", range(9), ids="K{}".format)
def test_acceptance_equals_a_scalar_oracle(num_draft_tokens):
    """T03.  Few distinct logits and a small vocabulary: ties and accidental matches are common."""
    gm = emitted_graph(accept_greedy, ["ids", "logits"], num_draft_tokens=num_draft_tokens)
    generator = torch.Generator().manual_seed(num_draft_tokens)
    counts, tied = set(), 0
    for vocab_size in (1, 2, 3, 11):
        for batch in (1, 2, 3, 9, 64):
            size = (batch, num_draft_tokens + 1)
            logits = torch.randint(-2, 3, (*size, vocab_size), generator=generator).float()
            ids = torch.randint(-1, vocab_size, size, generator=generator, dtype=torch.int32)
            best = logits.argmax(-1)
            copied = torch.rand(size, generator=generator) < 0.7
            copied[:, 0] = False
            ids[copied] = best.roll(1, 1)[copied].to(torch.int32)
            target, emitted, count = call(gm, ids, logits)
            assert {target.dtype, emitted.dtype, count.dtype} == {torch.int32}
            tied += int((logits == logits.amax(-1, keepdim=True)).sum(-1).gt(1).sum())
            for b in range(batch):
                want = accept_oracle(ids[b].tolist(), logits[b].tolist())
                assert (target[b].tolist(), emitted[b].tolist(), count[b].item()) == want
                counts.add(count[b].item())
    assert counts == set(range(1, num_draft_tokens + 2))
    assert tied > 10


def test_acceptance_worked_example():
    logits = nn.functional.one_hot(torch.tensor([[5, 9, 7, 8]]), 10).float()
    ids = torch.tensor([[1, 5, 6, 7]], dtype=torch.int32)
    _, emitted, count = call(
        emitted_graph(accept_greedy, ["ids", "logits"], num_draft_tokens=3), ids, logits
    )
    assert emitted.tolist() == [[5, 9, PAD, PAD]]
    assert count.tolist() == [2]


def test_first_token_pads_unfinished_prompts():
    target = torch.tensor([[1], [0], [2]], dtype=torch.int32)
    emitted, count = call(
        emitted_graph(first_token, ["target", "live"]), target, torch.tensor([True, False, True])
    )
    assert emitted.tolist() == [[1], [PAD], [2]]
    assert count.tolist() == [1, 0, 1]


def test_splice_acceptance_needs_logits(parts):
    gm, ctx = started(parts, "decode", "splice_acceptance")
    del find_role(gm, "logits").meta["role"]
    entry = next(entry for entry in SPLICE_PASSES if entry.name == "splice_acceptance")
    with pytest.raises(PassError, match="no node plays the role 'logits'"):
        run_passes(gm, ctx, (entry,), level="torch")


# --- shift_hidden_states ---


def test_prompt_shift_worked_example():
    """E2: [a1 | b1 b2 | c1 c2 c3], next tokens [a2, b3, c4]; a and c end here, b goes on (H-4)."""
    following = torch.tensor([-1, 12, 13, 22, 23, -1], dtype=torch.int32)  # b: its true token 13
    sampled = torch.tensor([[2], [99], [24]], dtype=torch.int32)  # b's sample means nothing
    owner = torch.tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32)
    gm = emitted_graph(shift_prompt, ["next", "target", "owner"])
    assert call(gm, following, sampled, owner).tolist() == [[2, 12, 13, 22, 23, 24]]


def test_prompt_shift_on_ragged_chunks():
    from compilespec.runtime.executor import PrefillChunk
    from compilespec.runtime.packing import pack_chunks

    rng = random.Random(0)
    gm = emitted_graph(shift_prompt, ["next", "target", "owner"])
    for _ in range(50):
        chunks, want, sampled = [], [], []
        for row in range(rng.randint(1, 5)):
            prompt = rng.choices(range(VOCAB), k=rng.randint(1, 12))
            start = rng.randrange(len(prompt))
            end = rng.randint(start + 1, len(prompt))
            token = rng.randrange(VOCAB)
            following = prompt[end] if end < len(prompt) else None
            chunks.append(
                PrefillChunk(
                    row=row, start=start, tokens=tuple(prompt[start:end]), next_token=following
                )
            )
            want += [*prompt, token][start + 1 : end + 1]
            sampled.append([token])
        packed = pack_chunks(chunks)
        batch = [
            torch.tensor(x, dtype=torch.int32)
            for x in (packed["next_T"], sampled, packed["owner_T"])
        ]
        assert call(gm, *batch).tolist() == [want]


# --- narrow_rows ---


def test_rows_are_taken_where_the_index_says():
    x, last_B = torch.randn(5, 4, 2, 3), torch.tensor([0, 3, 1, 2, 0])
    want = torch.stack([row[n][None] for row, n in zip(x, last_B, strict=True)])
    graph = emitted_graph(one_row, ["x", "index"], sizes=(2, 3))
    assert torch.equal(call(graph, x, last_B), want)
    graph = emitted_graph(one_row, ["x", "index"], sizes=None)
    assert torch.equal(call(graph, x[:, :, 0], last_B), want[:, :, 0])
    packed_1TD, last_R = torch.randn(1, 6, 3), torch.tensor([0, 4, 5])
    graph = emitted_graph(packed_rows, ["x", "index"])
    assert torch.equal(call(graph, packed_1TD, last_R), packed_1TD[:, [0, 4, 5]])


def _mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Every row by itself, behind a sum over rows."""
    x = x.cumsum(1)
    normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    low, high = nn.functional.linear(normed, w).chunk(2, dim=-1)
    gated = torch.cat([nn.functional.silu(low) * high, -low[..., :3]], dim=-1)
    heads = gated[:, 0:, :].reshape(x.shape[0], x.shape[1], 3, 3)
    return x + nn.functional.linear(heads.view(x.shape[0], x.shape[1], 9), v)


def _centred(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The second product reads every row's, for their mean."""
    y = nn.functional.linear(x, w)[..., :9]
    return nn.functional.linear(y - y.mean(1, keepdim=True), v)


def _in_place(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What the first product made is written before it is read: left alone."""
    y = nn.functional.linear(x, w)[..., :9].contiguous()
    y.mul_(2)
    return nn.functional.linear(y, v)


def _torn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """One part is mixed over rows, so that the rows are taken of the other part, not of both."""
    low, high = nn.functional.linear(x, w).chunk(2, dim=-1)
    return nn.functional.linear(torch.cat([low.cumsum(1), high[..., :3] * 2], dim=-1), v)


@pytest.mark.parametrize(
    ("function", "products"),
    [(_mlp, 2), (_centred, 1), (_in_place, 0), (_torn, 1)],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("form", ["one of each", "packed", "last"])
def test_a_choice_of_rows_moves_up_to_where_rows_meet(function, products, form):
    shape = (1, 11, 8) if form == "packed" else (3, 4, 8)
    inputs = torch.randn(shape), torch.randn(12, 8), torch.randn(8, 9)
    gm = fx.symbolic_trace(function)
    ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(1)))[1]
    ctx.weights.update(w=inputs[1], v=inputs[2])
    _note_shapes(gm, inputs)
    end = output_node(gm)
    last = torch.tensor([0, 2, 10]) if form == "packed" else torch.tensor([1, 3, 0])
    gm.register_buffer("index", last)
    with gm.graph.inserting_before(end):
        index = gm.graph.get_attr("index")
    rows = Rows(index=None if form == "last" else index, is_packed=form == "packed")
    step, source = Splice(gm, ctx), end.args[0]
    step.roles.logits = take_rows(step, step.value(source), rows)
    end.args = (find_role(gm, "logits"),)
    want = call(gm, *inputs)
    assert narrow_rows(step) == products
    assert find_role(gm, "logits") is end.args[0]
    gm.graph.lint()
    torch.testing.assert_close(call(gm, *inputs), want)
    assert narrow_rows(step) == 0  # nothing is left to move


def _note_shapes(gm: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Shapes as splicing leaves them, the batch symbolic; weights are placeholders with a role."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Noting(gm).run(*[value.clone() for value in inputs])
    for node, value in values.items():
        node.meta["custom"] = {"pass": "trace"}
        if node.op == "placeholder" and node.name != "x":
            node.meta["role"] = node.name
        elif isinstance(value, Tensor):
            node.meta["example"] = ((None, *value.shape[1:]), value.dtype)


def test_a_last_layer_runs_on_the_rows_that_go_on(parts):
    """Its o, gate, up and down products: a drafter's, and the target's where none taps it."""
    for phase in ("decode", "prefill"):
        gm, ctx = started(parts, phase, "narrow_rows")
        assert narrow_rows(Splice(gm, ctx)) == 4
    none = {"capabilities": get_method("none").capabilities, "draft": {}, "aux_layers": ()}
    gm, ctx = started(parts, "prefill", "narrow_rows", **none)
    assert narrow_rows(Splice(gm, ctx)) == 4
    gm, ctx = started(parts, "decode", "narrow_rows", **none)
    assert narrow_rows(Splice(gm, ctx)) == 0


# --- splice_draft_loop ---


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_draft_loop_is_unrolled(parts, phase):
    gm, ctx = started(parts, phase, "splice_draft_loop")
    target_calls = sum("paged_attention" in str(node.target) for node in gm.graph.nodes)
    assert splice_draft_loop(Splice(gm, ctx)) == NUM_DRAFT_TOKENS
    calls = [node for node in gm.graph.nodes if "paged_attention" in str(node.target)]
    assert len(calls) == target_calls + NUM_DRAFT_TOKENS
    assert {node.args[3].meta["role"] for node in calls[target_calls:]} == {"cache.draft.0.key"}
    fragments = [node.meta["custom"]["fragment"] for node in calls[target_calls:]]
    assert fragments == ["draft.forward"] * NUM_DRAFT_TOKENS


def test_the_draft_loop_must_make_every_pass(parts):
    """K one larger than what the pass unrolled is an error of the pass that says so."""
    gm, ctx = started(parts, "decode", "splice_draft_loop")
    entry = next(entry for entry in SPLICE_PASSES if entry.name == "splice_draft_loop")
    wrong = dataclasses.replace(entry, matches=lambda ctx: NUM_DRAFT_TOKENS + 1)
    with pytest.raises(
        PassError, match=r"pass splice_draft_loop \(decode\): expected 3 matches, found 2"
    ):
        run_passes(gm, ctx, (wrong,), level="torch")


def test_a_method_without_a_drafter_is_left_alone(parts):
    ctx = context(
        parts, "decode", capabilities=get_method("none").capabilities, aux_layers=(), draft={},
        config=dataclasses.replace(CONFIG, num_draft_tokens=0),
    )  # fmt: skip
    gm = start_step(ctx)
    names = [record.name for record in run_passes(gm, ctx, SPLICE_PASSES, level="torch")]
    assert not {"tap_hidden_states", "shift_hidden_states", "splice_draft_loop"} & set(names)
    assert "splice_acceptance" in names
    assert not any("draft" in name for name in ctx.buffers)


# --- commit_state ---


def test_commit_writes_live_rows_and_spares_the_rest(rewritten):
    ctx, inputs = rewritten.ctx, random_inputs(rewritten.ctx, 3)
    if ctx.phase == "decode":
        inputs["seq_len_R"][0] = CONFIG.max_seq_len - 1  # its new length is cut at the maximum
    after = run(rewritten.spliced, ctx, inputs)
    old, new = inputs["seq_len_R"], after["seq_len_R"]
    if ctx.phase == "decode":
        for b, row in enumerate(inputs["row_B"].tolist()):
            if row >= 0:
                count = int(after["num_emitted"][b])
                assert int(new[row]) == min(int(old[row]) + count, CONFIG.max_seq_len)
                assert int(after["tokens_RS"][row, 0]) == int(after["emitted"][b, count - 1])
                assert (after["tokens_RS"][row, 1:] >= 0).all()
    else:
        assert int(new[2]) == 4  # the finished prompt's length
        assert int(after["tokens_RS"][2, 0]) == int(after["emitted"][0, 0])
        assert after["emitted"][1].tolist() == [PAD]
        for row in (0, 1):  # an unfinished chunk and a row that is not in the batch
            assert new[row] == old[row]
            assert torch.equal(after["tokens_RS"][row], inputs["tokens_RS"][row])


def test_commit_needs_the_acceptance(parts):
    gm, ctx = started(parts, "decode", "splice_acceptance")
    before = code(gm)
    with pytest.raises(PassError, match="no node plays the role 'target'"):
        commit_state(Splice(gm, ctx))
    assert code(gm) == before


# --- to_aten ---


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_copied_operations_are_what_tracing_each_gives(parts, phase, monkeypatch):
    """Sizes may be made once where they were made often; the rest, in order, is the same."""
    gm, ctx = started(parts, phase, "commit_state")
    copied = _tensor_rows(to_aten(gm, ctx)[0])
    monkeypatch.setattr(_torch_compat, "_Retracing", fx.Interpreter)
    traced = _tensor_rows(to_aten(gm, ctx)[0])
    assert len(copied) > 200
    assert copied == traced


def _tensor_rows(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Nodes that make tensors: operator, arguments by place (sizes by value), shape and origin."""
    place: dict[fx.Node, Any] = {}
    rows: list[tuple[Any, ...]] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            place[node] = str(value.node.expr)
            continue
        place[node] = len(rows)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: place[n])
        rows.append((str(node.target), str(arguments), form(value), str(node.meta["custom"])))
    return rows


@pytest.mark.parametrize("seed", range(2))
def test_the_retrace_changes_no_number(rewritten, seed):
    inputs = random_inputs(rewritten.ctx, seed)
    assert_same(
        run(rewritten.aten, rewritten.ctx, inputs), run(rewritten.spliced, rewritten.ctx, inputs)
    )
    assert all(isinstance(t, torch._ops.OpOverload) or "getitem" in str(t) or "built-in" in str(t)
               for t in targets(rewritten.aten))  # fmt: skip


# --- the ATen passes on the real graphs ---


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("cleanup", 0.0),
        ("merge_projections", 2e-5),
        ("fuse_head_argmax", 0.0),
        ("read_long_rows", 0.0),
        ("prepack_linears", 2e-5),
        ("bound_positions", 0.0),
        ("check_mutations", 0.0),
    ],
)
def test_before_and_after_agree(rewritten, name, bound, seed):
    """Rounding passes: 2e-5 of a cache's largest entry is ~170 float32 ulp over 2 layers."""
    ctx, inputs = rewritten.ctx, random_inputs(rewritten.ctx, seed)
    before, after = (run(gm, ctx, inputs) for gm in (rewritten.before(name), rewritten.after(name)))
    assert_same(after, before, bound=bound)


def test_the_real_graphs_are_rewritten(rewritten):
    records, final = rewritten.records, rewritten.final
    assert records["cleanup"].nodes_after < records["cleanup"].nodes_before
    # Per target layer q, k, v and gate, up; the drafter alike, once a pass.
    num_layers = NUM_LAYERS + NUM_DRAFT_TOKENS
    assert records["merge_projections"].matches == 2 * num_layers
    num_products = 4 * num_layers + 1 + NUM_DRAFT_TOKENS + 1  # heads; the drafter's fc, once
    assert records["prepack_linears"].matches == num_products
    assert targets(final).count(torch.ops.compilespec.packed_linear.default) == num_products
    assert ATEN.mm.default not in targets(final)
    buffers = rewritten.ctx.buffers.values()
    assert records["check_mutations"].matches == sum(not spec.by_host for spec in buffers)
    roles = [node.meta["role"] for node in final.graph.nodes if node.op == "placeholder"]
    assert len(roles) == len(set(roles))


# --- cleanup ---


def test_cleanup_merges_equal_and_drops_dead_nodes():
    def function(x: Tensor, w: Tensor, unused: Tensor) -> Tensor:
        dead = torch.sin(x) @ unused
        del dead
        return (x @ w).cos() + (x @ w).cos()

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    gm, ctx = graph_of(function, x=("batch", x), w=("weight", w), unused=("weight", w.clone()))
    want = call(gm, x, w, w)
    assert cleanup(Splice(gm, ctx)) > 0
    assert "unused" not in ctx.inputs
    assert targets(gm).count(ATEN.mm.default) == targets(gm).count(ATEN.cos.default) == 1
    assert torch.equal(call(gm, x, w), want)


def test_cleanup_leaves_a_graph_of_distinct_nodes_alone():
    gm, ctx = graph_of(lambda x, y: (x + 1) * (y + 1) * (x + 1.5) * x.sum(0) * x.sum(1),
                       x=("batch", torch.ones(3, 3)), y=("batch", torch.ones(3, 3)))  # fmt: skip
    before = code(gm)
    assert cleanup(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_cleanup_merges_nothing_across_writes():
    """Two reads of a cache around a write are different values, through its views as well."""

    def function(cache: Tensor, index: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        first, seen = cache.cos(), cache.view(-1).cos()
        cache.index_put_((index,), value)
        second, again = cache.cos(), cache.view(-1).cos()
        cache.index_put_((index,), value)  # writes are never merged or dropped either
        return first, second, seen, again

    cache, index, value = torch.randn(4, 2), torch.tensor([1]), torch.randn(1, 2)
    gm, ctx = graph_of(
        function, cache=("cache", cache), index=("batch", index), value=("batch", value)
    )
    want = call(gm, cache, index, value)
    cleanup(Splice(gm, ctx))
    got = call(gm, cache, index, value)
    assert all(map(torch.equal, got, want))
    assert not torch.equal(got[0], got[1])
    assert not torch.equal(got[2], got[3])
    assert targets(gm).count(ATEN.index_put_.default) == 2


def test_cleanup_drops_writes_that_only_dead_code_read():
    """What a model writes in place on its way to a result that nobody wants, through a view too."""

    def function(x: Tensor, cache: Tensor) -> Tensor:
        top = x.cos()
        top.div_(top.sum())
        spread = torch.empty_like(x).view(-1)
        spread.index_put_((torch.arange(12),), (top * 3).view(-1))
        dead = spread.view(3, 4) + top
        kept = x.sin()
        kept.view(-1).mul_(2.0)
        cache.add_(kept)
        del dead
        return kept

    x, cache = torch.randn(3, 4), torch.zeros(3, 4)
    gm, ctx = graph_of(function, x=("batch", x), cache=("cache", cache))
    want, written = call(gm, x, cache).clone(), cache.clone()
    assert cleanup(Splice(gm, ctx)) > 0
    assert not {ATEN.div_.Tensor, ATEN.index_put_.default, ATEN.cos.default} & set(targets(gm))
    assert torch.equal(call(gm, x, cache.zero_()), want)
    assert torch.equal(cache, written)


def test_cleanup_keeps_temporaries_apart_that_are_written():
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        first.add_(x)
        return first, second

    x = torch.randn(3)
    gm, ctx = graph_of(function, x=("batch", x))
    cleanup(Splice(gm, ctx))
    first, second = call(gm, x)
    assert torch.equal(first, x)
    assert torch.equal(second, torch.zeros(3))


def test_cleanup_keeps_random_draws_apart():
    gm, ctx = graph_of(
        lambda x: (torch.rand_like(x), torch.rand_like(x)), x=("batch", torch.ones(8))
    )
    cleanup(Splice(gm, ctx))
    first, second = call(gm, torch.ones(8))
    assert not torch.equal(first, second)


# --- merge_projections and prepack_linears ---


def two_linears(**changes: Any):
    weights = {"a": torch.randn(5, 4), "b": torch.randn(3, 4)}
    x = torch.randn(6, 4)
    gm, ctx = graph_of(
        lambda x, a, b: (nn.functional.linear(x, a), nn.functional.linear(x, b)),
        x=("batch", x), a=("weight", weights["a"]), b=("weight", weights["b"]),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(ctx, name, value)
    return gm, ctx, x, weights


def test_merge_projections_makes_one_product():
    gm, ctx, x, weights = two_linears()
    want = call(gm, x, weights["a"], weights["b"])
    assert merge_projections(Splice(gm, ctx)) == 1
    assert targets(gm).count(ATEN.mm.default) == 1
    assert ctx.inputs["a+b"] == InputSpec(name="a+b", kind="weight", sources=("a", "b"))
    gm.graph.lint()
    inputs = {
        "x": x,
        "a": weights["a"],
        "b": weights["b"],
        "a+b": torch.cat([weights["a"], weights["b"]]),
    }
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_merge_projections_copies_what_is_viewed_across_rows():
    """Heads of all tokens in one list, as gated norms take them; heads of each token need none."""
    weights = {"a": torch.randn(8, 4), "b": torch.randn(6, 4)}
    x = torch.randn(6, 4)

    def function(x, a, b):
        first, second = nn.functional.linear(x, a), nn.functional.linear(x, b)
        heads = second.reshape(x.shape[0], 3, 2)
        return first.reshape(x.shape[0], 2, 4).reshape(-1, 4) * 2, heads + 1, heads.reshape(-1)

    placed = {name: ("weight", weight) for name, weight in weights.items()}
    gm, ctx = graph_of(function, x=("batch", x), **placed)
    want = call(gm, x, *weights.values())
    assert merge_projections(Splice(gm, ctx)) == 1
    assert targets(gm).count(ATEN.clone.default) == 2
    gm.graph.lint()
    inputs = {"x": x, **weights, "a+b": torch.cat([*weights.values()])}
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_merge_projections_leaves_alone_what_is_not_a_group():
    gm, ctx, *_ = two_linears(merge=False)  # off where nothing runs: on the meta device
    before = code(gm)
    assert merge_projections(Splice(gm, ctx)) == 0
    assert code(gm) == before
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    for function in (
        lambda x, a, b: nn.functional.linear(nn.functional.linear(x, a), b),  # one feeds the other
        lambda x, a, b: (nn.functional.linear(x, a), nn.functional.linear(x, b, b[0])),  # a bias
        lambda x, a, b: (x @ a.t(), x @ (b * 2).t()),  # not a weight
        lambda x, a, b: (x @ a, x @ b),  # not transposed
        lambda x, a, b: (
            nn.functional.linear(x, a),
            nn.functional.linear(x, a) + b[0],
        ),  # one weight twice
    ):
        gm, ctx = graph_of(function, x=("batch", x), a=("weight", w), b=("weight", w + 1))
        assert merge_projections(Splice(gm, ctx)) == 0


def test_prepack_linears_packs_weights_on_the_cpu_only():
    gm, ctx, x, weights = two_linears()
    want = call(gm, x, weights["a"], weights["b"])
    assert prepack_linears(Splice(gm, ctx)) == 2
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    assert sorted(roles) == ["packed.a", "packed.b", "x"]
    assert all(
        ctx.inputs[f"packed.{n}"].packed and ctx.inputs[f"packed.{n}"].sources == (n,) for n in "ab"
    )
    inputs = {"x": x} | {f"packed.{name}": pack_weight(w) for name, w in weights.items()}
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)
    gm, ctx, *_ = two_linears(prepack=False)
    before = code(gm)
    assert prepack_linears(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_prepack_linears_leaves_products_of_activations_alone():
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    for function in (lambda x, w: (x @ x.t(), x @ w), lambda x, w: x @ (w + 1).t()):
        gm, ctx = graph_of(function, x=("batch", x), w=("weight", w))
        before = code(gm)
        assert prepack_linears(Splice(gm, ctx)) == 0
        assert code(gm) == before


# --- check_mutations ---


def test_check_mutations_allows_buffers_and_temporaries():
    def function(state: Tensor, cache: Tensor, x: Tensor) -> Tensor:
        state.view(-1).add_(1)
        cache[0].copy_(x)
        return torch.zeros_like(x).add_(x)

    specs = {
        "state": ("state", torch.zeros(2)),
        "cache": ("cache", torch.zeros(2, 3)),
        "x": ("batch", torch.ones(3)),
    }
    gm, ctx = graph_of(function, **specs)
    before = code(gm)
    assert check_mutations(Splice(gm, ctx)) == 2
    assert code(gm) == before


@pytest.mark.parametrize("kind", ["weight", "batch"])
def test_check_mutations_refuses_other_writes(kind):
    gm, ctx = graph_of(lambda w: w.view(-1)[1:].mul_(2), w=(kind, torch.ones(2, 2)))
    with pytest.raises(PassError, match="the graph writes w, which is neither state nor cache"):
        check_mutations(Splice(gm, ctx))


def test_outputs_are_named(rewritten):
    assert list(get_outputs(rewritten.final)) == ["emitted_BS", "num_emitted_B"]
