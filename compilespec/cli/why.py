"""`compilespec why`: runs prompts, or reads recorded answers, and says why drafts were lost."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilespec.cli.flags import add_engine_options, add_fields, given_of
from compilespec.cli.generate import (
    SAMPLED,
    UNUSED,
    compile_engine,
    print_json,
    read_prompts,
    set_threads,
    spec_of,
)
from compilespec.errors import InvalidOption
from compilespec.runtime.sampling_params import SamplingParams

NUM_TOKENS = 128


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "why",
        help="say why drafts are lost",
        description="Compile a model and a drafter, answer prompts, and put every lost draft to a "
        "cause: a drafter that is set up wrongly, its vocabulary, near ties, places, sampling ...; "
        "with each what to do.",
    )
    add = parser.add_argument
    add_engine_options(parser, default="demo", without=UNUSED)
    add("-p", "--prompt", action="append", metavar="TEXT", help="prompt; may be repeated")
    add("--prompt-file", metavar="FILE", help="file with one prompt, '-' for stdin")
    add("--chat", action="store_true", help="each prompt is a user's message")
    add(
        "--data",
        metavar="FILE",
        help="JSON lines of prompts ({'prompt'} or {'messages'}), or of answers as `generate "
        "--json` prints them ({'prompt_token_ids', 'token_ids', 'emitted_per_step'})",
    )
    add("--limit", type=int, default=16, metavar="N", help="lines of --data (default: %(default)s)")
    add(
        "--max-new-tokens",
        type=int,
        default=NUM_TOKENS,
        metavar="N",
        help="default: %(default)s",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--plot", metavar="FILE.svg", help="draw the lost drafts by cause")
    add_fields(
        parser.add_argument_group("sampling").add_argument, SamplingParams, only=(*SAMPLED, "seed")
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, seed=args.seed, **given_of(args, SAMPLED)
    )
    asked = _asked(args)
    set_threads(args.threads)
    with compile_engine(args, spec_of(args)) as engine:
        explanation = engine.explain(asked, params)
    if args.plot is not None:
        Path(args.plot).write_text(draw(explanation.as_dict()), encoding="utf-8")
    if args.json:
        print_json(explanation.as_dict())
    else:
        print(explanation)
    return 0


def _asked(args: argparse.Namespace) -> list[Any]:
    """Prompts, or recorded answers.  Raises: InvalidOption, InvalidRequest, CheckpointError."""
    if args.data is None:
        prompts = read_prompts(args)
        if not args.chat:
            return list(prompts)
        return [{"messages": [{"role": "user", "content": one}]} for one in prompts]
    from compilespec.runtime.outputs import GenerationOutput  # which imports torch
    from compilespec.training.data import data_files
    from compilespec.training.files import read_records

    asked = []
    for file in data_files(Path(args.data)):
        asked += [_read(record, file) for _, record in read_records(file)]
    asked = asked[: args.limit]
    if len({isinstance(one, GenerationOutput) for one in asked}) != 1:
        raise InvalidOption(f"--data {args.data}: expected prompts, or answers, not both or none")
    return asked


def _read(record: Mapping[str, Any], file: Path) -> Any:
    """A line of data: an answer, messages, or a text."""
    if "emitted_per_step" in record:
        from compilespec.runtime.outputs import GenerationOutput

        return GenerationOutput(
            prompt_token_ids=list(record["prompt_token_ids"]),
            token_ids=list(record["token_ids"]),
            emitted_per_step=list(record["emitted_per_step"]),
            text=None,
            seed=record.get("seed"),
            finish_reason="length",
        )
    if "messages" in record:
        return {"messages": record["messages"]}
    if "prompt" in record:
        return record["prompt"]
    raise InvalidOption(
        f"--data {file}: expected lines of {{'prompt'}}, {{'messages'}}, or answers with "
        f"'emitted_per_step'; got the keys {', '.join(record)}"
    )


def draw(explanation: Mapping[str, Any]) -> str:
    """The picture: lost drafts by cause, faults marked."""
    from compilespec.training.plots import Bar, draw_bars

    bars = [
        Bar(
            name=one["name"],
            value=one["num_lost"],
            text=f"{one['num_lost']} ({one['share']:.0%})",
            is_marked=one["is_fault"],
        )
        for one in explanation["causes"]
    ]
    title = (
        f"{explanation['method']}, K={explanation['num_draft_tokens']}: "
        f"{explanation['num_lost']} lost drafts by cause; acceptance length "
        f"{explanation['acceptance_length']:.2f}"
    )
    return draw_bars(title, bars)
