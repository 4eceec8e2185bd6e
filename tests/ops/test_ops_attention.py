"""attention and paged_attention: the definition, bitwise equal rows, caches mutated in place."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from compilespec.ops import _build, attention, pack_weight, packed_linear, paged_attention
from compilespec.ops.attention import attention_reference
from compilespec.ops.paged_attention import paged_attention_reference
from compilespec.passes.splice.insert_paged_attention import HEADS_FIRST
from compilespec.program import BufferSpec
from tests.support.attention import NAN, Case, Pool

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


CASES = [
    Case(),
    Case(batch=0),
    Case(batch=1, num_tokens=1, context=0),
    Case(num_tokens=9, block_size=1, context=5, group=1),
    Case(num_tokens=5, block_size=3, context=61, group=5, num_kv_heads=1),
    Case(block_size=64, context=300, window=100, head_dim=64, value_dim=64),
    Case(context=520, window=7, sinks=True),
    Case(context=255, num_tokens=3, value_dim=33, head_dim=20),
    Case(context=63, softcap=5.0, value_dim=48),
    Case(context=130, softcap=2.0, sinks=True, window=65, block_size=7),
    Case(context=300, window=1),
    Case(batch=1, num_tokens=2, context=900, num_kv_heads=1, head_dim=64, value_dim=64),
    Case(latent=True, num_kv_heads=1, group=7, head_dim=40, value_dim=29, context=300),
    Case(latent=True, head_dim=21, value_dim=5, window=9, softcap=3.0, sinks=True, block_size=3),
    Case(latent=True, batch=1, num_kv_heads=1, group=64, head_dim=576, value_dim=512, num_tokens=2),
]


def heads_first(cache: Tensor | None) -> Tensor | None:
    """The same cache as engines have it on the CPU."""
    if cache is None:
        return None
    spec = BufferSpec(
        name="cache", kind="cache", shape=tuple(cache.shape), dtype=cache.dtype, order=HEADS_FIRST
    )
    return spec.empty(cache.device).copy_(cache)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention_equals_reference(case, dtype):
    pool = Pool(dataclasses.replace(case, dtype=dtype))
    tokens_BS = pool.decode()
    if len(tokens_BS) == 3:
        tokens_BS[1][-1] = None  # a padded token, and a whole padded row
        tokens_BS.append([None] * case.num_tokens)
    got_arguments, want_arguments = pool.arguments(tokens_BS), pool.arguments(tokens_BS)
    got = paged_attention(*got_arguments)
    want = paged_attention_reference(*want_arguments)
    by_head = pool.arguments(tokens_BS)
    by_head = (*by_head[:3], *map(heads_first, by_head[3:5]), *by_head[5:])
    torch.testing.assert_close(paged_attention(*by_head), got, rtol=0, atol=0)
    torch.testing.assert_close(by_head[3:5], got_arguments[3:5], rtol=0, atol=0, equal_nan=True)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for got_cache, want_cache in zip(got_arguments[3:5], want_arguments[3:5], strict=True):
        if want_cache is not None:
            torch.testing.assert_close(got_cache, want_cache, rtol=0, atol=0, equal_nan=True)
    if len(tokens_BS) == 4:
        assert not got[3].any()
        assert not got[1, -1].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention_equals_marker(case):
    """A whole prompt through the cache is what the marker says about it."""
    pool = Pool(dataclasses.replace(case, batch=1, dtype=torch.float64))
    request = pool.requests[0]
    length = case.context + case.num_tokens
    got = paged_attention(*pool.arguments([[(0, position) for position in range(length)]]))
    want = attention(
        *(request.query[None], request.key[None], request.value[None], case.head_dim**-0.5),
        *(case.window, case.softcap, pool.sinks),
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(context=70, group=3, head_dim=24),
        Case(
            batch=2, context=700, window=300, softcap=5.0, sinks=True, block_size=48, num_kv_heads=1
        ),
        Case(batch=2, context=1100, head_dim=64, value_dim=64, num_kv_heads=1),
        Case(latent=True, batch=2, context=300, head_dim=40, value_dim=29, group=6, num_kv_heads=1),
    ],
    ids=str,
)
def test_rows_are_bitwise_independent(case, dtype, kernels, threads):
    """One row, S rows, a batch, a packed prefill, any number of threads: the same bits."""
    pool = Pool(dataclasses.replace(case, dtype=dtype))
    threads(1)
    batch = paged_attention(*pool.arguments(pool.decode()))
    for num_threads in (1, 2, 5):
        threads(num_threads)
        assert torch.equal(paged_attention(*pool.arguments(pool.decode())), batch)
        for row, tokens in enumerate(pool.decode()):
            assert torch.equal(paged_attention(*pool.arguments([tokens]))[0], batch[row])
            arguments = pool.arguments([tokens])
            written = (arguments[3], arguments[4])
            paged_attention(*arguments)
            for s, token in enumerate(tokens):  # one row alone, over the cache that holds all S
                single = pool.arguments([[token]])
                assert torch.equal(
                    paged_attention(*single[:3], *written, *single[5:])[0, 0], batch[row, s]
                )
        length = case.context + case.num_tokens
        packed = [(row, position) for row in range(case.batch) for position in range(length)]
        prefill = paged_attention(*pool.arguments([[None, *packed, None]]))[0, 1:-1]
        prefill = prefill.unflatten(0, (case.batch, length))[:, case.context :]
        assert torch.equal(prefill, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_tokens_cannot_leak(dtype, kernels):
    """NaN in the K/V of a later row of the same tile leaves earlier rows untouched."""
    pool = Pool(Case(context=62, num_tokens=6, dtype=dtype))
    arguments = pool.arguments(pool.decode())
    clean = paged_attention(*arguments)
    arguments[1][:, :, 3:] = NAN
    arguments[2][:, :, 3:] = NAN
    poisoned = paged_attention(*arguments)
    assert torch.equal(poisoned[:, :3], clean[:, :3])
    assert poisoned[:, 3:].isnan().all()


@pytest.mark.parametrize("window", [7, 8], ids="window{}".format)
@pytest.mark.parametrize("num_tokens", [1, 6], ids="S{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_before_the_window_cannot_leak(dtype, num_tokens, window, kernels):
    """NaN in the cell before the first that is seen, which may be the other of a pair."""
    pool = Pool(Case(context=62, num_tokens=num_tokens, window=window, dtype=dtype))
    clean = paged_attention(*pool.arguments(pool.decode()))
    for row in range(pool.case.batch):
        for position in range(62 - window + 1):
            cell = divmod(pool.slot(row, position), pool.case.block_size)
            pool.key_cache[cell] = pool.value_cache[cell] = NAN
    assert torch.equal(paged_attention(*pool.arguments(pool.decode())), clean)


def test_missing_blocks_and_positions_beyond_the_table_are_never_read(kernels):
    pool = Pool(Case(context=40))
    pool.table_RM[:, 1] = -1
    tokens_BS = [[(row, 8 + s) for s in range(4)] for row in range(3)]
    for position in (40, 5000):
        got_arguments, want_arguments = pool.arguments(tokens_BS), pool.arguments(tokens_BS)
        for arguments in (got_arguments, want_arguments):
            arguments[7][:] = position
        got, want = paged_attention(*got_arguments), paged_attention_reference(*want_arguments)
        torch.testing.assert_close(got, want, equal_nan=True)


def test_wrong_metadata_is_refused(kernels):
    arguments = Pool(Case()).arguments(Pool(Case()).decode())
    for index, value in (
        (5, arguments[5].long()),
        (5, arguments[5] + 10_000),
        (6, arguments[6] + 10),
        (2, arguments[2].double()),
        (2, None),
        (4, None),
        (3, torch.cat([arguments[3], arguments[3]])[::2]),
        (4, torch.cat([arguments[4], arguments[4]], 3)[..., ::2]),
        (3, arguments[3][:, :, :1].expand_as(arguments[3])),
        (4, arguments[4][:1, :1].expand_as(arguments[4])),
    ):
        wrong = list(arguments)
        wrong[index] = value
        with pytest.raises(RuntimeError, match="paged_attention"):
            paged_attention(*wrong)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_marker_equals_scaled_dot_product_attention(dtype):
    query, key, value = (
        torch.randn(2, 7, heads, 16).to(dtype).transpose(1, 2) for heads in (4, 2, 2)
    )
    want = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    got = attention(query, key, value, 0.3, 0, 0.0, None)
    torch.testing.assert_close(
        got, want.transpose(1, 2).contiguous(), rtol=1e-2, atol=TOLERANCE[dtype] * 2
    )


def test_marker_window_softcap_and_sinks():
    query, key, value = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    sink = torch.tensor([0.5], dtype=torch.float64)
    got = attention(query, key, value, 1.0, 2, 3.0, sink)
    for i in range(4):
        keys = slice(max(0, i - 1), i + 1)
        score = torch.tanh(key[0, 0, keys] @ query[0, 0, i] / 3) * 3
        weight = score.exp() / (score.exp().sum() + sink.exp())
        torch.testing.assert_close(got[0, i, 0], weight @ value[0, 0, keys])


@pytest.mark.parametrize("batch", [0, 1, 3], ids="B{}".format)
def test_opcheck(batch):
    query, key, value = (torch.randn(batch, 5, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    marker = torch.ops.compilespec.attention.default
    torch.library.opcheck(marker, (query, key, value[..., :6], 0.3, 2, 5.0, torch.randn(4)))
    paged = torch.ops.compilespec.paged_attention.default
    pool = Pool(Case(batch=batch, context=5, value_dim=8, sinks=True, window=3))
    arguments = pool.arguments(pool.decode())
    arguments[3].nan_to_num_()
    arguments[4].nan_to_num_()
    torch.library.opcheck(paged, arguments)
    pool = Pool(Case(batch=batch, context=5, value_dim=6, latent=True))
    arguments = pool.arguments(pool.decode())
    arguments[3].nan_to_num_()
    torch.library.opcheck(paged, arguments)
    plain = (query, key, value, 0.3, 0, 0.0, None)
    assert torch.equal(attention_reference(*plain), attention(*plain))


def test_compiled_graph_mutates_the_caches_in_place():
    pool = Pool(Case(context=20))
    arguments = pool.arguments(pool.decode())
    num_blocks = pool.key_cache.shape[0]
    second_caches = (arguments[3].clone(), arguments[4].clone())

    def two_layers(query, key, value, key_0, value_0, key_1, value_1, *metadata):
        hidden = paged_attention(query, key, value, key_0, value_0, *metadata)
        return paged_attention(hidden.transpose(1, 2), key, value, key_1, value_1, *metadata)

    def caches() -> list[Tensor]:
        return [cache.clone() for cache in (*arguments[3:5], *second_caches)]

    want_caches, got_caches = caches(), caches()
    want = two_layers(*arguments[:3], *want_caches, *arguments[5:])
    compiled = torch.compile(two_layers, fullgraph=True)
    got, codes = run_and_get_code(compiled, *arguments[:3], *got_caches, *arguments[5:])
    assert torch.equal(got, want)
    for got_cache, want_cache in zip(got_caches, want_caches, strict=True):
        torch.testing.assert_close(got_cache, want_cache, rtol=0, atol=0, equal_nan=True)
    (code,) = codes
    assert code.count("compilespec.paged_attention.default(") == 2
    assert f"((({num_blocks}," not in code
    assert f"empty_strided_cpu(({num_blocks}," not in code
    assert "copy_(" not in code
    assert "clone" not in code.split("def call", 1)[1]


def test_no_second_openmp_runtime(kernels):
    packed_linear(torch.ones(64, 512), pack_weight(torch.ones(512, 512)), None, 512)
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = {
        path for path in paths if re.match(r"lib(gomp|omp|iomp5)\b", path.rsplit("/", 1)[-1])
    }
    assert len(runtimes) <= 1, runtimes


def test_a_damaged_library_is_built_again_and_not_loaded(tmp_path, monkeypatch):
    built, loaded = [], []

    def build(command):
        path = Path(command[command.index("-o") + 1])
        path.write_bytes(bytes(range(200)))
        built.append(path.suffix)

    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_build, "_run", build)
    monkeypatch.setattr(_build, "_compiler", lambda: sys.executable)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(Path(path)))

    def num_builds():
        assert _build._try_load()
        assert loaded[-1].read_bytes().startswith(bytes(range(200)))
        return built.count(".so")

    assert [num_builds(), num_builds()] == [1, 1]
    whole = loaded[-1].read_bytes()
    for number, damaged in enumerate((whole[:100], b"", whole[:-1], b"x" + whole[1:]), 2):
        loaded[-1].write_bytes(damaged)
        assert [num_builds(), num_builds()] == [number, number]


def test_compilers_share_the_kernels_and_two_processes_build_once(tmp_path, monkeypatch):
    commands = []

    def build(command):
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"built")

    monkeypatch.setattr(_build, "_run", build)
    monkeypatch.setattr(_build, "num_cpus", lambda: 3)
    library = tmp_path / "kernels" / "library.so"
    _build._compile(library, None)
    assert len(commands) == 3 + 1  # and the linker
    _build._compile(library, None)  # as a process that waited for the first does
    assert len(commands) == 4
    units = _build._write_units(tmp_path)
    included = [line.split('"')[1] for unit in units for line in unit.read_text().splitlines()]
    assert sorted(included) == [str(one) for one in _build._sources() if one.suffix == ".cpp"]


def test_falls_back_to_the_reference_without_a_compiler(tmp_path):
    script = (
        "import warnings, torch\n"
        "from compilespec.ops import load_kernels, pack_weight, packed_linear\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    out = packed_linear(torch.ones(2, 8), pack_weight(torch.ones(3, 8)), None, 3)\n"
        "    assert not load_kernels() and out.tolist() == [[8.0] * 3] * 2\n"
        "assert [w.category for w in caught] == [RuntimeWarning], caught\n"
    )
    environment = {
        "PATH": "/nonexistent",
        "COMPILESPEC_CACHE_DIR": str(tmp_path),
        "CXX": "no-such-compiler",
    }
    environment["PYTHONPATH"] = ":".join(path for path in sys.path if path)
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=tmp_path)
