"""Bounds of indices: what is proved, what is guarded, and what a wrong graph must not prove."""

from __future__ import annotations

import functools
import importlib
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

import compilespec
from compilespec.inspect.bounds import Bound, prove
from compilespec.methods.eagle3 import random_head
from compilespec.passes.aten.bound_positions import bound_positions
from compilespec.passes.proofs.claims import Claim, find_claims
from compilespec.passes.proofs.input_ranges import CONTRACT
from compilespec.passes.proofs.ranges import Ranges
from compilespec.passes.proofs.sizes import K as K_SIZE
from compilespec.passes.proofs.sizes import L, R, Range, Sizes, T, V, integers
from compilespec.passes.splice.builder import Splice
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.packing import pack_chunks
from tests.support.hand_graphs import HAND_CONFIG, call, code, graph_of
from tests.support.models import FAMILIES, VOCAB, target_info, tiny_target

# the pass has its module's name
read_state = importlib.import_module("compilespec.passes.splice.read_state")
LIMIT, BLOCK, NUM_BLOCKS = (
    HAND_CONFIG.max_seq_len, HAND_CONFIG.block_size, HAND_CONFIG.num_blocks,
)  # fmt: skip
NUM_ROWS = HAND_CONFIG.max_batch_size + 1


def claims_of(gm: Any, ctx: Any, vocab_size: int | None = VOCAB) -> list[Claim]:
    return list(find_claims(Ranges(gm, Sizes(HAND_CONFIG, vocab_size), ctx.inputs, ctx.weights)))


def failing(gm: Any, ctx: Any) -> set[str]:
    return {claim.what for claim in claims_of(gm, ctx) if not claim.holds}


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- comparisons between sizes ---


def test_sizes_are_compared_for_all_their_values():
    sizes = Sizes(HAND_CONFIG, VOCAB, for_all_sizes=True)
    assert sizes.le(sympy.Integer(0), T - 1)
    assert sizes.le(L - 1, L + K_SIZE)
    assert not sizes.le(V, L)  # 97 and 22 here, but not so everywhere
    assert not sizes.le(L, V)
    assert not sizes.le(K_SIZE + 1, K_SIZE)


def test_sizes_are_compared_by_their_values_in_one_program():
    sizes = Sizes(HAND_CONFIG, VOCAB)
    assert sizes.le(L, V)
    assert not sizes.le(V, L)
    assert sizes.le(3 * T, sympy.Integer(96))  # at most 32 packed tokens
    assert not sizes.le(3 * T, sympy.Integer(95))
    assert sizes.lowest(5 - T) == 5 - 32
    assert sizes.name(LIMIT) == L
    assert sizes.name(2) == 2  # too common a number


# --- ranges are sound: random programs against what they compute ---


