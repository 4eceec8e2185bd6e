"""FlashAttention-3 behind `paged_attention`: when it is chosen, and what it is asked for.

The library is not here: what stands for it does, in plain torch, what torch says of
`varlen_attn_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from compilespec.lowering import attention_choice
from compilespec.lowering.attention_choice import attention_kernels
from compilespec.ops.paged_attention import choice, paged_attention_reference
from compilespec.ops.paged_attention.form import Form
from compilespec.program import BufferSpec
from tests.support.attention import Case, Pool

pytest.importorskip("tests.support.triton_interpreter")
flash = pytest.importorskip("compilespec.ops.paged_attention.flash")
kernel = pytest.importorskip("compilespec.ops.paged_attention.kernel")
pytestmark = pytest.mark.interp

FORM = Form(dtype=torch.bfloat16, head_dim=128, value_dim=128, block_size=16)
HOPPER = torch.device("cuda:1")


def varlen(
    out_TNH: Tensor, query_TNH: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor,
    cu_seq_k: None, max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
    enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """The last query of a sequence sees its last key; one without keys gives zeros."""
    assert (cu_seq_k, enable_gqa, window_size[1]) == (None, True, 0)
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert len(cu_seq_q) == len(seqused_k) + 1 == len(block_table) + 1
    group, block_size = query_TNH.shape[1] // key.shape[2], key.shape[1]
    ends = cu_seq_q.tolist()
    assert (ends[0], ends[-1]) == (0, len(query_TNH))
    for number, (begin, end) in enumerate(pairwise(ends)):
        length = int(seqused_k[number])
        assert 0 <= end - begin <= max_q
        assert 0 <= length <= max_k
        if begin == end:
            continue
        position_J = torch.arange(length)
        block_J = block_table[number, position_J // block_size].long()
        assert ((block_J >= 0) & (block_J < len(key))).all()
        cells = (block_J, position_J % block_size)
        keys, values = (cache[cells].repeat_interleave(group, 1) for cache in (key, value))
        score_NSJ = scale * torch.einsum("snh,jnh->nsj", query_TNH[begin:end], keys)
        last_S = length - (end - begin) + torch.arange(end - begin)
        is_seen_SJ = position_J[None] <= last_S[:, None]
        if window_size[0] >= 0:
            is_seen_SJ &= position_J[None] >= last_S[:, None] - window_size[0]
        weight = score_NSJ.masked_fill(~is_seen_SJ, float("-inf")).softmax(-1).nan_to_num()
        out_TNH[begin:end] = torch.einsum("nsj,jnh->snh", weight, values)
    return out_TNH


def on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The library is active, on a Hopper GPU; returns how many tokens each of its calls has.

    Torch's own entry takes the calls, too, as far as it goes without the library.
    """
    calls: list[int] = []
    entry = flash.varlen.varlen_attn_out

    def counted(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(out))
        entry(*tree_map(on_meta, (out, *args)), **tree_map(on_meta, kwargs))
        return varlen(out, *args, **kwargs)

    monkeypatch.setattr(flash.varlen, "varlen_attn_out", counted)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice.why_not_flash.cache_clear()
    yield calls
    choice.why_not_flash.cache_clear()


# --- what it is asked for ---


def decode(pool: Pool) -> list:
    """Rows with padded tokens before and behind theirs, and a padded row."""
    tokens_BS = pool.decode()
    if len(tokens_BS) > 1 and pool.case.num_tokens > 1:
        tokens_BS[0] = [None, *tokens_BS[0][:-1]]
        tokens_BS[1][-1] = None
    return [*tokens_BS, [None] * pool.case.num_tokens]


def prompts(pool: Pool) -> list:
    """Chunks of all requests in one batch row, the first from its beginning, then padding."""
    case = pool.case
    chunks = [
        [(row, position) for position in range(0 if row == 0 else case.context - row, case.context)]
        for row in range(case.batch)
    ]
    return [[*(token for chunk in chunks for token in chunk), None, None, None]]


