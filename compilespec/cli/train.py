"""`compilespec train`: a drafter for a model, from data to a checkpoint that `--draft` takes."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from compilespec.cli.generate import print_json, set_threads

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
    add("--max-minutes", type=float, metavar="M", help="of training, resumed runs included")
    add("--steps", type=int, metavar="N", help="of the whole run")
    add("--layout", choices=("safeailab", "speculators"), help="default: safeailab")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--json", action="store_true", help="print one JSON object at the end")
    add_learning_options(parser.add_argument_group("learning").add_argument)
    parser.set_defaults(run=run)


def add_learning_options(add: Callable[..., Any]) -> None:
    """The flags of `TrainOptions` that few need."""
    add("--learning-rate", type=float, metavar="R", help="the highest (default: 0.005)")
    add("--warmup-steps", type=int, metavar="N", help="in which the rate rises (default: 30)")
    add("--decay-share", type=float, metavar="P", help="of the run, to fall in (default: 0.25)")
    add("--batch-tokens", type=int, metavar="N", help="tokens of a step (default: 4096)")
    add("--max-length", type=int, metavar="N", help="tokens of a sequence (default: 1024)")
    add("--depth", type=int, metavar="N", help="draft steps that are trained (default: 3)")
    add(
        "--draft-vocab-size", type=int, metavar="N", help="rows of the head (default: 8192, or all)"
    )
    add("--intermediate-size", type=int, metavar="N", help="of the head's MLP (default: target's)")
    add("--num-draft-tokens", type=int, metavar="K", help="of the measurements (default: 3)")
    add("--held-out-one-in", type=int, metavar="N", help="sequences kept to measure (default: 20)")
    add("--eval-every", type=int, metavar="N", help="steps between measurements (default: 200)")
    add("--eval-prompts", type=int, metavar="N", help="of a measurement (default: 16)")
    add("--eval-new-tokens", type=int, metavar="N", help="of each answer (default: 96)")
    add("--backend", choices=("inductor", "eager"), help="default: inductor")
    add("--patience", type=int, metavar="N", help="measurements without gain (default: 6)")
    add("--save-every", type=int, metavar="N", help="steps between saved states (default: 50)")
    add("--dtype", metavar="NAME", help="of the target while training (default on CPUs: float32)")
    add("--start-from", metavar="DIR", help="a drafter's checkpoint to begin with")
    add("--learn-prompts", action="store_true", help="learn from the prompts' tokens too")
    add("--keep-states", action="store_true", help="keep the target's hidden states on disk")
    add("--compiled", action="store_true", help="forward and backward through torch.compile")
    add("--mixed-precision", action="store_true", help="the drafter's products in bfloat16")
    add("--seed", type=int, metavar="N", help="default: 0")


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
    from compilespec.training.options import TrainOptions

    names = [field.name for field in dataclasses.fields(TrainOptions)]
    given = {name: getattr(args, name, None) for name in names}
    options = TrainOptions(**{name: value for name, value in given.items() if value is not None})
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
