"""The prefix cache beyond the pool: host memory and a folder, whole, damaged, full and foreign."""

from __future__ import annotations

import copy
import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, NotSupported
from compilespec.methods.eagle3 import random_head
from compilespec.runtime import kept_states, prefix_files, prefix_tiers
from compilespec.runtime.engine import Engine
from compilespec.runtime.packed_rows import PackedRows
from compilespec.runtime.prefix_files import HEADER, PrefixFiles
from compilespec.runtime.prefix_tiers import HostEntries, PrefixTiers
from tests.support.models import (
    Ask,
    ask_all,
    assert_nothing_held,
    poison_pool,
    run_traffic,
    target_info,
    tiny_hybrid,
    tiny_target,
)

MAX_SEQ_LEN = 96
SIZES = ((70, 20), (50, 32), (58, 25), (60, 10), (49, 34))
VERSION = "0" * 32


@functools.cache
def model_of(kind: str) -> tuple[nn.Module, tuple[Ask, ...]]:
    model = tiny_hybrid("qwen3_5") if kind == "hybrid" else tiny_target("llama", num_layers=2)
    return model, tuple(ask_all(model, SIZES))


def engine_of(kind: str, **options: Any) -> Engine:
    """10 blocks: two prompts, so that each one pushes the others out."""
    model, _ = model_of(kind)
    sizes = {"max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "kv_cache_tokens": 160}
    spec = {"spec": "ngram", "num_draft_tokens": 2}
    if kind == "eagle3":
        head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1))
        spec = {"spec": "eagle3", "draft": head, "num_draft_tokens": 2}
    if kind == "draft_model":  # with the target's weights, it is always right
        spec = {"spec": "draft_model", "draft": copy.deepcopy(model), "num_draft_tokens": 2}
    engine = compilespec.compile(
        model, backend="eager", max_prefill_tokens=40, **{**sizes, **spec, **options}
    )
    poison_pool(engine)
    return engine


def assert_own_tokens(engine: Engine, asks: Sequence[Ask], batches: Sequence[int]) -> None:
    requests = run_traffic(engine, asks, batches)
    assert [r.output_token_ids for r in requests] == [list(ask.tokens) for ask in asks]
    assert_nothing_held(engine)
    if engine.plan()["method"] == "draft_model":  # its entries were there, too
        assert all(set(request.emitted_per_step[:-1]) <= {3} for request in requests)