OPERATIONS: list[Callable[..., Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * 3 - b,
    lambda a, b: torch.where(a >= b, a, b),
    lambda a, b: torch.where(a >= 0, a, -a),
    lambda a, b: torch.where((a >= 0) & (b < 4), a, b * 0),
    lambda a, b: torch.where(~(a < 2), a - 2, b),
    lambda a, b: torch.where((a.flip(0) >= 0) | (b < 0), a, b),
    lambda a, b: torch.where(a.t() >= 0, a, b),
    lambda a, b: torch.where(a[:, :1] >= 0, a, b),
    lambda a, b: torch.where((a == 3).logical_not(), a, b),
    lambda a, b: a // 3,
    lambda a, b: a % 5,
    lambda a, b: a.clamp(min=-1, max=6),
    lambda a, b: torch.minimum(a, b).abs(),
    lambda a, b: a.clamp(max=b),
    lambda a, b: (a > b).to(torch.int32).cumprod(1).to(torch.int32),
    lambda a, b: (a > 0).sum(1, dtype=torch.int32).unsqueeze(1).expand(3, 3),
    lambda a, b: a.cumsum(0).to(torch.int32),
    lambda a, b: a.gather(1, (b.clamp(0, 2)).long()),
    lambda a, b: torch.cat([a[1:], b[:1]]),
    lambda a, b: a.float().argmax(1).to(torch.int32).unsqueeze(0) + b,
    lambda a, b: a.masked_fill(b > 1, 9),
    lambda a, b: a.amax(1, keepdim=True) + torch.arange(3, dtype=torch.int32),
]


@pytest.mark.parametrize("seed", range(12))
def test_what_random_programs_compute_is_inside_their_ranges(seed):
    rng = random.Random(seed)
    chosen = [(rng.choice(OPERATIONS), rng.randrange(99), rng.randrange(99)) for _ in range(8)]

    def program(seq_len_R: Tensor, row_B: Tensor) -> tuple[Tensor, ...]:
        values = [seq_len_R, row_B]
        for operation, first, second in chosen:
            values.append(operation(values[first % len(values)], values[second % len(values)]))
        return tuple(values[2:])

    shape = torch.zeros(3, 3, dtype=torch.int32)
    gm, ctx = graph_of(program, seq_len_R=("state", shape), row_B=("batch", shape))
    ranges = Ranges(gm, Sizes(HAND_CONFIG, VOCAB), ctx.inputs, ctx.weights)
    (output,) = gm.graph.find_nodes(op="output")
    found = [ranges.of(node) for node in output.args[0]]
    for draw in range(40):
        generator = torch.Generator().manual_seed(1000 * seed + draw)
        high = (LIMIT + 1, HAND_CONFIG.max_batch_size)
        lengths = torch.randint(0, high[0], (3, 3), generator=generator, dtype=torch.int32)
        rows = torch.randint(-1, high[1], (3, 3), generator=generator, dtype=torch.int32)
        for value, known in zip(call(gm, lengths, rows), found, strict=True):
            low, top = (ranges.sizes.value(end) for end in (known.low, known.high))
            assert low <= int(value.min())
            assert int(value.max()) <= top


def range_of(function: Callable[..., Tensor], **specs: tuple[str, Tensor]) -> Range:
    gm, ctx = graph_of(function, **specs)
    (output,) = gm.graph.find_nodes(op="output")
    ranges = Ranges(gm, Sizes(HAND_CONFIG, VOCAB), ctx.inputs, ctx.weights)
    found = ranges.of(output.args[0])
    return integers(ranges.sizes.value(found.low), ranges.sizes.value(found.high))


SQUARE = torch.zeros(3, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "low"),
    [
        (lambda x: torch.where(x >= 0, x, 0), 0),
        (lambda x: torch.where((x.unsqueeze(0) >= 0), x.long(), 0).squeeze(0), 0),
        (lambda x: torch.where((x >= 0) & (x < 2), x * 2, 0), 0),
        (lambda x: torch.where(x.t().t() >= 0, x, 0), 0),
        # conditions that are about another element say nothing about this one
        (lambda x: torch.where(x.flip(0) >= 0, x, 0), -1),
        (lambda x: torch.where(x.t() >= 0, x, 0), -1),
        (lambda x: torch.where(x[0] >= 0, x, 0), -1),
        (lambda x: torch.where(x.roll(1, 1) >= 0, x, 0), -1),
        (lambda x: torch.where(x[:, :1] >= 0, x, 0), -1),
        (lambda x: torch.where((x >= 0) | (x < 9), x, 0), -1),
    ],
)
def test_a_condition_bounds_the_element_it_is_about(function, low):
    assert range_of(function, row_B=("batch", SQUARE)).low == low


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.float() * 2).to(torch.int32),  # through floats
        lambda x: x ^ 3,  # an operator without a rule
        lambda x: x + (x.float().exp() > 1).to(torch.int32) * 2**31,  # wraps
        lambda x: torch.zeros_like(x).add_(7) + x,  # a temporary that is written
        lambda x: (x - 10**9) * 5,
    ],
)
def test_what_is_not_known_is_the_whole_dtype(function):
    limits = torch.iinfo(torch.int32)
    assert range_of(function, row_B=("batch", SQUARE)) == integers(limits.min, limits.max)


