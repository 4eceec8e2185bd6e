"""`python -m tests.fuzz`: exit code 0 where every round held, 1 at the first that did not."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import secrets
import sys

import torch

from tests.fuzz.plan import draw_plan
from tests.fuzz.run import NUM_ORDERS, ROUND_SECONDS, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of all rounds; drawn if not given")
    parser.add_argument("--round", type=int, default=None, help="play this round alone")
    parser.add_argument("--requests", type=int, default=NUM_ORDERS, help="of each half of a round")
    parser.add_argument("--minutes", type=float, default=3.0, help="begin no round after this many")
    parser.add_argument(
        "--families", nargs="+", metavar="FAMILY", help="play rounds of these alone"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    numbers = itertools.count() if asked.round is None else iter([asked.round])
    if asked.families:
        numbers = (n for n in numbers if draw_plan(seed, n, 1).family in asked.families)
    limit = 60 * asked.minutes + 2 * ROUND_SECONDS
    faulthandler.dump_traceback_later(limit, exit=True)  # where not even the watchdog gets through
    tally = fuzz(
        seed, numbers, minutes=asked.minutes, num_orders=asked.requests, goes_on=asked.keep_going
    )
    for name, count in sorted(tally.met.items()):
        print(f"{count:8d}  {name}")
    print(f"{tally.num_rounds} rounds, failed: {tally.failed or 'none'}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a hung engine's thread must not keep the process
