"""The documents: their links, README's length, and figures against what they are figures of.

Figures that need a trace of the demo are in test_cli_dump.py, the planted faults in test_faults.py.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compilespec.cli import build_parser
from compilespec.methods.registry import METHODS, method_names
from tests.support.documents import PAGES, ROOT, paragraph, table_under
from tests.support.models import FAMILIES, HYBRIDS
from tools import draw_speed, test_versions

RESULTS = ROOT / "tools" / "bench" / "results"
LAB = tuple(page for page in PAGES if page.startswith("docs/lab/"))
DECISIONS = tuple(page for page in PAGES if page.startswith("docs/decisions/"))
HISTORY = ("CHANGELOG.md", *LAB)  # speak of what was
# Flags of other programs, and of tools.
OTHERS = {"--nproc-per-node", "--head", "--local-dir", "--serving", "--tasks", "--tiny",
          "--guest-python", "--openvino-python", "--real", "--first-token", "--only",
          "--cold-repeats"}  # fmt: skip
VLLM = {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization",
        "--speculative-config", "--tool-call-parser", "--enable-auto-tool-choice",
        "--enforce-eager"}  # fmt: skip


# --- the documents as a whole ---


def _slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _slugs(text: str) -> set[str]:
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def _links(page: str) -> Iterator[tuple[Path, str]]:
    """Files that a page links to, and the anchor in each."""
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield ((ROOT / page).parent / name).resolve() if name else ROOT / page, anchor


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for path, anchor in _links(page):
        assert path.exists(), path
        if anchor:
            assert anchor in _slugs(path.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_every_page_is_listed() -> None:
    listed = {path for path, _ in _links("docs/README.md")}
    pages = {ROOT / page for page in PAGES if page not in ("README.md", "docs/README.md")}
    assert pages <= listed


@pytest.mark.parametrize("page", DECISIONS)
def test_decisions_are_short(page: str) -> None:
    for entry in PAGES[page].split("\n## ")[1:]:
        assert len(entry.rstrip().splitlines()) <= 12, entry.partition("\n")[0]
    assert sum(len(PAGES[one].split()) for one in DECISIONS) <= 8000


def test_the_matrix_of_versions_is_that_of_the_recorded_run() -> None:
    """Every row's tests pass, and its tokens are those of every other row."""
    results = json.loads(test_versions.RESULTS.read_text(encoding="utf-8"))
    assert set(results) == {row.name for row in test_versions.ROWS}
    for one in results.values():
        assert one["tests"]["passed"] > 0
        assert not {"failed", "error"} & set(one["tests"])
        assert one["same_when_warm"]
    assert len({json.dumps(one["tokens"]) for one in results.values()}) == 1
    assert test_versions.matrix(results) in PAGES["docs/use.md"]


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 100


def test_readme_begins_with_the_figures_of_the_recorded_run() -> None:
    speeds = _result("real.json")["speeds"]["1"]
    times = speeds["compilespec eagle3 K=3, draft in int8_dynamic"]["times"]
    text = " ".join(PAGES["README.md"].split())
    assert f"{times['llama.cpp']:.1f} times as fast as under llama.cpp" in text
    assert f"{times['compilespec none']:.1f} times as fast as it decodes plainly" in text
    others = _result("real-avx2.json")["speeds"]["1"]
    gain = others["compilespec eagle3 K=3, draft in int8_dynamic"]["times"]["compilespec none"]
    assert f"it is {gain:.2f} times on a CPU with AVX2 alone" in text


