"""Train the demo pair that ships with the package.

    python -m tools.train_demo --part target          # hours on two cores; resumable
    python -m tools.train_demo --part eagle3          # generates text with the target first
    python -m tools.train_demo --part export --out compilespec/demo/checkpoint

Checkpoints and JSONL logs stay in --folder; a part started again resumes.  With --threads above 1
on a machine shared with other work set OMP_WAIT_POLICY=PASSIVE: threads that spin while a core is
taken made a step nearly three times slower.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from tools.demo import draft, eagle, mtp, workers
from tools.demo.corpus import encoded_splits
from tools.demo.export import export_eagle3, export_llama, export_mtp
from tools.demo.generated import generate_texts
from tools.demo.target import load_trained_target, train_target

CACHE = Path.home() / ".cache" / "compilespec-demo"
PARTS = ("target", "eagle3", "mtp", "draft", "export")
# Steps and decay steps of the released checkpoints.
SCHEDULES = {
    "target": (4000, 800),
    "eagle3": (642, 500),
    "mtp": (500, 300),
    "draft": (700, 200),
}
LEARNING_RATES = {"target": 3e-3, "eagle3": 7e-3, "mtp": 7e-3, "draft": 3e-3}


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--folder", type=Path, default=CACHE, help="checkpoints and logs")
    parser.add_argument("--steps", type=int, help="default: those of the released checkpoints")
    parser.add_argument("--decay-steps", type=int)
    parser.add_argument("--stop-at", type=int, help="stop here with a checkpoint, no decay")
    parser.add_argument("--generated", type=int, default=1024, help="sequences of each kind")
    parser.add_argument("--out", type=Path, help="where export writes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer, splits, hashes = encoded_splits(CACHE)
    print(hashes, {name: stream.numel() for name, stream in splits.items()}, flush=True)
    if args.part == "export":
        export(args.folder, tokenizer, args.out)
    else:
        workers.start(args.processes, args.threads, partial(train_part, args))


def train_part(args: argparse.Namespace) -> None:
    """Train one part in this process."""
    _, splits, _ = encoded_splits(CACHE)
    steps, decay_steps = SCHEDULES[args.part]
    options = {
        "folder": args.folder, "steps": args.steps or steps, "seed": args.seed,
        "decay_steps": args.decay_steps or decay_steps, "lr": LEARNING_RATES[args.part],
        "stop_at": args.stop_at,
    }  # fmt: skip
    if args.part == "target":
        train_target(splits, **options)
        return
    target = load_trained_target(args.folder)
    generated = generate_texts(
        target, splits, folder=args.folder / "generated", count=args.generated, seed=args.seed
    )
    part = {"eagle3": eagle.train_eagle3, "mtp": mtp.train_mtp, "draft": draft.train_draft}
    part[args.part](target, splits, generated, **options)


def export(folder: Path, tokenizer: Tokenizer, out: Path) -> None:
    """Write every trained part found in `folder`: the target at `out`, drafters below it."""
    target = load_trained_target(folder)
    export_llama(target, tokenizer, out)
    vocab_size = target.shape.vocab_size
    if (folder / "eagle3.pt").exists():
        export_eagle3(eagle.load_trained_head(folder), vocab_size, out / "eagle3")
    if (folder / "mtp.pt").exists():
        export_mtp(mtp.load_trained_modules(folder), target.shape, out / "mtp")
    if (folder / "draft.pt").exists():
        export_llama(draft.load_trained_draft(folder), tokenizer, out / "draft_model")


if __name__ == "__main__":
    main()
