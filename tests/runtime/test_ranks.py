"""Jobs of several processes: tokens are those of one, and what goes wrong is said by every rank."""

from __future__ import annotations

import pytest

import compilespec
from compilespec.errors import NotSupported
from tests.support.models import tiny_target
from tests.support.rank_job import (
    CASES,
    FOLDER,
    MATRIX,
    alone,
    run_job,
    save_folder,
)

FAULTS = ("other-weights", "other-options", "wrong-plan", "other-version")
WORKING = [
    name
    for name, case in CASES.items()
    if not case.fault and name not in FAULTS and case.family != FOLDER
]
CHOSEN = "llama-ngram"


@pytest.fixture(scope="module")
def small_job(tmp_path_factory):
    return run_job([CHOSEN, "other-weights"], tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return run_job([*WORKING, *FAULTS], tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def job_of_four(tmp_path_factory):
    return run_job([*MATRIX], tmp_path_factory.mktemp("ranks"), 4)


def check_tokens(name: str, results: list[dict[str, object]], size: int) -> None:
    expected, (lead, *others) = alone(name), results
    assert others == [{"followed": True}] * (size - 1), others
    assert lead.get("tokens") == expected["tokens"], lead
    assert lead["emitted"] == expected["emitted"]
    assert lead["recompiles"] == 0


def test_a_small_job_gives_the_tokens_of_one_process(small_job):
    check_tokens(CHOSEN, small_job[CHOSEN], 2)
    assert small_job[CHOSEN][0]["cache_mib"] == alone(CHOSEN)["cache_mib"] / 2


def test_a_rank_of_a_checkpoint_has_memory_for_its_parts(tmp_path):
    """The first case loads what every engine needs; then only weights and caches are of a size."""
    save_folder(tmp_path)
    lead, *_ = run_job(["llama-none", FOLDER], tmp_path)[FOLDER]
    expected = alone(FOLDER, tmp_path)
    assert lead["tokens"] == expected["tokens"]
    assert lead["weights_mib"] == pytest.approx(expected["weights_mib"] / 2, abs=0.1)
    assert lead["cache_mib"] == expected["cache_mib"] / 2
    assert lead["peak_mib"] < 0.9 * expected["weights_mib"]


def test_other_weights_are_said_by_every_rank(small_job):
    for said in small_job["other-weights"]:
        assert said["error"] == "RanksDiffer"
        assert said["says"].startswith("rank 1 has other weights than rank 0:")


@pytest.mark.parametrize("name", WORKING)
def test_two_ranks_give_the_tokens_of_one_process(job, name):
    check_tokens(name, job[name], 2)


@pytest.mark.parametrize(
    ("name", "sums", "choices"),
    [
        ("llama-none", 5, 1),
        ("llama-ngram", 5, 1),
        ("llama-draft_model", 5, 1),
        ("llama-eagle3", 7 + 2, 1),  # three layers; a draft needs the target's embedding
        ("llama-mtp", 5 + 2, 1 + 2),  # and its head
        ("olmo2-none", 3, 1),  # attention is whole: a norm over all its heads
    ],
)
def test_two_sums_a_layer_and_what_a_rank_holds(job, name, sums, choices):
    lead, expected = job[name][0], alone(name)
    assert lead["collectives"] == {"all_reduce": sums, "argmax_shard": choices}
    is_cut = not name.startswith("olmo2")
    if name.endswith(("none", "ngram")):  # a drafter is whole
        assert lead["cache_mib"] == expected["cache_mib"] / (2 if is_cut else 1)
        if is_cut:
            assert lead["weights_mib"] == pytest.approx(expected["weights_mib"] / 2, rel=0.03)


@pytest.mark.parametrize("name", MATRIX)
def test_four_ranks_give_the_tokens_of_one_process(job_of_four, name):
    """Of two heads of keys each is on two ranks; attention of phi3 and olmo2 stays whole."""
    check_tokens(name, job_of_four[name], 4)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (
            "other-options",
            "RanksDiffer",
            "rank 1 has other max_batch_size= than rank 0: 2, expected 3",
        ),
        ("wrong-plan", "InvalidOption", "down_proj"),
        ("other-version", "RanksDiffer", "rank 1 has other version of compilespec than rank 0:"),
    ],
)
def test_faults_are_said_by_every_rank(job, name, error, says):
    for said in job[name]:
        assert said["error"] == error
        assert says in said["says"]


def test_without_a_job_the_way_to_start_one_is_said():
    with pytest.raises(NotSupported, match="torchrun --nproc-per-node 2"):
        compilespec.compile(tiny_target("llama", num_layers=1), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("spec", "keywords"),
    [
        ("auto", {}), ("save_hidden_states", {}), ("self", {}), ("none", {"host_processors": True}),
        ("none", {"prompt_logprobs": True}),
    ],
)  # fmt: skip
def test_what_is_not_built_for_ranks_is_refused(spec, keywords):
    with pytest.raises(NotSupported, match="is not built for tensor_parallel_size=2"):
        compilespec.compile(
            tiny_target("llama", num_layers=1), spec, tensor_parallel_size=2, **keywords
        )
