"""`compilespec train`: a drafter for a model, from data to a checkpoint that `--draft` takes."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import sys
from typing import Any

from compilespec.cli.flags import add_fields, given_of
from compilespec.cli.generate import print_json, set_threads
from compilespec.training.options import TrainOptions

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of <malloc.h>


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a drafter for a model",
        description="Train a drafter on documents, conversations, or texts that the model itself "
        "writes (--generate).  The folder holds the best drafter so far; an interrupted run goes "
        "on with --resume.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR|NAME", help="the target")
    add("--data", required=True, metavar="FILE|DIR", help="JSON lines (.jsonl) or text (.txt)")
    add("--output", required=True, metavar="DIR", help="where the drafter goes")
    add("--method", default="eagle3", help="eagle3 (default), mtp, mtp_eagle or draft_model")
    add(
        "--generate",
        action="store_true",
        help="the data is prompts, which the model answers first",
    )
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    add(
        "--temperature",
        type=temperatures,
        default=(0.0,),
        metavar="T",
        help="of the answers; several, as in 0,0,0.7, are shared out (default: 0)",
    )
    add(
        "--no-chat-template",
        action="store_true",
        help="continue prompts that are bare texts (default: a chat model answers them)",
    )
    add("--resume", action="store_true", help="go on with the run in --output, if there is one")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--json", action="store_true", help="print one JSON object at the end")
    add_fields(parser.add_argument_group("learning").add_argument, TrainOptions)
    parser.set_defaults(run=run)


def temperatures(text: str) -> tuple[float, ...]:
    """`0`, or `0,0,0.7`.  Raises: ArgumentTypeError, which argparse reports."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or several; got {text!r}") from None


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step: mapping arrays of a hundred megabytes anew
    for every operation took a third of a step, in page faults.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:  # musl, macOS
        return
    change(M_MMAP_MAX, 0)
    change(M_TRIM_THRESHOLD, 2**31 - 1)
    change(M_TOP_PAD, 2**28)


def run(args: argparse.Namespace) -> int:
    from compilespec.cli.train_progress import Shown
    from compilespec.training.entry import train

    options = TrainOptions(**given_of(args, [one.name for one in dataclasses.fields(TrainOptions)]))
    set_threads(args.threads)
    keep_freed_memory()
    with Shown(options) as shown:
        result = train(
            args.model,
            args.data,
            args.output,
            method=args.method,
            generate=args.generate,
            max_new_tokens=args.max_new_tokens,
            temperatures=args.temperature,
            chat_template=not args.no_chat_template,
            resume=args.resume,
            listener=shown,
            options=options,
        )
    if args.json:
        print_json(
            {
                "output": str(result.output),
                "num_steps": result.num_steps,
                "acceptance": result.acceptance or None,
                "last": result.last.as_json() if result.last else None,
            }
        )
    else:
        found = f"acceptance length {result.acceptance:.2f} at K = {options.num_draft_tokens}"
        none = f"acceptance not measured yet (every {options.eval_every} steps, and at the end)"
        print(
            f"{result.output}: {result.num_steps} steps, {found if result.acceptance else none}",
            file=sys.stderr,
        )
    if result.interrupted:
        raise KeyboardInterrupt  # the state is saved, and --resume goes on
    return 0
