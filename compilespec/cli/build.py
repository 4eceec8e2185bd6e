"""`compilespec build`: a compiled model in one file, which starts without a compiler."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compilespec.cli import report
from compilespec.cli.flags import add_engine_options, compile_keywords
from compilespec.cli.generate import DEMO, print_json, set_threads, spec_of
from compilespec.errors import InvalidOption

UNUSED = ("backend", "tensor_parallel_size", "draft_tensor_parallel_size", "prefix_dir")
PROMPT = (1, 2, 3, 5, 8)
NUM_TOKENS = 24
CHECK = """
import json, sys, time
started = time.perf_counter()
import compilespec
engine = compilespec.load(sys.argv[1], trust=True, progress=False)
seconds = time.perf_counter() - started
prompt, params = json.loads(sys.argv[2]), compilespec.SamplingParams(**json.loads(sys.argv[3]))
output = engine.generate([prompt], params)[0]
compiled = [name for name, one in engine.plan()["compile"].items() if not one["from_cache"]]
print(json.dumps({"seconds": seconds, "tokens": output.token_ids, "compiled": compiled}))
"""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "build",
        help="write a compiled model to one file",
        description="Compile a model and a drafter as compile() would, and write one file with the "
        "checkpoints and all that was compiled.  compilespec.load(FILE, trust=True) starts it on "
        "machines with these versions of torch, Python and compilespec and this CPU's features, "
        "without a compiler.  The file is then started once in another process, without caches, "
        "and its tokens are compared.",
    )
    add_engine_options(parser, default=DEMO, without=UNUSED)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.cspec", help="the file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.ops import _build
    from compilespec.ops._levels import VARIABLE
    from compilespec.pipeline.one_file import kernel_level

    output = Path(args.output)
    if output.suffix != ".cspec" or not output.resolve().parent.is_dir():
        raise InvalidOption(f"--output: expected FILE.cspec in a folder that exists; got {output}")
    set_threads(args.threads)
    spec = spec_of(args)
    given = compile_keywords(args, spec)
    own = _build.cache_directory()
    own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=own, prefix="build-") as folder:
        cache = Path(folder) / "cache"
        if level := kernel_level():
            os.environ[VARIABLE] = level
        os.environ[_build.CACHE_VARIABLE] = str(cache)
        kernels = own / "kernels" / _build.library_path().name
        if kernels.is_file():
            (cache / "kernels").mkdir(parents=True)
            shutil.copyfile(kernels, _build.library_path())
        started = time.perf_counter()
        _write(output, args, spec, given, cache)
        built_s = time.perf_counter() - started
        told = _check(output, Path(folder) / "check")
    result = {
        "file": str(output), "mib": output.stat().st_size / 2**20, "build_s": built_s,
        "start_s": told["seconds"], "tokens": len(told["tokens"]),
    }  # fmt: skip
    if args.json:
        print_json(result)
    else:
        print(
            f"{output}: {result['mib']:.0f} MiB, built in {built_s:.0f} s; started without caches "
            f"or a compiler in {result['start_s']:.1f} s, {result['tokens']} tokens equal"
        )
    return 0


def _write(
    output: Path, args: argparse.Namespace, spec: str, given: dict[str, Any], cache: Path
) -> None:
    import compilespec
    from compilespec.pipeline.one_file import write

    with report.starting(f"{args.model} (spec={spec})", quiet=args.json) as progress:
        engine = compilespec.compile(args.model, spec, progress=progress, **given)
    with engine:
        params = compilespec.SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        tokens = engine.generate([list(PROMPT)], params)[0].token_ids
        write(output, args.model, spec, given, cache=cache, engine=engine, prompt=PROMPT,
              tokens=tuple(tokens))  # fmt: skip


def _check(output: Path, cache: Path) -> dict[str, Any]:
    """Start the file where neither caches nor a compiler are.  Raises: InvalidOption where it does
    not start there, compiles something, or gives other tokens.
    """
    from compilespec.ops._build import CACHE_VARIABLE
    from compilespec.pipeline.one_file import read_manifest

    manifest = read_manifest(output)
    alone = {CACHE_VARIABLE: str(cache), "PATH": "", "CXX": "no-compiler"}
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    command = [sys.executable, "-c", CHECK, str(output), json.dumps(manifest.prompt),
               json.dumps(params)]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **alone}, capture_output=True, text=True, check=False
    )
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode:
        raise InvalidOption(f"{output} does not start by itself: {said}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if told["compiled"]:
        raise InvalidOption(f"{output} lacks compiled steps: {', '.join(told['compiled'])}")
    if tuple(told["tokens"]) != manifest.tokens:
        raise InvalidOption(f"{output} gave other tokens in a second process; please report it")
    return told
