"""quantize= without torchao, or with one too old: one line, with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

import compilespec
from compilespec.cli import main
from compilespec.errors import InvalidOption, MissingDependency
from compilespec.quantization import Quantize, read_quantize

INSTALL = "pip install 'compilespec[quant]'"


@pytest.fixture
def no_torchao(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else find(name, *a)
    )


@pytest.mark.parametrize("keyword", ["quantize", "draft_quantize"])
def test_a_missing_extra_is_one_line_with_its_cure(no_torchao, keyword):
    with pytest.raises(MissingDependency) as caught:
        compilespec.compile(torch.nn.Linear(2, 2), **{keyword: "int8-weight-only"})
    text = str(caught.value)
    assert text.startswith(f"{keyword}='int8_weight_only' needs torchao>=0.15")
    assert text.endswith(INSTALL)
    assert "\n" not in text


def test_the_command_line_says_it_too(no_torchao, capsys):
    assert main(["generate", "--prompt", "x", "--quantize", "int8"]) == 2
    error = capsys.readouterr().err
    assert INSTALL in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("version", "is_old"), [("0.9.0", True), ("0.14.1+cpu", True),
                                                 ("0.15.0", False), ("1.0.0", False)])  # fmt: skip
def test_an_old_torchao_is_refused(monkeypatch, version, is_old):
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torchao" else known(name)
    )
    if not is_old:
        assert read_quantize("int8") == Quantize("int8_weight_only")
        return
    with pytest.raises(MissingDependency, match=r"needs torchao>=0\.15, found 0\.") as caught:
        read_quantize("int8")
    assert str(caught.value).endswith(INSTALL)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidOption, match=r"int8_weight_only, int8_dynamic.*got 'int3'"):
        read_quantize("int3")
