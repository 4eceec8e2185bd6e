"""T01 and T02: the reference's modes, their predicates, and the metadata of a step."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from compilespec.cli import main
from compilespec.methods.registry import METHODS, get_method
from compilespec.reference_ops.modes import NATIVE_BACKEND, PREDICATES, SpecMode, truth_table
from tests.oracles.trtllm import MTPMetadata, SpecMetadata

NAMES = (
    "MTP", "MTP_EAGLE", "MTP_EAGLE_ONE_MODEL", "EAGLE3", "EAGLE3_ONE_MODEL", "NGRAM",
    "DRAFT_TARGET", "USER_PROVIDED", "SAVE_HIDDEN_STATES", "NONE", "AUTO",
)  # fmt: skip
ONE = {"MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL"}
ENGINE = {"EAGLE3", "DRAFT_TARGET", "MTP_EAGLE"}
DRAFTER = {
    "EAGLE3", "DRAFT_TARGET", "NGRAM", "USER_PROVIDED", "MTP_EAGLE", "SAVE_HIDDEN_STATES",
}  # fmt: skip
TRUTH = {
    "is_mtp_one_model": {"MTP", "MTP_EAGLE_ONE_MODEL"},
    "is_mtp_vanilla": {"MTP"},
    "is_mtp_eagle": {"MTP_EAGLE"},
    "is_mtp_eagle_one_model": {"MTP_EAGLE_ONE_MODEL"},
    "is_eagle3": {"EAGLE3"},
    "is_eagle3_one_model": {"EAGLE3_ONE_MODEL"},
    "is_ngram": {"NGRAM"},
    "is_user_provided": {"USER_PROVIDED"},
    "is_none": {"NONE"},
    "is_draft_target": {"DRAFT_TARGET"},
    "is_save_hidden_states": {"SAVE_HIDDEN_STATES"},
    "use_one_engine": ONE,
    "without_logits": ONE,
    "support_capturable_guided_decoder": ONE,
    "needs_kv_cache_rewind": ONE | {"NGRAM"},
    "has_draft_model": ENGINE,
    "support_overlap_scheduler": ONE | ENGINE,
    "needs_kv_cache_recompute": {"EAGLE3", "MTP_EAGLE"},
    "need_load_draft_weights": {"EAGLE3_ONE_MODEL"},
    "has_spec_decoder": ONE | {"MTP_EAGLE", "EAGLE3"},
    "has_spec_drafter": DRAFTER,
    "support_guided_decoder": {"NONE"} | DRAFTER,
}


# --- T01 ---


def test_t01_order_and_names():
    assert [(mode.name, mode.value) for mode in SpecMode] == list(
        zip(NAMES, range(1, 12), strict=True)
    )
    assert SpecMode.from_string(None) is SpecMode.NONE
    for name in NAMES:
        for spelling in (name, name.lower(), name.title()):
            assert SpecMode.from_string(spelling).name == name
    for wrong in ("EAGLE", "", "mtp eagle"):
        with pytest.raises(KeyError):
            SpecMode.from_string(wrong)


def test_t01_truth_table():
    assert PREDICATES.keys() == TRUTH.keys()
    for mode in SpecMode:
        for name, modes in TRUTH.items():
            assert getattr(mode, name)() is (mode.name in modes), (mode, name)
    assert {name: {mode.name for mode in modes} for name, modes in truth_table().items()} == TRUTH


@pytest.mark.parametrize("sm", [89, 90, 100, 119, 120, 121])
@pytest.mark.parametrize("backend", [NATIVE_BACKEND, "FLASHINFER", "VANILLA"])
def test_t01_backends_and_architectures(backend, sm):
    """I4."""
    managers = (None, SimpleNamespace(is_first_draft=False), SimpleNamespace(is_first_draft=True))
    native, old = backend == NATIVE_BACKEND, sm < 120
    for mode in SpecMode:
        one = mode.name in ONE
        assert mode.extend_ctx(backend, sm=sm) is (not one and (not native or not old))
        for manager in managers:
            for is_draft in (False, True):
                for chain in (False, True):
                    first = manager is not None and manager.is_first_draft and chain
                    want = (one and old) or (not one and native and (not is_draft or first))
                    assert mode.attention_need_spec_dec_mode(
                        manager, is_draft, backend, chain, sm=sm
                    ) is bool(want)


def test_modes_are_plain_enum_members():
    assert pickle.loads(pickle.dumps(SpecMode.NGRAM)) is SpecMode.NGRAM
    assert copy.deepcopy(SpecMode.NGRAM) is SpecMode.NGRAM
    with pytest.raises(AttributeError):
        SpecMode.NGRAM.is_medusa()


def test_every_mode_has_one_method_and_spec_takes_its_name():
    owners = [method.capabilities for method in METHODS]
    served = [alias for one in owners for alias in one.aliases]
    assert set(NAMES) <= set(served)
    for mode in SpecMode:
        assert mode.method is not None
        assert get_method(mode.name.title()).capabilities.name == mode.method
    assert {SpecMode.EAGLE3.method, SpecMode.EAGLE3_ONE_MODEL.method} == {"eagle3"}


# --- T02 ---


def metadata(**changes) -> SpecMetadata:
    return SpecMetadata(
        **{
            "max_num_requests": 8,
            "max_draft_len": 3,
            "max_total_draft_tokens": 3,
            "spec_dec_mode": SpecMode.EAGLE3_ONE_MODEL,
            **changes,
        }
    )


def test_t02_defaults():
    """I5."""
    made = SpecMetadata(max_num_requests=2, max_draft_len=1, max_total_draft_tokens=1)
    assert {field.name: getattr(made, field.name) for field in dataclasses.fields(made)} == {
        "max_num_requests": 2, "max_draft_len": 1, "max_total_draft_tokens": 1,
        "num_generations": 0, "is_cuda_graph": False, "spec_dec_mode": SpecMode.NONE,
        "draft_tokens": None, "draft_lens": None, "request_ids": None, "seq_lens": None,
        "gather_ids": None, "num_accepted_draft_tokens": None, "num_tokens": 0,
        "all_rank_num_tokens": None, "all_rank_num_seqs": None, "num_extra_kv_tokens": 0,
        "num_layers": 0, "is_spec_dec_tree": False, "is_spec_dec_dynamic_tree": False,
        "allow_advanced_sampling": False, "temperatures": None, "top_ks": None, "top_ps": None,
    }  # fmt: skip


def test_t02_a_graph_copy_is_made_once_and_shares_nothing():
    """I6, H-2: the reference's copy shares every tensor that is not made anew."""
    made = metadata(
        gather_ids=torch.arange(4),
        draft_lens=[3, 3],
        num_accepted_draft_tokens=torch.ones(8, dtype=torch.int32),
    )
    made.populate_sampling([(None, True), ({"temperature": 0.5}, False)])
    copied = made.create_cuda_graph_metadata(2)
    assert copied.is_cuda_graph
    assert copied.max_num_requests == 2
    assert not made.is_cuda_graph
    assert made.max_num_requests == 8
    assert copied.create_cuda_graph_metadata(5) is copied
    for field in dataclasses.fields(made):
        mine, its = getattr(made, field.name), getattr(copied, field.name)
        if isinstance(mine, torch.Tensor | list):
            assert its is not mine
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
            assert its.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
    copied.gather_ids.fill_(99)
    copied.draft_lens.append(1)
    assert made.gather_ids.tolist() == [0, 1, 2, 3]
    assert made.draft_lens == [3, 3]


