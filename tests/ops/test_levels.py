"""Kernels that come with a wheel: which of them serves, and what each level computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compilespec.errors import InvalidOption
from compilespec.ops import _build, _levels

AVX2, AVX512, VNNI = (next(x for x in _levels.LEVELS if x.name == n) for n in
                      ("avx2", "avx512", "avx512_vnni"))  # fmt: skip
HERE = [level.name for level in _levels.fitting(_levels.cpu_features())]
EMULATED = [x.name for x in _levels.EMULATED if x.features <= _levels.cpu_features()]
OPERATORS = ("test_ops_attention.py", "test_tree_attention.py", "test_block_attention.py",
             "test_ops_linear.py", "test_ops_quantized.py")  # fmt: skip


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package that has libraries, as files that hold their names; a CPU can be chosen."""
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    for level in (AVX2, AVX512, VNNI):
        content = level.name.encode()
        (prebuilt / _build._file_name(level)).write_bytes(content + _build._seal(content))
    monkeypatch.setattr(_build, "PREBUILT", prebuilt)
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(_levels.VARIABLE, raising=False)
    monkeypatch.setattr(_levels, "cpu_features", lambda: VNNI.features | {"amx_tile"})
    return prebuilt


def chosen():
    """The level whose library serves; "native": one that is compiled here."""
    path = _build.library_path()
    return next((x.name for x in _levels.LEVELS if path.name == _build._file_name(x)), "native")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (VNNI.features | {"avx_vnni"}, "avx512_vnni"),
        (AVX512.features, "avx512"),
        (VNNI.features - {"avx512vl"}, "avx2"),
        (AVX2.features, "avx2"),
        (AVX2.features - {"fma"}, "native"),
        (frozenset(), "native"),
    ],
)
def test_the_best_that_the_cpu_runs_serves(package, monkeypatch, features, expected):
    monkeypatch.setattr(_levels, "cpu_features", lambda: features)
    assert chosen() == expected
    assert (_build.library_path().parent == package) == (expected != "native")


def test_a_level_can_be_asked_for(package, monkeypatch):
    monkeypatch.setenv(_levels.VARIABLE, "avx2")
    assert chosen() == "avx2"
    for path in package.iterdir():
        path.unlink()
    assert chosen() == "avx2", "compiled here, for that level"
    assert _build.library_path().is_relative_to(_build.cache_directory())


@pytest.mark.parametrize("name", ["avx512", "sse9"])
def test_a_level_that_does_not_run_here_is_refused(package, monkeypatch, name):
    monkeypatch.setattr(_levels, "cpu_features", lambda: AVX2.features)
    monkeypatch.setenv(_levels.VARIABLE, name)
    with pytest.raises(InvalidOption, match=f"={name} does not run .* one of native, avx2$"):
        _build.library_path()


def test_a_torn_library_or_one_of_other_sources_is_passed_over(package):
    best = package / _build._file_name(VNNI)
    best.write_bytes(best.read_bytes()[:-1])
    assert chosen() == "avx512"
    other = package / _build._file_name(AVX512)
    other.rename(other.with_name("compilespec_ops_avx512_0123456789.so"))
    assert chosen() == "avx2"


@pytest.mark.parametrize("level", HERE + EMULATED)
def test_the_operators_of_a_level_are_what_they_are_natively(level):
    """The operators' own tests: results against their references, and bits of a row in company."""
    here = Path(__file__).parent
    loads = "from compilespec.ops._build import load_kernels; assert load_kernels()"
    for command in (
        ["-c", loads],  # without the kernels, the references would be compared with themselves
        ["-m", "pytest", "-q", "-x", *(str(here / name) for name in OPERATORS)],
    ):
        done = subprocess.run(
            [sys.executable, *command], env={**os.environ, _levels.VARIABLE: level},
            cwd=here.parents[1], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr[-1000:] + done.stdout[-3000:]
