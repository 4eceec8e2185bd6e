"""The registry of methods: names, aliases, errors."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import InvalidOption, SpecError, UnknownMethod
from compilespec.methods.registry import capability_rows, get_method, method_names
from compilespec.pipeline.options import check_method_options
from compilespec.tracing.target_info import TargetInfo


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("eagle3", "eagle3"),
        ("EAGLE3", "eagle3"),
        ("Eagle3_One_Model", "eagle3"),
        ("EAGLE3_ONE_MODEL", "eagle3"),
        ("Draft_Target", "draft_model"),
        ("NGRAM", "ngram"),
        ("USER_PROVIDED", "user"),
        ("SAVE_HIDDEN_STATES", "save_hidden_states"),
        ("none", "none"),
        ("NONE", "none"),
        (None, "none"),
    ],
)
def test_names_and_mode_names(name, found):
    assert get_method(name).capabilities.name == found


def test_mode_names_are_names_of_methods():
    assert get_method("MTP_EAGLE_ONE_MODEL").capabilities.name == "mtp_eagle"
    assert get_method("AUTO").capabilities.name == "auto"


@pytest.mark.parametrize("name", ["eagle4", "", "eagle 3", "hydra"])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(UnknownMethod, match="eagle3") as caught:
        get_method(name)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, SpecError)
    assert not str(caught.value).startswith("'")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("eagle4", "eagle or eagle3"), ("eagle2", "eagle or eagle3"), ("eagel3", "eagle3"),
     ("medusa2", "medusa")],
)  # fmt: skip
def test_another_version_may_mean_any_of_those_there_are(name, meant):
    with pytest.raises(UnknownMethod, match=rf"did you mean {meant}\?"):
        get_method(name)


def test_a_name_must_be_a_string():
    with pytest.raises(UnknownMethod, match="got int"):
        get_method(3)


def test_no_two_methods_answer_to_one_name():
    spellings = [
        {spelling.casefold() for spelling in (row["name"], *row["aliases"])}
        for row in capability_rows()
    ]
    assert len(set().union(*spellings)) == sum(map(len, spellings))


def test_capability_rows():
    rows = {row["name"]: row for row in capability_rows()}
    assert set(method_names()) == {
        "none", "eagle3", "eagle", "mtp", "mtp_eagle", "mtp_multi", "shared_kv", "draft_model",
        "peagle", "dflash", "dspark", "medusa", "suffix",
        "ngram", "user", "self", "save_hidden_states", "auto",
    }  # fmt: skip
    assert rows["eagle3"]["reads_hidden_states"]
    assert rows["eagle3"]["kind"] == "recycled"
    assert not rows["none"]["needs_draft_weights"]


def test_none_has_no_drafter():
    target = TargetInfo(
        hidden_size=8,
        vocab_size=8,
        num_layers=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        embedding=torch.zeros(8, 8),
        lm_head=torch.zeros(8, 8),
    )
    assert get_method("none").load(None, target, {}) is None


@pytest.mark.parametrize("name", method_names())
def test_every_method_says_what_options_it_takes(name):
    capabilities = get_method(name).capabilities
    assert capabilities.options is not None
    check_method_options([*capabilities.options, "relaxed_topk"], capabilities, ["dtype"])
    takes = f"takes {', '.join(capabilities.options)}" if capabilities.options else "leave it out"
    with pytest.raises(InvalidOption, match=f"spec='{name}' have no keyword 'zzz'; .*{takes}$"):
        check_method_options(["zzz"], capabilities, ["dtype"])
