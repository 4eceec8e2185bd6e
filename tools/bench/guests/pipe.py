"""The engine's side: JSON lines on stdin, answers on what was stdout.

Run as a script's neighbour, by an interpreter that may not have compilespec.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def serve(start: Callable[[dict[str, Any]], Generate]) -> None:
    """Start an engine with the first line's values, then answer prompts until stdin ends.

    All output of the engine goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = start(json.loads(sys.stdin.readline()))
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = generate(asked["prompts"], asked["max_new_tokens"])
        answers.write(json.dumps({"tokens": tokens}) + "\n")