def one_request_twice(pool: Pool) -> list:
    """Not one run: the second token stands before the first, the third far behind it."""
    behind = pool.case.context
    return [[(0, 9), (0, 3), (0, behind), (1, behind), (0, behind + 1)]]


@pytest.mark.parametrize("tokens", [decode, prompts, one_request_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "case",
    [
        Case(context=33),
        Case(block_size=7, group=3, head_dim=24, value_dim=24, window=5, context=20, batch=2),
        Case(num_tokens=2, window=1, num_kv_heads=1, group=5, context=17, batch=2),
    ],
    ids=str,
)
def test_outputs_and_caches_are_the_references(
    case: Case, tokens: Callable[[Pool], list], library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "why_not_flash", lambda form, device: "")
    pool = Pool(case)
    got_arguments, want_arguments = (pool.arguments(tokens(pool)) for _ in range(2))
    got = kernel.paged_attention(*got_arguments)
    want = paged_attention_reference(*want_arguments)
    assert library == [got_arguments[5].numel()]
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, its in zip(got_arguments[3:5], want_arguments[3:5], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def test_runs_of_tokens() -> None:
    row_BS = torch.tensor([[0, 0, -1], [-1, 2, 2], [9, 1, 1]], dtype=torch.int32)
    position_BS = torch.tensor([[4, 5, 0], [0, 0, 2], [3, 19, 20]], dtype=torch.int32)
    table_RM = torch.tensor([[3, 1], [0, -1], [7, 2]], dtype=torch.int32)
    runs = flash.find_runs(row_BS, position_BS, table_RM, 4, 10)
    assert runs.start.tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    # a padded token, a row that the table does not have, and a position that it has no block for
    assert runs.length.tolist() == [6, 0, 0, 1, 3, 0, 20, 20, 0]
    assert [runs.blocks[place].tolist() for place in (0, 3, 6, 8)] == [
        [3, 1],
        [0, 2],
        [0, 0],
        [0, 0],
    ]


def test_an_empty_call() -> None:
    pool = Pool(Case(batch=0))
    query, _, _, *caches, _, row, position, table, scale, window, _, _ = pool.arguments([])
    assert flash.attend(query, *caches, row, position, table, scale, window).shape[0] == 0


# --- when it is chosen ---


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"is_latent": True}, "values are the beginning of their keys"),
        ({"has_sinks": True}, "its softmax has no sinks"),
        ({"has_paths": True}, "its tokens are a chain, not a tree"),
        ({"softcap": 50.0}, "its scores are not capped"),
        ({"value_dim": 64}, "keys are 128 wide and values 64"),
        ({"head_dim": 84, "value_dim": 84}, "heads are 84 wide: no multiple of 8 up to 256"),
        ({"head_dim": 512, "value_dim": 512}, "heads are 512 wide: no multiple of 8 up to 256"),
        ({"dtype": torch.float32}, "float32 is neither bfloat16 nor float16"),
        ({}, ""),
        ({"window": 128}, ""),
        ({"block_size": 5, "dtype": torch.float16}, ""),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else ",".join(value),
)
def test_a_form_decides(
    change: dict[str, Any], why: str, library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "why_wrong", lambda form, device: "")
    assert choice.why_not_flash(replace(FORM, **change), HOPPER) == why


