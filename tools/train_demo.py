"""Train the demo pair that ships with the package.

    python -m tools.train_demo --part target          # hours on two cores; resumable
    python -m tools.train_demo --part text            # what the drafters learn from
    python -m tools.train_demo --part eagle3          # also mtp, draft_model
    python -m tools.train_demo --part export --out compilespec/demo/checkpoint

Checkpoints and logs stay in --folder; a part started again resumes.  On a machine shared with other
work set OMP_WAIT_POLICY=PASSIVE: threads that spin while a core is taken made a step nearly three
times slower.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from compilespec.cli.train_progress import Shown
from tools.demo.corpus import encoded_splits
from tools.demo.drafters import OPTIONS, options_of, train_drafter, write_text
from tools.demo.target import Run, export_target, train_target

CACHE = Path.home() / ".cache" / "compilespec-demo"
PARTS = ("target", "text", *OPTIONS, "export")
# Steps, decay steps and learning rate of the released target.
TARGET = (4000, 800, 3e-3)


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--folder", type=Path, default=CACHE, help="checkpoints and logs")
    parser.add_argument("--steps", type=int, help="default: those of the released checkpoints")
    parser.add_argument("--decay-steps", type=int, help="of the target")
    parser.add_argument("--count", type=int, default=4096, help="windows, and texts written")
    parser.add_argument("--out", type=Path, help="where export writes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.part == "target":
        tokenizer, splits, _ = encoded_splits(CACHE)
        steps, decay_steps, learning_rate = TARGET
        run = Run(
            folder=args.folder, steps=args.steps or steps, learning_rate=learning_rate,
            decay_steps=args.decay_steps or decay_steps, seed=args.seed,
        )  # fmt: skip
        export_target(train_target(run, splits, tokenizer), tokenizer, target_of(args.folder))
    elif args.part == "text":
        _, splits, hashes = encoded_splits(CACHE)
        print(hashes, flush=True)
        write_text(
            target_of(args.folder), splits, args.folder / "text", count=args.count, seed=args.seed
        )
    elif args.part == "export":
        export(args.folder, args.out)
    else:
        changes = {"steps": args.steps} if args.steps else {}
        with Shown(options_of(args.part, seed=args.seed, **changes)) as shown:
            train_drafter(
                args.part, target_of(args.folder), args.folder / "text", args.folder / args.part,
                listener=shown, seed=args.seed, **changes,
            )  # fmt: skip


def target_of(folder: Path) -> Path:
    """Where the exported target lies."""
    return folder / "checkpoint"


def export(folder: Path, out: Path) -> None:
    """Copy every trained part found in `folder`: the target to `out`, drafters below it."""
    shutil.copytree(target_of(folder), out, dirs_exist_ok=True)
    for part in OPTIONS:
        if (folder / part / "config.json").exists():
            keep = shutil.ignore_patterns("training", "README.md")
            shutil.copytree(folder / part, out / part, ignore=keep, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