# --- each kind of claim: where it fails, it is guarded ---


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        (lambda x, i: torch.nn.functional.embedding(i, x), int32(-1, 7, 2**30)),
        (lambda x, i: x.index_select(0, i), int32(-2, 5, 6)),
        (lambda x, i: x[i.long()], int32(-9, 5, 0)),
        (lambda x, i: x.gather(0, i.long().unsqueeze(1).expand(3, 2)), int32(-1, 5, 9)),
    ],
    ids=["embedding", "index_select", "index", "gather"],
)
def test_indices_that_are_read_are_clamped(function, bad):
    x, good = torch.randn(5, 2), int32(4, 0, 2)
    gm, ctx = graph_of(function, x=("weight", x), i=("batch", good))
    want = call(gm, x, good)
    (what,) = failing(gm, ctx)
    assert what in ("index into x", "token id inside x")
    assert bound_positions(Splice(gm, ctx)) == 1
    gm.graph.lint()
    assert failing(gm, ctx) == set()
    assert torch.equal(call(gm, x, good), want)  # exact where nothing was wrong
    assert torch.equal(call(gm, x, bad), call(gm, x, bad.clamp(0, 4)))


def test_a_row_that_does_not_exist_is_redirected_to_the_spare_one():
    """Clamped, it would overwrite another request's row."""

    def function(seq_len_R: Tensor, i: Tensor) -> None:
        seq_len_R.index_put_((i.long(),), torch.ones_like(i))

    gm, ctx = graph_of(
        function, seq_len_R=("state", torch.zeros(NUM_ROWS, dtype=torch.int32)),
        i=("batch", int32(0, 0)),
    )  # fmt: skip
    assert failing(gm, ctx) == {"index into seq_len_R"}
    assert bound_positions(Splice(gm, ctx)) == 1
    assert failing(gm, ctx) == set()
    gm.recompile()
    state = torch.zeros(NUM_ROWS, dtype=torch.int32)
    gm(state, int32(1, 77))
    assert state.tolist() == [0, 1, 0, 1]  # row 1, and the spare one


def test_a_state_row_keeps_its_contract():
    def function(seq_len_R: Tensor, row_B: Tensor) -> None:
        index = torch.where(row_B >= 0, row_B, NUM_ROWS - 1).long()
        seq_len_R.index_put_((index,), seq_len_R[index] + 3)

    gm, ctx = graph_of(
        function, seq_len_R=("state", torch.zeros(NUM_ROWS, dtype=torch.int32)),
        row_B=("batch", int32(0, 0)),
    )  # fmt: skip
    assert failing(gm, ctx) == {"what is written to seq_len_R"}
    assert bound_positions(Splice(gm, ctx)) == 1
    assert failing(gm, ctx) == set()
    state = int32(LIMIT, 5, 0, 0)
    gm.recompile()
    gm(state, int32(0, 1))
    assert state.tolist() == [LIMIT, 8, 0, 0]


@pytest.mark.parametrize(
    ("table", "is_dropped"),
    [(torch.tensor([0, 3, 5]), True), (torch.tensor([0, 3, -7]), False)],  # the last: -5
)
def test_a_mask_that_hides_nothing_is_dropped(table: Tensor, is_dropped: bool):
    """As that of ids that a drafter's vocabulary has no token for."""

    def function(d2t: Tensor, x: Tensor, fill: Tensor) -> Tensor:
        ids = d2t + torch.arange(3)
        whole = torch.where(ids >= 0, x, -math.inf)
        wider = torch.where((ids >= 0).unsqueeze(0), fill, x)  # another shape than the result's
        return whole + wider

    x, fill = torch.randn(2, 3), torch.randn(1)
    gm, ctx = graph_of(function, d2t=("weight", table), x=("batch", x), fill=("batch", fill))
    bound_positions(Splice(gm, ctx))
    gm.graph.lint()
    masks = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    assert len(masks) == 2 - is_dropped
    assert torch.equal(call(gm, table, x, fill), function(table, x, fill))


