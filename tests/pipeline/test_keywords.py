"""The keywords of `compile` and `trace`: what they show, and where they are said."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import compilespec
from compilespec.errors import InvalidOption, NotSupported, SpecError
from compilespec.methods.registry import METHODS, method_names
from compilespec.passes.splice.acceptance.options import ACCEPTANCE_OPTIONS
from compilespec.pipeline.keyword_types import CompileKeywords, GraphMode, SpecName
from compilespec.pipeline.keywords import MARK, describe_fields, shown_fields
from compilespec.pipeline.options import CompileOptions

REQUIRED = inspect.Parameter.empty
FIRST = {"model": REQUIRED, "spec": "none"}
OF_LOADING = {"draft": None, "dtype": None, "device": None, "tokenizer": None}
# Public: a name or a default that changes here changes for users.
KEYWORDS = {
    "num_draft_tokens": None,
    "draft_tree": None,
    "max_batch_size": 8,
    "max_seq_len": None,
    "max_prefill_tokens": 2048,
    "kv_cache_tokens": None,
    "enable_prefix_caching": True,
    "max_cached_states": None,
    "prefix_host_mib": None,
    "prefix_dir": None,
    "prefix_disk_mib": 4096,
    "overlap": "auto",
    "greedy_step": "auto",
    "max_step_tokens": None,
    "backend": "inductor",
    "cudagraphs": "auto",
    "buckets": None,
    "acceptance": "auto",
    "logits_processor": None,
    "host_processors": False,
    "prompt_logprobs": False,
    "prompt_embeds": False,
    "quantize": None,
    "dequantize": False,
    "draft_quantize": None,
    "adapters": None,
    "max_adapters": None,
    "max_adapter_rank": None,
    "draft_vocab_size": None,
    "draft_vocab_counts": None,
    "tensor_parallel_size": 1,
    "draft_tensor_parallel_size": 1,
    "tensor_parallel_plan": None,
}
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    compilespec.compile: {**FIRST, **OF_LOADING, "progress": None, **KEYWORDS},
    compilespec.trace: {**FIRST, **OF_LOADING, "keep_graphs": True, "progress": None, **KEYWORDS},
}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__name__)
def test_signatures_show_every_keyword_with_its_default(call: Callable[..., Any]) -> None:
    signature = inspect.signature(call)
    *parameters, rest = signature.parameters.values()
    assert [(p.name, p.default) for p in parameters] == [*SIGNATURES[call].items()]
    for parameter in parameters:
        is_first = parameter.name in FIRST
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) is not is_first
        assert parameter.annotation is not REQUIRED
    assert str(rest) == "**method_options: 'Any'"


def test_help_describes_every_keyword_of_compile() -> None:
    text = compilespec.compile.__doc__
    assert text is not None
    assert MARK.strip() not in text
    if sys.version_info >= (3, 13):  # which takes a level of indentation away
        text = re.sub("\n(?=.)", "\n    ", text)
    entries = re.findall(r"^        (\w+): \S", text, flags=re.MULTILINE)
    assert entries == [*inspect.signature(compilespec.compile).parameters]
    assert max(map(len, text.splitlines())) <= 100
    assert describe_fields(CompileOptions) in text


def test_every_field_is_a_keyword_or_an_option_of_the_acceptance() -> None:
    shown = [field.name for field in shown_fields(CompileOptions)]
    hidden = [f.name for f in dataclasses.fields(CompileOptions) if f.name not in shown]
    assert shown == [*KEYWORDS]
    assert hidden == [*ACCEPTANCE_OPTIONS]
    for field in dataclasses.fields(CompileOptions):
        assert field.metadata["doc"].endswith("."), field.name


WRONG: dict[str, tuple[Any, str]] = {
    "num_draft_tokens": ("3", r"a positive integer, 'auto', or several .*; got '3'$"),
    "draft_tree": ([(0,)], r"a compilespec.DraftTree, .*; got \[\(0,\)\]$"),
    "max_batch_size": (None, "a positive integer; got None$"),
    "max_seq_len": (1, "an integer of at least 2, .*; got 1$"),
    "max_prefill_tokens": (True, "a positive integer; got True$"),
    "kv_cache_tokens": (1.5, "a positive integer; got 1.5$"),
    "enable_prefix_caching": (1, "True or False; got 1$"),
    "max_cached_states": (-1, "integer of at least 0, or None; got -1$"),
    "prefix_host_mib": (0, "a positive integer; got 0$"),
    "prefix_dir": (3, "the path of a folder, or None; got 3$"),
    "prefix_disk_mib": (None, "a positive integer; got None$"),
    "overlap": ("on", "'auto', True or False; got 'on'$"),
    "greedy_step": (None, "'auto', True or False; got None$"),
    "max_step_tokens": (-1, "a positive integer; got -1$"),
    "backend": ("aot", "one of .*; got 'aot'"),
    "cudagraphs": ("always", "one of .*; got 'always'"),
    "buckets": (4, "a list of batch sizes .*; got 4$"),
    "acceptance": ("all", "one of .*; got 'all'"),
    "logits_processor": (1, "a function or a module; got 1$"),
    "host_processors": ("yes", "True or False; got 'yes'$"),
    "prompt_embeds": (5, "True or False; got 5$"),
    "prompt_logprobs": (5, "True or False; got 5$"),
    "quantize": ("int3", "one of .*; got 'int3'"),
    "dequantize": (1, "True or False; got 1"),
    "draft_quantize": ("int3", "one of .*; got 'int3'"),
    "adapters": (3, "the directory of a LoRA adapter, or directories by name; got 3$"),
    "max_adapters": (0, "a positive integer; got 0$"),
    "max_adapter_rank": (2, "= needs adapters="),
    "draft_vocab_size": (0, "a positive integer; got 0$"),
    "draft_vocab_counts": (3, "a file, texts, or counts by token id; got 3$"),
    "tensor_parallel_size": (0, "a positive integer; got 0$"),
    "draft_tensor_parallel_size": (0, "a positive integer; got 0$"),
    "tensor_parallel_plan": ("rows", "a dict of ways by module path, .*; got 'rows'$"),
    "force_num_accepted": (-1, "got -1$"),
    "relaxed_topk": (3, "only with acceptance='relaxed'$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_before_anything_is_loaded(name: str) -> None:
    value, says = WRONG[name]
    with pytest.raises((InvalidOption, NotSupported), match=f"{name}.*{says}"):
        CompileOptions(**{name: value})
    with pytest.raises(SpecError, match=f"{name}.*{says}"):
        compilespec.trace("no such model", **{name: value})
    assert {*WRONG} >= {*KEYWORDS}


def test_meanings_follow_from_what_was_given() -> None:
    options = CompileOptions(num_draft_tokens=[5, 0, 2, 2], buckets=[8, 2], cudagraphs="none")
    assert options.draft_counts == (0, 2, 5)
    assert options.smaller_draft_counts == (0, 2)
    assert options.bucket_sizes is not None
    assert options.bucket_sizes.decode == ((2,), (8,))
    assert options.graphs.mode == "none"
    alone = dataclasses.replace(options, num_draft_tokens=4)
    assert alone.draft_counts == (4,)
    assert CompileOptions().draft_counts == CompileOptions().smaller_draft_counts == ()


def test_type_checkers_know_every_keyword() -> None:
    """`CompileKeywords` is written out, because type checkers run nothing."""
    methods = {o for method in METHODS for o in method.capabilities.options or ()}
    names = [field.name for field in shown_fields(CompileOptions)]
    assert list(CompileKeywords.__annotations__)[: len(names)] == names
    assert {*CompileKeywords.__annotations__} == {*names, *ACCEPTANCE_OPTIONS, *methods}
    assert get_args(SpecName) == tuple(method_names())


@pytest.mark.parametrize("mode", get_args(GraphMode))
def test_what_type_checkers_take_is_taken(mode: str) -> None:
    assert CompileOptions(cudagraphs=mode).graphs


def test_completion_lists_the_public_names() -> None:
    assert {*compilespec.__all__} <= {*dir(compilespec)}


def test_an_editable_install_is_a_path() -> None:
    """setuptools installs a finder otherwise, which type checkers do not run."""
    assert (Path(compilespec.__file__).parent / "py.typed").is_file()
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["tool"]["setuptools"]["package-dir"] == {"": "."}