def _options(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= _options(command)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_every_option_and_file_exists(page: str) -> None:
    text = PAGES[page]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named <= _options(build_parser()) | OTHERS | VLLM
    kept = re.sub(r"^```console\n.*?^```$|^`[\w./]+`:$", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"\b(?:compilespec|tests|tools|docs|examples)/[\w/.-]+\.\w+", kept):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_every_name_in_the_package_is_there(page: str) -> None:
    for name in re.findall(r"`(compilespec(?:\.\w+)+)\b", PAGES[page]):
        pkgutil.resolve_name(name)


def test_the_loss_of_the_head_is_that_of_the_recorded_run() -> None:
    rows = {row[0]: row[1:] for row in table_under("docs/why.md", "prompts | acceptance length")}
    result = _result("why-smollm2.json")
    for label, row in rows.items():
        known = result[label]
        share = {one["name"]: one["share"] for one in known["causes"]}
        names = ("drafter", "draft_vocabulary", "near_tie", "later_places")
        wanted = [f"{known['acceptance_length']:.2f}"]
        wanted += [f"{rate:.0%}" for rate in known["acceptance_rate_by_place"]]
        assert row == [*wanted, *(f"{share[name]:.0%}" for name in names)], label


# --- methods and models ---


def test_every_method_has_a_row() -> None:
    names = [re.sub(r'[`"]', "", row[0]) for row in table_under("docs/methods.md", "`spec=`")]
    assert names == list(method_names())


def test_every_option_of_a_method_has_a_row() -> None:
    rows = table_under("docs/methods.md", "method | option")
    named = {
        (method, option)
        for row in rows
        for method in re.findall(r"`(\w+)`", row[0])
        for option in re.findall(r"(\w+)=", row[1])
    }
    known = {
        (method.capabilities.name, option)
        for method in METHODS
        for option in method.capabilities.options or ()
    }
    assert named == known


def test_every_family_is_named() -> None:
    named = PAGES["docs/methods.md"].partition("## Targets")[2]
    assert {*FAMILIES, *HYBRIDS} <= set(re.findall(r"\w+", named))
    kinds = f"all {len(FAMILIES) + 1} kinds of models"  # and the plain module
    assert kinds in PAGES["docs/exactness.md"]


def test_every_environment_variable_has_a_row() -> None:
    named = {
        name
        for row in table_under("docs/tuning.md", "variable")
        for name in re.findall(r"[A-Z][A-Z_]+", row[0])
    }
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "compilespec").rglob("*.py")
    )
    assert set(re.findall(r"\b(?:COMPILESPEC|TLLM)_[A-Z_]+", sources)) <= named


# --- speed ---


@pytest.mark.parametrize("chart", draw_speed.CHARTS, ids=lambda chart: chart.name)
def test_the_picture_is_that_of_the_recorded_run(chart: draw_speed.Chart) -> None:
    recorded = json.loads(chart.results.read_text(encoding="utf-8"))
    assert chart.picture.read_text(encoding="utf-8") == draw_speed.draw(recorded, chart)


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_speeds_are_those_of_the_recorded_run() -> None:
    speeds = _result("speed.json")["speeds"]
    names = {
        "transformers `generate`, eager": "transformers eager",
        "transformers, static cache, compiled": "transformers static compiled",
        "transformers, prompt lookup K=10": "transformers prompt lookup K=10",
        'compilespec, `spec="none"`': "compilespec none",
        'compilespec, `spec="eagle3"`, K=1': "compilespec eagle3 K=1",
        'compilespec, `spec="eagle3"`, K=3': "compilespec eagle3 K=3",
    }
    for title, *cells in table_under("docs/benchmarks.md", "way"):
        way = names.pop(title)
        expected = []
        for batch in ("1", "8"):
            median = speeds[batch].get(way, {}).get("tokens_per_s", {}).get("p50")
            base = speeds[batch]["transformers eager"]["tokens_per_s"]["p50"]
            expected += [f"{median:.0f}", f"{median / base:.1f}"] if median else ["", ""]
        length = speeds["1"][way].get("acceptance_length")
        assert cells[:4] == expected, title
        assert cells[4] == ("" if length is None else f"{length:.2f}".removesuffix(".00"))
    assert not names