def test_int32_arithmetic_that_can_wrap_is_reported():
    gm, ctx = graph_of(lambda ids_T: ids_T * 2**26, ids_T=("batch", int32(0, 0)))
    (claim,) = (claim for claim in claims_of(gm, ctx) if not claim.holds)
    assert claim.what == "int32 does not overflow"
    assert claim.guard is None
    assert str(claim.value) == "[-67108864, 67108864*V - 67108864]"
    gm, ctx = graph_of(lambda ids_T: ids_T * 2**24, ids_T=("batch", int32(0, 0)))
    assert failing(gm, ctx) == set()


@pytest.mark.parametrize(
    ("table", "is_proved"),
    [
        (torch.arange(10) * 2, True),  # 0, 3, 6, .. 27
        (torch.tensor([90, 0, 3, 93]), True),  # ends 0 and 93 add up to 96; a range says 0..96
        (torch.tensor([95, 94, 95, 0]), False),  # the third is 97
        (torch.tensor([5, -2, 0]), False),  # the second is -1
    ],
    ids=["ascending", "looked up", "past the vocabulary", "negative"],
)
def test_draft_ids_are_mapped_into_the_vocabulary(table, is_proved):
    """d2t: every draft id is looked at, not only the ends."""

    def function(d2t: Tensor, w: Tensor, logits: Tensor) -> Tensor:
        draft = logits.argmax(-1)
        return torch.nn.functional.embedding(draft + d2t[draft], w)

    logits, weight = torch.randn(2, len(table)), torch.randn(VOCAB, 2)
    gm, ctx = graph_of(
        function, d2t=("weight", table), w=("weight", weight), logits=("batch", logits)
    )
    assert failing(gm, ctx) == (set() if is_proved else {"token id inside w"})
    assert bound_positions(Splice(gm, ctx)) == (0 if is_proved else 1)


def test_a_table_without_values_proves_nothing():
    """On the meta device nothing is known of d2t."""
    gm, ctx = graph_of(
        lambda d2t, w, i: torch.nn.functional.embedding(d2t[i], w),
        d2t=("weight", torch.zeros(4, dtype=torch.int64)),
        w=("weight", torch.randn(VOCAB, 2)), i=("weight", torch.tensor([0, 3])),
    )  # fmt: skip
    assert failing(gm, ctx) == set()
    ctx.weights["d2t"] = ctx.weights["d2t"].to("meta")
    assert failing(gm, ctx) == {"token id inside w"}


def test_attention_metadata_that_is_written_is_not_proved():
    """H-14: a step that moves a block would have to put it back."""

    def function(block_table_RM: Tensor, cache: Tensor, x: Tensor) -> Tensor:
        zero = torch.zeros(1, 1, dtype=torch.int32)
        out = attend(cache, zero, zero, zero, block_table_RM)
        block_table_RM[0].fill_(0)
        return out + x

    table = torch.zeros(NUM_ROWS, 6, dtype=torch.int32)
    cache = torch.zeros(NUM_BLOCKS, BLOCK, 1, 2)
    gm, ctx = graph_of(
        function, block_table_RM=("state", table), cache=("cache", cache),
        x=("batch", torch.zeros(1)),
    )  # fmt: skip
    (claim,) = (claim for claim in claims_of(gm, ctx) if "H-14" in claim.hazards)
    assert not claim.holds


# --- attention: positions, rows, slots ---


def attend(cache: Tensor, slot: Tensor, row: Tensor, position: Tensor, table: Tensor) -> Tensor:
    batch, num_tokens = position.shape
    x = torch.ones(batch, 1, num_tokens, 2)
    return torch.ops.compilespec.paged_attention(
        x, x, x, cache, cache.new_zeros(cache.shape), slot, row, position, table, 1.0, 0, 0.0, None
    )