@pytest.fixture
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few blocks keep states."""
    monkeypatch.setattr(kept_states, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(kept_states, "RUNG", 2)


# --- tokens ---


@pytest.mark.usefixtures("_short_prompts")
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "draft_model", "hybrid"])
def test_tokens_cold_from_host_and_from_disk_after_a_restart(kind: str, tmp_path: Path) -> None:
    """One at a time, then with others, which make room for each other."""
    _, asks = model_of(kind)
    again = [
        Ask(prompt=(*ask.prompt, *ask.tokens[:count]), tokens=ask.tokens[count:])
        for ask in asks
        for count in (0, 1, 5)
    ]
    keep: dict[str, Any] = {"prefix_host_mib": 8, "prefix_dir": tmp_path, "max_cached_states": 3}
    with engine_of(kind, **keep) as engine:
        assert_own_tokens(engine, asks, (1,))
        assert engine.stats().num_tokens_from_host == 0
        assert_own_tokens(engine, again, (1,))
        assert engine.stats().num_tokens_from_host > 100
        assert_own_tokens(engine, [*again, *asks], (3,))
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_tokens_from_disk == 0
        assert engine.plan()["prefix_tiers"]["host_mib"] > 0
    with engine_of(kind, **keep) as engine:
        (output,) = engine.generate(
            [list(asks[0].prompt)], SamplingParams(max_new_tokens=5, ignore_eos=True)
        )
        assert output.token_ids == list(asks[0].tokens[:5])
        assert output.num_cached_tokens == engine.stats().num_tokens_from_disk == 64
        assert_own_tokens(engine, again, (1,))
        assert engine.stats().num_tokens_from_disk > 100
        assert_own_tokens(engine, [*again, *asks], (3,))
        assert engine.stats().num_preemptions > 0
        assert engine.plan()["prefix_tiers"]["disk_mib"] > 0


def test_other_weights_find_nothing_and_the_same_ones_find_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, asks = tiny_target("llama", num_layers=2), model_of("ngram")[1]
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = tiny_target("llama", num_layers=2, seed=1)
    new = [Ask(prompt=a.prompt, tokens=b.tokens) for a, b in zip(asks, _asks(other), strict=True)]
    keep = {"prefix_dir": tmp_path, "prefix_host_mib": 1, "max_seq_len": MAX_SEQ_LEN}
    with compilespec.compile(model, backend="eager", max_batch_size=2, **keep) as engine:
        assert_own_tokens(engine, asks, (1,))
        engine.update_weights(other.state_dict())
        assert_own_tokens(engine, new, (1,))
        stats = engine.stats()
        assert stats.num_cached_tokens == stats.num_tokens_from_host == 0
        engine.update_weights(old)
        assert_own_tokens(engine, asks, (1,))
        assert engine.stats().num_tokens_from_disk > 200
        engine.reset_prefix_cache()  # forgets what is on the disk as well
        before = engine.stats().num_cached_tokens
        assert_own_tokens(engine, asks[:1], (1,))
        assert engine.stats().num_cached_tokens == before
    assert "other weights" not in caplog.text
    with compilespec.compile(
        model, backend="eager", max_batch_size=3, **keep, enable_prefix_caching=True
    ) as engine:  # another program
        assert "are of other weights, or of another program" in caplog.text
        assert_own_tokens(engine, asks[:1], (1,))
        assert engine.stats().num_cached_tokens == 0


def _asks(model: nn.Module) -> list[Ask]:
    """The prompts of `model_of("ngram")`, answered by another model."""
    from tests.support.models import greedy_reference

    return [
        Ask(prompt=ask.prompt, tokens=tuple(greedy_reference(model, list(ask.prompt), size)))
        for ask, (_, size) in zip(model_of("ngram")[1], SIZES, strict=True)
    ]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the blocks of all prompts."""
    folder = tmp_path_factory.mktemp("filled")
    with engine_of("ngram", prefix_dir=folder) as engine:
        assert_own_tokens(engine, model_of("ngram")[1], (1,))
    return folder


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def test_damaged_entries_are_computed_again_and_told_once(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit of the bytes, one of the header, the end cut off, more behind it, nothing at all."""
    damage: list[Callable[[bytes], bytes]] = [
        lambda data: _flip(data, len(data) - 100),
        lambda data: _flip(data, 20),
        lambda data: data[: len(data) // 2],
        lambda data: data + b"more",
        lambda data: b"",
    ]
    entries = sorted(filled.glob("*/*.block"))
    for number, path in enumerate(entries):
        path.write_bytes(damage[number % len(damage)](path.read_bytes()))
    with engine_of("ngram", prefix_dir=filled) as engine:
        assert_own_tokens(engine, model_of("ngram")[1], (1,))
        assert engine.stats().num_tokens_from_disk == 0
        engine._options.tiers.files.finish()
        assert caplog.text.count("is damaged") == 1
    with engine_of("ngram", prefix_dir=filled) as engine:  # they were written anew
        assert_own_tokens(engine, model_of("ngram")[1], (1,))
        assert engine.stats().num_tokens_from_disk > 200


def test_a_full_disk_is_told_once_and_nothing_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, mode: str = "r", *rest: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with engine_of("ngram", prefix_dir=tmp_path, prefix_host_mib=1) as engine:
        monkeypatch.setattr(prefix_files.Path, "open", full)
        for _ in range(2):
            assert_own_tokens(engine, model_of("ngram")[1], (2,))
            engine._options.tiers.files.finish()
        monkeypatch.undo()
        assert caplog.text.count("No space left") == 1
        assert engine.stats().num_tokens_from_host > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_nan_leaves_nothing_behind(tmp_path: Path) -> None:
    model, asks = tiny_target("llama", num_layers=2), model_of("ngram")[1]
    with compilespec.compile(
        model, backend="eager", max_batch_size=2, max_prefill_tokens=20, max_seq_len=MAX_SEQ_LEN,
        prefix_dir=tmp_path,
    ) as engine:  # fmt: skip
        files = engine._options.tiers.files
        weight = model.get_input_embeddings().weight
        bad = weight.detach()[asks[0].prompt[-1]].clone()
        with torch.no_grad():
            weight[asks[0].prompt[-1]] = float("nan")
        (output,) = engine.generate([list(asks[0].prompt)], SamplingParams(max_new_tokens=3))
        assert "NaN" in str(output.error)
        files.finish()
        assert not list(tmp_path.rglob("*.block"))
        with torch.no_grad():
            weight[asks[0].prompt[-1]] = bad
        assert_own_tokens(engine, asks, (1,))


# --- options ---


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"enable_prefix_caching": False, "prefix_host_mib": 4}, InvalidOption, "leave out"),
        ({"tensor_parallel_size": 2, "prefix_host_mib": 4}, NotSupported, "ranks"),
        ({"prefix_host_mib": 0}, InvalidOption, "positive"),
        ({"prefix_dir": ""}, InvalidOption, "path of a folder"),
        ({"prefix_dir": "/dev/null/x"}, InvalidOption, "name another folder"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        compilespec.compile(model_of("ngram")[0], backend="eager", max_seq_len=64, **options)


def test_a_program_without_prefix_caching_says_why_it_keeps_nothing() -> None:
    with engine_of("hybrid", max_cached_states=0, prefix_host_mib=4) as engine:
        assert engine.plan()["prefix_tiers"].startswith("off: max_cached_states=0")


# --- the parts ---


def rows_of(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 100, (count, *shape), generator=draw).to(dtype)


def test_rows_are_copied_out_and_back() -> None:
    """Of several dtypes, and of a buffer that lies head by head in memory."""
    by_heads = rows_of(40, 3, 4, 2).permute(0, 2, 1, 3)
    buffers = [by_heads, rows_of(40, 5, dtype=torch.int8), rows_of(40, 7, dtype=torch.bfloat16)]
    rows = PackedRows(buffers)
    assert rows.num_bytes == 96 + 5 + 14
    before = [buffer.clone() for buffer in buffers]
    order = list(range(39, -1, -1))
    packed = rows.read(order)
    for buffer in buffers:
        buffer.zero_()
    rows.write(order, list(packed))
    assert all(torch.equal(one, two) for one, two in zip(before, buffers, strict=True))


def test_host_memory_holds_its_bound_and_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tiers, "PIECE_BYTES", 300)
    values = rows_of(20, 25)
    rows = PackedRows([values])
    host = HostEntries(rows, 799)  # seven entries of 100 bytes
    names = [f"{number:02}" for number in range(20)]
    packed = rows.read(range(20))
    host.put(names[:7], packed[:7], wanted=())
    assert host.num_bytes == 700
    host.touch(names[:3])
    host.put(names[7:12], packed[7:12], wanted=set(names[:3]))
    assert [name for name in names if name in host] == [*names[:3], *names[7:11]]
    assert host.num_bytes == 700
    assert all(torch.equal(host.get(n), packed[int(n)]) for n in names if n in host)
    host.remove(names[:3])
    host.put(names[15:18], packed[15:18], wanted=())
    assert all(name in host for name in names[15:18])
    host.clear()
    assert host.num_bytes == 0
    assert not any(name in host for name in names)


def test_one_entry_larger_than_the_bound_is_not_kept() -> None:
    rows = PackedRows([rows_of(2, 25)])
    host = HostEntries(rows, 99)
    host.put(["a"], rows.read([0]), wanted=())
    assert "a" not in host
    assert host.num_bytes == 0


def name_of(number: int) -> str:
    return f"{number:032x}.block"


def files_of(folder: Path, max_bytes: int = 10**6, version: str = VERSION) -> PrefixFiles:
    return PrefixFiles(folder, max_bytes, lambda: version)


def save(files: PrefixFiles, *numbers: int) -> None:
    rows = torch.tensor([[number] * 100 for number in numbers], dtype=torch.uint8)
    files.save([name_of(number) for number in numbers], rows, lambda: None)


def read(files: PrefixFiles, number: int) -> bool:
    row = torch.zeros(100, dtype=torch.uint8)
    (is_good,) = files.fetch([name_of(number)], [row]).result()
    assert not is_good or row.tolist() == [number] * 100
    return is_good


def test_files_hold_their_bound_and_the_oldest_go_first(tmp_path: Path) -> None:
    size = HEADER.size + 100
    files = files_of(tmp_path, max_bytes=4 * size)
    for number in range(4):
        save(files, number)
        files.finish()
        time.sleep(0.01)  # their times differ
    assert read(files, 0)
    save(files, 4, 5)
    files.finish()
    assert [number for number in range(6) if files.has(name_of(number))] == [0, 3, 4, 5]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.block")) == 4 * size
    files.close()
    other = files_of(tmp_path, max_bytes=2 * size, version="1" * 32)
    save(other, 9)
    other.finish()
    assert len(list(tmp_path.rglob("*.block"))) == 2
    assert other.has(name_of(9))
    other.close()


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    one, two = files_of(tmp_path), files_of(tmp_path)
    save(one, 1, 2)
    save(two, 2, 3)
    one.finish()
    two.finish()
    assert all(read(files, number) for files in (one, two) for number in (1, 2, 3))
    two.remove([name_of(1)])
    two.finish()
    assert not read(one, 1)
    assert not one.has(name_of(1))
    one.remove_all()
    one.finish()
    assert not read(two, 2)
    one.close()
    two.close()


def test_foreign_files_are_left_alone_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / VERSION).mkdir()
    (tmp_path / VERSION / "more.txt").write_text("mine")
    stale, fresh = (tmp_path / VERSION / f"{name_of(n)}.{n}.part" for n in (1, 2))
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (1, 1))
    files = files_of(tmp_path, max_bytes=150)
    save(files, 1)
    save(files, 2)
    files.remove_all()
    files.close()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted([fresh.name, "more.txt", "notes.txt"])
    assert caplog.text.count("is no entry of a prefix cache") == 1


def test_an_entry_under_another_name_or_version_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(tmp_path)
    save(files, 1)
    files.finish()
    entry = tmp_path / VERSION / name_of(1)
    entry.with_name(name_of(2)).write_bytes(entry.read_bytes())
    assert not read(files, 2)
    files.close()
    other = tmp_path / ("1" * 32)
    other.mkdir()
    entry.rename(other / name_of(1))
    files = files_of(tmp_path, version="1" * 32)
    assert not read(files, 1)
    assert "damaged, or was written by something else" in caplog.text
    files.close()


def test_writers_that_are_too_slow_lose_entries_and_keep_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "MAX_WAITING_BYTES", 250)
    files = files_of(tmp_path)
    held: Future[None] = Future()
    row = torch.zeros((1, 100), dtype=torch.uint8)
    for number in range(4):
        files.save([name_of(number)], row, held.result)
    held.set_result(None)
    files.finish()
    assert [files.has(name_of(number)) for number in range(4)] == [True, True, False, False]
    files.close()


def test_a_damaged_entry_cuts_what_is_found(tmp_path: Path) -> None:
    rows = PackedRows([rows_of(8, 25)])
    before = rows.read(range(8)).clone()
    files = files_of(tmp_path)
    tiers = PrefixTiers(rows, None, 400, files)
    keys = [bytes([number]) * 16 for number in range(6)]
    tiers.publish("block", keys[:5], range(5))
    tiers.keep_evicted("block", keys[:2], range(2))
    files.finish()
    path = tmp_path / VERSION / f"{keys[3].hex()}.block"
    path.write_bytes(_flip(path.read_bytes(), 120))
    assert tiers.num_found(keys) == 5
    assert tiers.ready(keys[:5], (), waits=True) is None
    assert tiers.num_found(keys) == 3
    assert tiers.ready(keys[:3], (), waits=True) is True
    tiers.load("block", keys[:3], [7, 6, 5])
    assert torch.equal(rows.read([7, 6, 5]), before[:3])
    assert (tiers.num_from_host, tiers.num_from_disk) == (2, 1)
    tiers.forget(keys[:1])
    files.finish()
    assert tiers.num_found(keys) == 0
    tiers.close()
