"""The flags that are made of the fields of options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from compilespec import DraftTree
from compilespec.cli import build_parser
from compilespec.cli.flags import NO_FLAG, compile_keywords, flag_of, read_arguments
from compilespec.cli.generate import sampling_params
from compilespec.pipeline.fields import CompileFields
from compilespec.pipeline.options import CompileOptions
from compilespec.serving.options import Binding, ServerOptions
from compilespec.training.options import TrainOptions

OPTIONS = {
    CompileFields: ("generate", "chat", "serve", "dump", "bench", "compile"),
    ServerOptions: ("serve",),
    Binding: ("serve",),
    TrainOptions: ("train",),
}


def flags_of(command: str) -> set[str]:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {text for action in commands.choices[command]._actions for text in action.option_strings}


@pytest.mark.parametrize("record", OPTIONS, ids=lambda record: record.__name__)
def test_every_field_is_a_flag_or_has_a_reason_why_not(record: type[Any]) -> None:
    flags = {flag for command in OPTIONS[record] for flag in flags_of(command)}
    names = [field.name for field in dataclasses.fields(record)]
    assert [name for name in names if name not in NO_FLAG and flag_of(name) not in flags] == []
    assert [name for name in names if name in NO_FLAG and flag_of(name) in flags] == []


def test_reasons_are_of_fields_that_there_are() -> None:
    assert {*NO_FLAG} <= {one.name for record in OPTIONS for one in dataclasses.fields(record)}
    assert all(NO_FLAG.values())


@pytest.mark.parametrize("command", ["generate demo", "serve demo", "dump", "compile", "chat demo"])
def test_values_arrive_as_compile_takes_them(command: str) -> None:
    given = (
        "--draft x --num-draft-tokens 0,2 --max-step-tokens 9 --no-enable-prefix-caching "
        "--no-overlap --greedy-step --cudagraphs none --acceptance block --quantize int8"
    )
    args = read_arguments(build_parser(), [*command.split(), *given.split()])
    keywords = compile_keywords(args, "eagle3")
    assert keywords == {
        "draft": "x", "num_draft_tokens": (0, 2), "max_step_tokens": 9,
        "enable_prefix_caching": False, "overlap": False, "greedy_step": True,
        "cudagraphs": "none", "acceptance": "block", "quantize": "int8",
    }  # fmt: skip
    assert CompileOptions(**{name: keywords[name] for name in keywords if name != "draft"})
    assert {*keywords} - {*compile_keywords(args, "none")} == {"draft", "num_draft_tokens"}


def test_what_is_not_given_is_left_to_the_options() -> None:
    for command in ("generate", "serve", "dump", "compile"):
        assert compile_keywords(read_arguments(build_parser(), [command]), "eagle3") == {}
    args = read_arguments(
        build_parser(), ["generate", "--stop", "a", "--stop", "b", "--top-k", "3"]
    )
    params = sampling_params(args)
    assert (params.stop, params.top_k, params.n, params.seed) == (("a", "b"), 3, 1, None)
    tree = read_arguments(build_parser(), ["dump", "--draft-tree", "0,1,0.0"]).draft_tree
    assert tree == DraftTree(choices=[(0,), (1,), (0, 0)])