def step(
    seq_len_R: Tensor, block_table_RM: Tensor, row_B: Tensor, cache: Tensor, *, fault: str = ""
) -> Tensor:
    """The metadata of three tokens a row, as `place` makes it, with one thing wrong."""
    live = row_B >= 0
    index = torch.where(live, row_B, NUM_ROWS - 1).long()
    wanted = seq_len_R[index].unsqueeze(1) + torch.arange(3, dtype=torch.int32)
    if fault == "goes back":
        wanted = wanted - 4  # H-9: a prompt shorter than the drafter's window
    if fault == "clamps":
        wanted = wanted.clamp(max=LIMIT - 1)  # H-16: rewrites the last slot over and over
    limit = 10**6 if fault == "no maximum" else LIMIT
    block = BLOCK + 1 if fault == "wrong block size" else BLOCK
    position, row, slot = read_state.place(
        wanted, row_B.unsqueeze(1), index.unsqueeze(1), live.unsqueeze(1), block_table_RM,
        max_seq_len=limit, block_size=block,
    )  # fmt: skip
    if fault == "wrong row":
        row = row * 2
    return attend(cache, slot, row, position, block_table_RM)


def traced_step(fault: str) -> tuple[Any, Any, list[Tensor]]:
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    inputs = {
        "seq_len_R": ("state", int32(5, 0, 17, 0)),
        "block_table_RM": ("state", torch.cat([table, torch.full((1, 6), -1, dtype=torch.int32)])),
        "row_B": ("batch", int32(2, -1, 0)),
        "cache": ("cache", torch.zeros(NUM_BLOCKS, BLOCK, 1, 2)),
    }
    gm, ctx = graph_of(functools.partial(step, fault=fault), **inputs)
    return gm, ctx, [tensor for _, tensor in inputs.values()]


PAST, BEFORE = (
    "a token past the maximum length writes nothing",
    "a token before position 0 writes nothing",
)
POSITION = "position inside the maximum length"
SLOT, ROW = "slot inside the cache, or -1", "row inside the block table, or -1"
TABLE = "index into block_table_RM"
FAULTS = {
    "no maximum": {PAST, POSITION, TABLE},
    "clamps": {PAST},
    "goes back": {BEFORE, POSITION, TABLE},
    "wrong block size": {SLOT},
    "wrong row": {ROW},
}


def test_a_right_step_is_proved_and_left_alone():
    gm, ctx, _ = traced_step("")
    assert failing(gm, ctx) == set()
    assert {h for claim in claims_of(gm, ctx) for h in claim.hazards} == {"H-9", "H-14", "H-16"}
    before = code(gm)
    assert bound_positions(Splice(gm, ctx)) == 0
    assert code(gm) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_is_not_proved_but_guarded(fault):
    gm, ctx, _ = traced_step(fault)
    assert failing(gm, ctx) == FAULTS[fault]
    assert bound_positions(Splice(gm, ctx)) > 0
    gm.graph.lint()
    assert failing(gm, ctx) == set()


def written(gm: Any, inputs: list[Tensor], lengths: Tensor) -> list[int]:
    """Cells of the cache that a step writes."""
    gm.recompile()
    tensors = [lengths, *(tensor.clone() for tensor in inputs[1:])]
    with torch.no_grad():
        gm(*tensors)
    return tensors[-1].flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist()


@pytest.mark.parametrize("fault", ["no maximum", "clamps", "goes back"])
def test_a_guarded_step_writes_where_it_may(fault):
    """Row 2 ends at the maximum length, row 0 begins at 0: what is outside is not written."""
    gm, ctx, inputs = traced_step(fault)
    inside = int32(5, 0, 17, 0)
    want = written(gm, inputs, inside)
    bound_positions(Splice(gm, ctx))
    assert written(gm, inputs, inside) == want  # numerics: exact
    shift = -4 if fault == "goes back" else 0
    lengths = int32(2, 0, LIMIT - 1, 0)
    positions = {row: [int(lengths[row]) + shift + j for j in range(3)] for row in (2, 0)}
    allowed = sorted(
        24 * row + position
        for row, wanted in positions.items()
        for position in wanted
        if 0 <= position < LIMIT
    )
    assert written(gm, inputs, lengths) == allowed


# --- the host keeps the contract ---


