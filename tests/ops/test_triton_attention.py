"""paged_attention's Triton kernels, interpreted: the reference's outputs and caches."""

from __future__ import annotations

import pytest
import torch

from compilespec.ops.paged_attention import paged_attention_reference
from tests.support.attention import NAN, Case, Pool
from tests.support.block_rows import BlockRows
from tests.support.trees import Tree

pytest.importorskip("tests.support.triton_interpreter")
pytestmark = pytest.mark.interp
# The interpreter multiplies the bits of bfloat16 as if they were numbers: only compiled ahead.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 3e-3}

kernel = pytest.importorskip("compilespec.ops.paged_attention.kernel")

CASES = [
    Case(batch=0),
    Case(batch=1, num_tokens=1, context=0),
    Case(num_tokens=9, context=7, group=1, head_dim=48, value_dim=48),
    Case(num_tokens=5, context=61, group=5, num_kv_heads=1, head_dim=64, value_dim=64),
    Case(context=130, num_tokens=3, value_dim=33, head_dim=80, group=3),
    Case(batch=2, context=300, window=100, head_dim=96, value_dim=96, group=8, num_kv_heads=1),
    Case(batch=2, context=290, window=7, sinks=True, head_dim=128, value_dim=128, group=4),
    Case(context=63, softcap=5.0, value_dim=48, group=7, num_kv_heads=1),
    Case(batch=2, context=150, softcap=2.0, sinks=True, window=65, block_size=7, num_tokens=2),
    Case(batch=1, context=140, window=1, num_tokens=6),
    Case(latent=True, num_kv_heads=1, group=7, head_dim=40, value_dim=29, context=150),
    Case(latent=True, batch=2, head_dim=21, value_dim=21, window=9, sinks=True, context=30),
    Case(latent=True, batch=1, num_kv_heads=1, group=68, head_dim=300, value_dim=260, context=20),
]


def padded(pool: Pool) -> list:
    """Decode rows with a padded token and a padded row."""
    tokens_BS = pool.decode()
    if len(tokens_BS) > 1:
        tokens_BS[1][-1] = None
        tokens_BS.append([None] * pool.case.num_tokens)
    return tokens_BS


def check(pool: Pool, tokens_BS: list) -> None:
    dtype = pool.case.dtype
    got_arguments, want_arguments = pool.arguments(tokens_BS), pool.arguments(tokens_BS)
    got = kernel.paged_attention(*got_arguments)
    want = paged_attention_reference(*want_arguments)
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for b, tokens in enumerate(tokens_BS):
        for s, token in enumerate(tokens):
            assert token is not None or not got[b, s].any()
    for got_cache, want_cache in zip(got_arguments[3:5], want_arguments[3:5], strict=True):
        if want_cache is None:
            continue
        torch.testing.assert_close(got_cache, want_cache, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=["split", pytest.param("whole", marks=pytest.mark.slow)])
def splitting(request, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 10**9 if request.param == "split" else 0)
    return request.param


SPLIT = Case(batch=2, num_tokens=2, context=150, num_kv_heads=1, sinks=True, head_dim=48)


@pytest.mark.parametrize("case", [SPLIT, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES)],
                         ids=str)  # fmt: skip
def test_split_contexts_equal_the_reference(case, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 10**9)
    pool = Pool(case)
    check(pool, padded(pool))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.slow if c in (*CASES[4:7], *CASES[11:]) else ())
        for c in CASES
    ],
    ids=str,
)
def test_verify_rows_equal_the_reference(case, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 0)
    pool = Pool(case)
    check(pool, padded(pool))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_every_dtype(dtype, splitting):
    pool = Pool(Case(batch=1, num_kv_heads=1, context=133, sinks=True, group=3, dtype=dtype))
    check(pool, pool.decode())


