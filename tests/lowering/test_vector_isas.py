"""Inductor's probes of instruction sets are answered from the cache, where one has succeeded."""

import subprocess

import pytest
from torch._inductor.cpu_vec_isa import VecAVX2

from compilespec.lowering import vector_isas


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_success_alone_is_remembered(own_cache):
    asked = []

    def asking(answer):
        return vector_isas._remembered(lambda: asked.append(answer) or answer, "an isa")

    assert [asking(False), asking(True), asking(False)] == [False, True, True]
    assert asked == [False, True]
    assert not vector_isas._remembered(lambda: False, "another isa")


def test_another_compiler_is_probed_anew(own_cache, monkeypatch):
    assert vector_isas._remembered(lambda: True, "an isa")
    monkeypatch.setattr(vector_isas, "toolchain", lambda: ("another compiler",))
    assert not vector_isas._remembered(lambda: False, "an isa")


def test_inductor_asks_here(own_cache, monkeypatch):
    vector_isas.remember_vector_isas()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    code, isa = "no code", VecAVX2()
    assert vector_isas._remembered(lambda: True, f"VecAVX2 {isa} {code}")
    assert isa.check_build(code)


def test_a_cache_that_cannot_be_written_is_let_be(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(file))
    assert vector_isas._remembered(lambda: True, "an isa")