def mtp(**changes) -> MTPMetadata:
    return MTPMetadata(
        **{
            "max_num_requests": 5,
            "max_draft_len": 3,
            "max_total_draft_tokens": 3,
            "spec_dec_mode": SpecMode.MTP,
            "mtp_num_modules": 3,
            **changes,
        }
    )


def test_t02_buffers_have_the_size_of_the_bucket():
    made = mtp()
    assert made.slot_ids.shape == made.batch_indices.shape == (5,)
    assert (made.slot_ids.dtype, made.batch_indices.dtype) == (torch.int64, torch.int32)
    assert made.draft_token_indices.tolist() == [0, 1, 2]
    copied = made.create_cuda_graph_metadata(2)
    assert copied.slot_ids.shape == copied.batch_indices.shape == (2,)
    copied.slot_ids.fill_(-7)
    assert -7 not in made.slot_ids.tolist()


def test_t02_module_count_is_a_number():
    """H-7: a comma makes the reference's default the tuple (1,)."""
    assert MTPMetadata(
        max_num_requests=1, max_draft_len=1, max_total_draft_tokens=1
    ).mtp_num_modules == 1  # fmt: skip


def test_t02_prepare_may_run_twice():
    """M2, H-8: vanilla MTP drafts over K rows a decode request, not K + 1; num_tokens stays."""
    made = mtp(num_tokens=6 + 2 * 4, num_generations=2, request_ids=[4, 7, 9])
    slots = {4: 2, 7: 0, 9: 3}
    for _ in range(2):
        made.prepare(slots)
        assert made.num_tokens == 14
        assert made.num_draft_rows == 12
        assert made.slot_ids.tolist()[:3] == [2, 0, 3]
        assert made.batch_indices.tolist()[:3] == [0, 1, 2]
    eagle = mtp(
        spec_dec_mode=SpecMode.MTP_EAGLE_ONE_MODEL, num_tokens=14, num_generations=2,
        request_ids=[4, 7, 9],
    )  # fmt: skip
    eagle.prepare(slots)
    assert eagle.num_draft_rows == 14
    with pytest.raises(ValueError, match="request_ids"):
        mtp().prepare(slots)


def test_t02_later_steps_have_one_token_a_sequence():
    """M2: MTP-Eagle's steps after the first."""
    made = mtp(spec_dec_mode=SpecMode.MTP_EAGLE_ONE_MODEL, all_rank_num_seqs=[3, 5])
    assert made.subseq_all_rank_num_tokens == [3, 5]
    made.all_rank_num_seqs = [1, 2]
    assert made.subseq_all_rank_num_tokens == [1, 2]
    assert mtp(all_rank_num_seqs=[3, 5]).subseq_all_rank_num_tokens is None


# --- the table ---


def test_methods_command_fits_80_columns_and_cuts_no_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["methods"], ["methods", "--modes"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        words = set(out.replace(",", " ").split())
        if "--modes" in arguments:  # AUTO has no predicate
            assert {*PREDICATES, *NAMES} - {"AUTO"} <= words
        else:
            assert {method.capabilities.name for method in METHODS} <= words


def test_methods_command_as_json(capsys):
    assert main(["methods", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["eagle3"]["kind"] == "recycled"
    assert main(["methods", "--modes", "--json"]) == 0
    modes = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in modes] == list(NAMES)
    assert modes[3]["method"] == "eagle3"
    assert modes[3]["has_draft_model"] is True
    assert modes[3]["use_one_engine"] is False