@pytest.mark.parametrize(
    ("case", "enough"),
    [
        (Case(batch=3, context=13, num_tokens=4, group=3, num_kv_heads=1), 0),
        (Case(batch=2, context=20, window=9, sinks=True, head_dim=48, value_dim=16), 0),
        pytest.param(Case(batch=2, context=140, softcap=3.0), 10**9, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_packed_prompts_equal_the_reference(case, enough, monkeypatch):
    """Requests of one tile, each seen once; chunks in any order, padded tokens between them."""
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", enough)
    pool = Pool(case)
    length = case.context + case.num_tokens
    packed: list = [(0, position) for position in range(length)]
    for row in range(1, case.batch):
        packed += [None, *((row, position) for position in range(5 * row, length))]
    check(pool, [[*packed, None, (0, length - 1)]])


@pytest.mark.parametrize(
    ("case", "enough"),
    [
        (Case(batch=2, context=13, group=3, num_kv_heads=1, sinks=True), 0),
        (Case(batch=1, context=126, window=4, softcap=3.0, head_dim=24, value_dim=20), 10**9),
        pytest.param(Case(context=126, group=7), 10**9, marks=pytest.mark.slow),
        pytest.param(Case(context=0, window=1), 0, marks=pytest.mark.slow),
        (Case(latent=True, batch=1, head_dim=40, value_dim=29, context=20, window=9), 0),
        pytest.param(Case(latent=True, context=126, head_dim=21, value_dim=5), 10**9,
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("earlier", [0, 4], ids="earlier{}".format)
def test_nodes_of_trees_equal_the_reference(case, enough, earlier, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", enough)
    tree = Tree(case)
    got_arguments, want_arguments = (tree.arguments(earlier=earlier) for _ in range(2))
    for arguments in (got_arguments, want_arguments):
        arguments[6][-1, 3:] = -1  # padded nodes
    got = kernel.paged_attention(*got_arguments)
    torch.testing.assert_close(
        got, paged_attention_reference(*want_arguments), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("case", "enough"),
    [
        (Case(batch=2, context=13, group=3, num_kv_heads=1), 0),
        (Case(batch=1, context=140, head_dim=24, value_dim=20), 10**9),
        pytest.param(Case(latent=True, batch=1, head_dim=40, value_dim=29, context=20), 0,
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_blocks_equal_the_reference(case, enough, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", enough)
    rows = BlockRows(case)
    got = kernel.paged_attention(*rows.arguments())
    want = paged_attention_reference(*rows.arguments())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_number_of_segments_changes_rounding_only(monkeypatch):
    pool = Pool(Case(batch=1, context=140, num_tokens=3, num_kv_heads=1, dtype=torch.float64))
    outs = []
    for enough in (0, 10**9):
        monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", enough)
        outs.append(kernel.paged_attention(*pool.arguments(pool.decode())))
    assert torch.allclose(*outs, rtol=0, atol=1e-14)
    assert kernel.choose_segments(1, 143) == 2


@pytest.mark.parametrize(
    ("context", "window", "table", "num_parts"),
    [(300, 0, 320, 3), (300, 0, 60000, 3), (20, 0, 60000, 1), (300, 140, 60000, 2)],
)
def test_what_a_row_sees_is_cut_whatever_its_table_could_hold(
    context, window, table, num_parts, monkeypatch
):
    """Parts of at least 128 keys (of a window: where it begins), and a row whose context is short
    beside them; one launch, whose grid the table's length decides.
    """
    launched: list = []
    monkeypatch.setattr(kernel, "merge_kernel", _Recorder(kernel.merge_kernel, [], launched))
    case = Case(batch=2, num_tokens=1, num_kv_heads=1, group=2, head_dim=16, context=context,
                window=window, value_dim=16)  # fmt: skip
    pool = Pool(case)
    missing = table // case.block_size - pool.table_RM.shape[1]
    pool.table_RM = torch.nn.functional.pad(pool.table_RM, (0, missing), value=-1)
    check(pool, [[(0, context)], [(1, 5)]])
    ((parts, *_),) = launched
    assert ((parts.sum != 0).sum((1, 2, 3)) // 2).tolist() == [num_parts, 1]


def test_grids_depend_on_shapes_alone(monkeypatch):
    """Other positions, rows and slots launch the same programs: what a CUDA graph replays."""
    grids: list = []
    for name in ("write_kernel", "attend_kernel", "merge_kernel"):
        monkeypatch.setattr(kernel, name, _Recorder(getattr(kernel, name), grids))
    pool = Pool(Case(batch=2, context=130, num_kv_heads=1))
    kernel.paged_attention(*pool.arguments(pool.decode()))
    first = list(grids)
    grids.clear()
    kernel.paged_attention(*pool.arguments([[None] * 4, [(0, 3), (1, 7), None, (1, 2)]]))
    assert grids == first
    assert len(first) == 3


class _Recorder:
    def __init__(self, launched, grids, arguments=None):
        self.launched, self.grids, self.arguments = launched, grids, arguments

    def __getitem__(self, grid):
        self.grids.append(grid)
        if self.arguments is None:
            return self.launched[grid]

        def launch(*args, **named):
            self.arguments.append(args)
            self.launched[grid](*args, **named)

        return launch


def test_what_is_not_visible_is_never_read(splitting):
    """Missing blocks, positions past the table, rows past it, unwritten cells: NaN everywhere."""
    pool = Pool(Case(context=40))
    pool.table_RM[:, 1] = -1
    tokens_BS = [[(row, 8 + s) for s in range(4)] for row in range(3)]
    for position in (8, 40, 5000):
        got_arguments, want_arguments = pool.arguments(tokens_BS), pool.arguments(tokens_BS)
        for arguments in (got_arguments, want_arguments):
            arguments[7][:] = position
            arguments[5][2] = -1
            arguments[6][2] = -1
        got_arguments[5][2, 1] = 10**6  # outside the cache: not written
        got_arguments[6][2, 1] = 77  # outside the table: a padded token
        got = kernel.paged_attention(*got_arguments)
        want = paged_attention_reference(*want_arguments)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
        for got_cache, want_cache in zip(got_arguments[3:5], want_arguments[3:5], strict=True):
            assert torch.equal(got_cache.nan_to_num(), want_cache.nan_to_num())


def test_any_strides(splitting):
    pool = Pool(Case(batch=2, context=20))
    arguments = list(pool.arguments(pool.decode()))
    want = paged_attention_reference(*[a.clone() if torch.is_tensor(a) else a for a in arguments])
    for index in range(3):  # the last dimension not dense
        wide = torch.full((*arguments[index].shape, 2), NAN)
        wide[..., 0] = arguments[index]
        arguments[index] = wide[..., 0]
    for index in (5, 6, 7):
        arguments[index] = arguments[index].t().contiguous().t()
    torch.testing.assert_close(kernel.paged_attention(*arguments), want, rtol=1e-5, atol=1e-5)


def test_tiles_hold_whole_tokens():
    for dtype in TOLERANCE:
        for group in (1, 2, 3, 5, 7, 8, 16, 71):
            for num_tokens in (1, 4, 9, 500):
                tile = kernel.choose_tile(num_tokens * group, group, 128, dtype)
                assert tile.num_tokens >= 1
                assert tile.num_tokens * group <= tile.rows
                assert tile.rows >= 16


def test_split_contexts_make_two_to_four_programs_a_multiprocessor():
    """Of the 132 of an H100, unless tiles alone are more, or keys or segments too few."""
    for programs in (8, 9, 24, 100, 200, 256, 400, 512):
        made = programs * kernel.choose_segments(programs, 131072)
        assert 1.9 <= made / 132 <= 4, programs
    assert kernel.choose_segments(600, 131072) == 1
    assert kernel.choose_segments(1, 131072) == kernel.MAX_SEGMENTS
    assert [kernel.choose_segments(8, keys) for keys in (0, 1, 128, 129, 1000)] == [1, 1, 1, 2, 8]


@pytest.mark.parametrize(("num_tokens", "num_segments"), [(64, 8), (256, 2), (512, 1), (2048, 1)])
def test_prompts_are_split_only_while_multiprocessors_are_idle(
    num_tokens: int, num_segments: int
) -> None:
    """Of Llama-3.1-8B: four query heads a KV head, eight KV heads, a table of 4096 tokens.

    A tile of 128 rows takes the registers of a multiprocessor: more programs would wait, and their
    parts be written, read and merged.
    """
    tile = kernel.choose_tile(4 * num_tokens, 4, 128, torch.bfloat16)
    assert tile.is_large
    num_tiles = -(-num_tokens // tile.num_tokens)
    made = kernel.choose_segments(8 * num_tiles, 4096, is_large=tile.is_large)
    assert made == num_segments