def test_the_gpu_decides(library: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choice.why_not_flash(FORM, HOPPER) == "the GPU is sm_89, not sm_90"
    assert choice.why_not_flash(FORM, torch.device("cpu")) == "it runs on cpu"


def test_the_library_is_the_users_to_activate(
    library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer stays after later activations."""
    monkeypatch.setattr(flash, "why_wrong", lambda form, device: "")
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    why = choice.why_not_flash(FORM, HOPPER)
    assert why.startswith("it is not active: torch.nn.attention.activate_flash_attention_impl")
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert choice.why_not_flash(FORM, HOPPER) == why
    assert choice.why_not_flash(replace(FORM, window=9), HOPPER) == ""


# --- a small case before it is trusted ---


@pytest.mark.parametrize("window", [0, 4])
def test_a_right_library_is_trusted(window: int, library: list[int]) -> None:
    form = replace(FORM, head_dim=32, value_dim=32, window=window)
    assert flash.why_wrong(form, torch.device("cpu")) == ""
    assert library == [9]


def without_keys_is_skipped(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Old memory stays where a sequence has no keys."""
    varlen(out, *args, **kwargs)
    out[-1] = 3.0
    return out


def no_window(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return varlen(out, *args, **{**kwargs, "window_size": (-1, 0)})


def aligned_at_the_first_key(out: Tensor, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    used = (kwargs["seqused_k"] - 1).clamp(min=0)
    return varlen(out, query, *args, **{**kwargs, "seqused_k": used})


def failing(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("no kernel for heads of 32\nbuilt without them")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (without_keys_is_skipped, "it is off by 3 in a small case"),
        (no_window, "it is off by"),
        (aligned_at_the_first_key, "it is off by"),
        (failing, "it failed in a small case (RuntimeError: no kernel for heads of 32)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_library_is_not(
    fault: Callable[..., Tensor], why: str, library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash.varlen, "varlen_attn_out", fault)
    form = replace(FORM, head_dim=32, value_dim=32, window=4)
    assert flash.why_wrong(form, torch.device("cpu")).startswith(why)


# --- what plan() says ---


def program(*calls: tuple[str, str | None, int, float], device: torch.device) -> Any:
    """As much of a program as is read: its caches, and calls of attention on them."""
    graph, roles = fx.Graph(), {}
    names = dict.fromkeys(name for call in calls for name in call[:2] if name is not None)
    for name in names:
        roles[name] = graph.placeholder(name.replace(".", "_"))
        roles[name].meta["role"] = name
    for keys, values, window, softcap in calls:
        caches = (roles[keys], None if values is None else roles[values])
        graph.call_function(
            torch.ops.compilespec.paged_attention.default,
            (*[None] * 3, *caches, *[None] * 4, 0.1, window, softcap, None, *([64] * (not values))),
        )
    buffers = [
        BufferSpec(name=name, kind="cache", shape=(9, 16, 2, 128), dtype=torch.bfloat16)
        for name in names
    ]
    spliced = SimpleNamespace(graph=graph)
    return SimpleNamespace(
        graphs={"decode": SimpleNamespace(spliced=spliced)},
        buffers=buffers,
        config=SimpleNamespace(device=device),
    )


CALLS = (("cache.0.key", "cache.0.value", 0, 0.0), ("cache.1.key", "cache.1.value", 64, 0.0),
         ("cache.2.key", "cache.2.value", 0, 30.0), ("cache.3.key", None, 0, 0.0))  # fmt: skip


def test_a_program_says_which_kernels_it_takes(
    library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "why_wrong", lambda form, device: "")
    monkeypatch.setattr(attention_choice, "has_triton", lambda: True)
    assert attention_kernels(program(*CALLS, CALLS[0], device=HOPPER)) == {
        "heads of 128, blocks of 16": "FlashAttention-3",
        "heads of 128, blocks of 16, window of 64": "FlashAttention-3",
        "heads of 128, blocks of 16, scores capped at 30":
            "Triton (not FlashAttention-3: its scores are not capped)",
        "latents of 128 and 64, blocks of 16":
            "Triton (not FlashAttention-3: values are the beginning of their keys)",
    }  # fmt: skip
    assert set(attention_kernels(program(*CALLS, device=torch.device("cpu"))).values()) == {"C++"}
    monkeypatch.setattr(attention_choice, "has_triton", lambda: False)
    said = attention_kernels(program(*CALLS, device=HOPPER))
    assert set(said.values()) == {"torch: Triton is not installed, or switched off"}
