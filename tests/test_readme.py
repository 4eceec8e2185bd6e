"""README's figures against what they are figures of.  Those that need a trace of the demo are in
test_cli_dump.py, the planted faults in test_faults.py."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from compilespec.cli import build_parser
from compilespec.methods import method_names
from tests.models import FAMILIES
from tests.readme import README, table_under

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "bench" / "results"


def test_every_method_has_a_row() -> None:
    names = [re.sub(r'[`"]', "", row[0]) for row in table_under("`spec=`")]
    assert names == list(method_names())


def _options(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= _options(command)
    return found


def test_every_option_and_file_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= _options(build_parser())
    for name in re.findall(r"\b(?:tests|tools|docs)/[\w/.-]+\.\w+", README):
        assert (ROOT / name).exists(), name


def test_every_family_is_named() -> None:
    paragraph = README[README.index("- Any transformers causal LM") :].split("\n- ")[0]
    words = set(re.findall(r"\w+", paragraph))
    assert set(FAMILIES) <= words
    assert f"all {len(FAMILIES) + 1} kinds of models" in README  # and the plain module


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
    for title, *cells in table_under("way"):
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


def test_first_tokens_are_those_of_the_recorded_run() -> None:
    specs = _result("first-token.json")["specs"]
    paragraph = README[README.index("Seconds from process start") :].split("\n\n")[0]
    numbers = [int(number) for number in re.findall(r"(?<!\w)\d+(?!\w)", paragraph)]
    assert numbers == [
        round(specs[spec][f"{start}_first_token_s"])
        for spec in ("eagle3", "none")
        for start in ("cold", "warm")
    ]