@pytest.mark.parametrize(
    ("result", "first_column"),
    [
        ("real.json", "way of decoding"),
        ("real-avx512.json", "way without bfloat16 instructions"),
        ("real-avx2.json", "way with AVX2 alone"),
    ],
)
def test_speeds_of_the_real_model_are_those_of_the_recorded_run(
    result: str, first_column: str
) -> None:
    recorded = _result(result)
    rows = table_under("docs/benchmarks.md", first_column)
    assert len(rows) > 10
    for way, *cells in rows:
        found = [recorded["speeds"][batch].get(way) for batch in ("1", "8")]
        expected = [f"{one['tokens_per_s']['p50']:.0f}" if one else "" for one in found]
        expected.insert(1, f"{found[0]['decode_tokens_per_s']['p50']:.0f}")
        length = found[0].get("acceptance_length") if "eagle3" in way else None
        expected.append(f"{length:.2f}" if length else "")
        assert cells == [*expected, f"{recorded['prefill'][way]['tokens_per_s']:.0f}"], way


def test_first_tokens_are_those_of_the_recorded_run() -> None:
    specs = _result("first-token.json")["specs"]
    text = paragraph("docs/benchmarks.md", "Seconds from process start")
    numbers = [int(number) for number in re.findall(r"(?<!\w)\d+(?!\w)", text)]
    assert numbers == [
        round(specs[spec][f"{start}_first_token_s"])
        for spec in ("eagle3", "none")
        for start in ("cold", "warm")
    ]


def test_how_steps_grow_is_that_of_the_recorded_run() -> None:
    recorded, expected = _result("growth.json")["rows"], list[list[str]]()
    for row in recorded:
        if (row["batch"], row["context"]) == (1, 256):  # contexts begin, or batches
            first = row["step_ms"]
        cells = [f"{ms:.1f} ({ms / first[way]:.2f})" for way, ms in row["step_ms"].items()]
        expected.append([str(row["batch"]), str(row["context"]), *cells])
    assert table_under("docs/benchmarks.md", "batch | context | compilespec") == expected


def test_speeds_of_each_level_are_those_of_the_recorded_run() -> None:
    recorded = _result("levels.json")["rows"]
    assert all(row["independent"] for row in recorded)
    assert table_under("docs/benchmarks.md", "weights | level")[: len(recorded)] == [
        [
            "bfloat16" if row["weights"] == "bf16" else f"`{row['weights']}`",
            f"`{row['level']}`",
            *(f"{speed:,.0f}" for speed in row["tokens_per_s"].values()),
        ]
        for row in recorded
    ]


def test_shares_of_the_chosen_k_are_those_of_the_recorded_run() -> None:
    shares: dict[str, dict[int, list[str]]] = {}
    for case in _result("adaptive-zen5.json")["cases"]:
        by_batch = shares.setdefault(f"`{case['method']}`", {})
        by_batch.setdefault(case["batch"], []).append(f"{case['share_of_best']:.2f}")
    expected = [
        [method, *(", ".join(found) for found in by_batch.values())]
        for method, by_batch in shares.items()
    ]
    assert table_under("docs/benchmarks.md", "method, the demo") == expected


def test_what_http_costs_is_that_of_the_recorded_runs() -> None:
    told = dict(table_under("docs/serving.md", "what | figure"))
    for spec, title in (
        ("none", "tokens a second that HTTP loses against the engine's thread, plain decoding"),
        ("eagle3", "EAGLE-3"),
    ):
        ways = _result("serving.json")["specs"][spec]["ways"]
        whole, streams = ways["whole"]["loss"], ways["streams"]["loss"]
        assert told[title] == f"whole answers {whole:.0%}, streams {streams:.0%}"
    loads = _result("serving-loads.json")["tools"]
    for tool, title in (
        ("guidellm", "guidellm, 8 streams, 64 prompts of 64 tokens, EAGLE-3"),
        ("aiperf", "aiperf, the same"),
    ):
        found = loads[tool]
        assert told[title] == (
            f"{found['output_tokens_per_s']:,.0f} tokens/s, first token after "
            f"{found['first_token_ms']:.0f} ms, {found['between_tokens_ms']:.1f} ms between tokens"
        )
