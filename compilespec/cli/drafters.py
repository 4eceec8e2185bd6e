"""`compilespec drafters`: the drafters that fit a model, those beside it and published ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compilespec.cli.flags import add_model_option
from compilespec.cli.methods import draft_rows, print_lines
from compilespec.errors import SpecError

SHOWN = ("method", "draft", "layout", "license", "acceptance", "note")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "drafters",
        help="list the drafters that fit a model",
        description="The drafters that fit MODEL: those beside it or in its files, published ones "
        "by its name, and methods that need none.  Nothing is downloaded.  docs/drafters.md lists "
        "all published ones, `compilespec methods` what each method brings.",
    )
    add_model_option(parser, default=None)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list instead of a table"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = list(fitting(args.model))
    if args.json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return 0
    shown = [tuple(row[name] for name in SHOWN) for row in rows]
    print_lines([SHOWN, *shown])
    return 0


def fitting(model: str) -> Iterator[dict[str, str]]:
    """A row for each drafter that fits; no acceptance is known of local ones."""
    from compilespec.methods.published import published_for
    from compilespec.methods.registry import METHODS

    built = {one.capabilities.name for one in METHODS}
    yield from _local(model)
    name = model if not Path(model).exists() else Path(model).resolve().name
    for row in published_for(name):
        note = "" if row.method in built else "no method of this name is built yet"
        yield dataclasses.asdict(row) | {"note": note}
    for one in (method.capabilities for method in METHODS):
        if one.needs == "nothing" and one.drafts_in_step and not one.chooses:
            yield _row(model, one.name, "(none needed)", one.brings)


def _local(model: str) -> Iterator[dict[str, str]]:
    """Drafters in the folders where `compile` looks first, and in the model's own files."""
    from compilespec.demo import demo_directory
    from compilespec.methods.registry import METHODS
    from compilespec.tracing.checkpoint_files import drop_mtp, tensor_names

    place = Path(demo_directory()) if model == "demo" else Path(model)
    if not (place / "config.json").is_file():
        return
    try:
        names = tensor_names(place)
    except SpecError:  # no weights here: nothing is inside them
        names = []
    has_mtp = len(drop_mtp(names)) < len(names)
    for one in (method.capabilities for method in METHODS):
        folders = (
            [place / name for name in (one.name, *one.folders)] if one.needs_draft_weights else []
        )
        found = [folder for folder in folders if (folder / "config.json").is_file()]
        for folder in found[:1]:
            yield _row(model, one.name, str(folder), "beside the model")
        if one.inside_target and has_mtp and not found:
            yield _row(model, one.name, str(place), "in the model's own files")


def _row(target: str, method: str, draft: str, note: str) -> dict[str, str]:
    known = {"target": target, "method": method, "draft": draft, "note": note}
    return dict.fromkeys(draft_rows()[0], "") | known