def test_packed_prompts_keep_the_contract():
    rng = random.Random(0)
    for _ in range(200):
        chunks = []
        for row in rng.sample(range(HAND_CONFIG.max_batch_size), rng.randint(1, 3)):
            length = rng.randint(1, LIMIT)
            start = rng.randrange(length)
            tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, length - start)))
            following = rng.choice([None, rng.randrange(VOCAB)])
            chunks.append(PrefillChunk(row=row, start=start, tokens=tokens, next_token=following))
        packed = pack_chunks(chunks)
        sizes = Sizes(HAND_CONFIG, VOCAB)
        counts = {T: len(packed["ids_T"]), R: len(chunks)}
        for name, values in packed.items():
            low, high = (
                int(sympy.sympify(sizes.value(end)).subs(counts))
                for end in (CONTRACT[name].low, CONTRACT[name].high)
            )
            assert low <= min(values), name
            assert max(values) <= high, name


# --- whole programs ---


def program_of(**sizes: Any) -> compilespec.program.SpecProgram:
    model = tiny_target("llama", torch.float32, num_layers=2)
    info = target_info(model, 128)
    head = random_head(info, aux_layers=(0, 1, 2), num_draft_tokens=4).eval()
    return compilespec.trace(model, spec="eagle3", draft=head, keep_graphs=False, **sizes)


# All sizes different, none of them small: every number of the graphs is read as what it is.
DISTINCT = {
    "max_seq_len": 113, "max_batch_size": 10, "max_prefill_tokens": 37, "num_draft_tokens": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def program() -> compilespec.program.SpecProgram:
    return program_of(**DISTINCT)


def phase_of(bound: Bound) -> str:
    return bound.step.split(",")[0]


def test_a_program_is_proved_for_all_sizes(program):
    """No comparison looks at a size's value; what is about int32 and floats has to."""
    sizes = Sizes(program.config, program.config.vocab_size, for_all_sizes=True)
    for phase in program.graphs.values():
        inputs = {spec.name: spec for spec in phase.inputs}
        ranges = Ranges(phase.graph_module, sizes, inputs, program.weights)
        unproved = {claim.what for claim in find_claims(ranges) if not claim.holds}
        assert unproved <= {"int32 does not overflow", "position is exact in float32"}


def test_a_program_is_proved_and_nothing_is_inserted(program):
    report = prove(program)
    assert {bound.status for bound in report.bounds} == {"proved"}
    for hazard in ("H-9", "H-14", "H-16"):
        assert {phase_of(bound) for bound in report.of_hazard(hazard)} == {"prefill", "decode"}
    for phase in program.graphs.values():
        matches = {record.name: record.matches for record in phase.records}
        assert matches["bound_positions"] == 0
    text = str(report)
    assert "slot inside the cache, or -1" in text
    assert "[-1, block_size*num_blocks - 1] = [-1, 1279]" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["counts"] == {"proved": len(report.bounds)}
    assert "[H-16]" in text


def test_a_program_without_its_masks_is_guarded(monkeypatch):
    """`place_rows` without the maximum length: the report says where `bound_positions` comes in."""
    real = read_state.place_rows

    def no_maximum(*args: Any, max_seq_len: int, block_size: int) -> Any:
        return real(*args, max_seq_len=10**6, block_size=block_size)

    monkeypatch.setattr(read_state, "place_rows", no_maximum)
    report = prove(program_of(**DISTINCT))
    assert report.num_open == 0
    guarded = [bound for bound in report.bounds if bound.status == "guarded"]
    assert {POSITION, PAST, SLOT} <= {bound.what for bound in guarded}
    assert {phase_of(bound) for bound in guarded} == {"decode"}  # prompts end before the maximum
    position = next(bound for bound in guarded if bound.what == POSITION)
    assert position.value == "[0, K + max_seq_len]"
    assert position.numbers == "[0, 117]"


@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
def test_every_family_is_proved(family):
    """Learned positions (gpt2, plain) and the indices of experts included."""
    model = tiny_target(family, torch.float32, num_layers=2)
    report = prove(compilespec.trace(model, max_seq_len=100, keep_graphs=False))
    assert {bound.status for bound in report.bounds} == {"proved"}
    if family in ("gpt2", "plain"):
        assert any(b.what.startswith("position inside target.") for b in report.bounds)
