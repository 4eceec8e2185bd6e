"""A guide is compiled in another process first, where compiling could take any time.

llguidance counts the expressions that a lexer makes ("fuel").  It does not count what deciding
takes whether two patterns have a text in common, and that cannot be stopped within a process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

MAX_CPU_S = 3
MAX_BYTES = 2 << 30
# What makes llguidance intersect patterns or negate them, as its form of a grammar says it: keys of
# a schema, and operators of its dialect of Lark.  Without them, fuel bounds the work.
UNBOUNDED = ('"allOf"', '"pattern"', '"patternProperties"', '"format"', "&", "~")


def why_too_much(grammar: str, max_expressions: int) -> str | None:
    """Why a grammar is refused: the limit that compiling it ran into; None where there is none.

    Args: grammar: in llguidance's own form, JSON.
    """
    if not any(word in grammar for word in UNBOUNDED):
        return None
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(max_expressions)]
    try:
        child = subprocess.run(command, input=grammar, text=True, capture_output=True, check=False)
    except OSError as error:
        return f"no process to try it in can be started ({error})"
    if child.returncode >= 0:  # what the guide itself lacks, compiling it here says again
        return None
    return f"compiling it takes more than {MAX_CPU_S} s or {MAX_BYTES >> 20} MiB"


def _try() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance  # type: ignore[import-not-found, import-untyped, unused-ignore]

    limits = llguidance.LLParserLimits(initial_lexer_fuel=int(sys.argv[1]), verbose_errors=False)
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, sys.stdin.read(), log_level=0, limits=limits)
    matcher.compute_bitmask()


if __name__ == "__main__":
    _try()
