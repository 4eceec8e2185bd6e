"""`compilespec generate`: streams text for prompts, or compares ways of decoding in a table."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilespec.cli import report
from compilespec.cli.flags import (
    add_engine_options,
    add_fields,
    compile_keywords,
    given_of,
    in_flags,
    may_draft,
)
from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compilespec.runtime.engine import Engine
    from compilespec.tracing.load import Target

DEMO = "demo"
DEMO_PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
)
NUM_ROUNDS = 3  # timed rounds of --compare
PLAIN = "compilespec plain"
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
UNUSED = ("prompt_logprobs", "max_adapters", "max_adapter_rank")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Compile a model (and a drafter), then continue prompts: greedily, or with "
        "--temperature sampled.",
    )
    add = parser.add_argument
    add_engine_options(parser, default=DEMO, without=UNUSED)
    add("-p", "--prompt", action="append", metavar="TEXT", help="prompt; may be repeated")
    add(
        "--prompt-file",
        metavar="FILE",
        help="file with one prompt, '-' for stdin (also read if no prompt is given); one newline "
        "at the end is dropped",
    )
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, put into the model's chat template",
    )
    add("--system", metavar="TEXT", help="with --chat: what the model is told first")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    add(
        "--compare",
        action="store_true",
        help="also run plain decoding and transformers' own generate, and print a table",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add_sampling_options(parser.add_argument_group("sampling").add_argument)
    parser.set_defaults(run=run, n=1)


def add_sampling_options(add: Callable[..., Any]) -> None:
    """The flags that say how tokens are chosen."""
    add_fields(add, SamplingParams, only=(*SAMPLED, "stop", "seed", "n"))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of each prompt.  Raises: InvalidRequest."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        n=args.n,
        stop=tuple(args.stop or ()),
        **given_of(args, SAMPLED),
    )


def run(args: argparse.Namespace) -> int:
    sampling_params(args)  # check before minutes of compiling
    if args.compare and args.tensor_parallel_size:
        raise InvalidOption("--compare runs one process: leave out --tensor-parallel-size")
    if args.compare and (args.temperature or args.n > 1):
        raise InvalidOption(
            "--compare decodes greedily: leave out --temperature and --n; `compilespec bench` "
            "compares sampled decoding"
        )
    if args.system is not None and not args.chat:
        raise InvalidOption("--system is part of a conversation: give --chat, too")
    _check_model(args)
    prompts = read_prompts(args)
    set_threads(args.threads)
    return _compare(args, prompts) if args.compare else _generate(args, prompts)


def _check_model(args: argparse.Namespace) -> None:
    """Refuse a text in the place of MODEL, before more is read."""
    from compilespec.tracing.hub import is_hub_file, is_hub_name

    named = args.model == DEMO or is_hub_name(args.model) or is_hub_file(args.model)
    if args.prompt or named or os.path.exists(args.model):
        return
    raise InvalidOption(
        f"{args.model!r} stands where MODEL does, and no such model exists: give a text to "
        "continue as --prompt TEXT"
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts, from the options, a file, stdin, or the demo's own, in this order.

    Raises: InvalidRequest (none found, or a file that cannot be read).
    """
    prompts = list(args.prompt or ())
    if args.prompt_file is not None:
        prompts.append(_read_file(args.prompt_file))
    if not prompts and _stdin_has_text(wait=args.model != DEMO):
        text = _read_file("-")
        prompts += [text] if text else []
    if not prompts and args.model == DEMO:
        prompts += DEMO_PROMPTS
    if not prompts:
        raise InvalidRequest("no prompt: give --prompt TEXT, --prompt-file FILE, or text on stdin")
    return prompts


def _generate(args: argparse.Namespace, prompts: list[str]) -> int:
    """Stream the prompts; an interrupt keeps the text so far."""
    params = sampling_params(args)
    with compile_engine(args, spec_of(args)) as engine:
        if not given_of(args, SAMPLED):
            report.print_unused_defaults(engine.generation_defaults)
        progress = report.OutputPrinter(prompts, quiet=args.json, num_samples=args.n)
        start, interrupted = time.perf_counter(), False
        try:
            with contextlib.closing(engine.stream(_asked(args, prompts), params)) as deltas:
                for delta in deltas:
                    progress.add(delta)
        except KeyboardInterrupt:
            interrupted = True
        elapsed_s = time.perf_counter() - start
        progress.close()
        if not args.ignore_eos:
            report.print_ended_at_once(progress.results(), engine)
        stats = engine.stats()
        if args.json:
            print_json(
                {
                    "outputs": progress.results(),
                    "elapsed_ms": elapsed_s * 1e3,
                    "stats": dataclasses.asdict(stats),
                    "plan": engine.plan(),
                }
            )
        else:
            report.print_summary(progress.num_tokens, elapsed_s, stats, interrupted=interrupted)
    for index, error in progress.errors.items():
        line = in_flags(error, args)
        print(f"compilespec: error: prompt {index + 1}: {line}", file=sys.stderr)
    if interrupted:
        return 130
    return 2 if progress.errors else 0


def _compare(args: argparse.Namespace, prompts: list[str]) -> int:
    """Run the method, plain decoding and transformers on the same prompts."""
    from compilespec.cli import compare

    spec, count = spec_of(args), args.max_new_tokens
    with contextlib.ExitStack() as stack:
        ways = []
        for name in dict.fromkeys((spec, "none")):
            engine = stack.enter_context(compile_engine(args, name))
            title = PLAIN if name == "none" else f"compilespec {name}"
            ways.append(
                compare.engine_way(title, engine, max_new_tokens=count, ignore_eos=args.ignore_eos)
            )
        target = load_quantized(args, engine.plan().get("dtype"))
        ways.append(
            compare.transformers_way(
                target.model,
                max_new_tokens=count,
                max_seq_len=engine.geometry.config.max_seq_len,
                eos_token_ids=() if args.ignore_eos else sorted(engine.eos_token_ids),
            )
        )
        ids = [engine.encode(prompt) for prompt in _asked(args, prompts)]
        with report.status("running") as update:
            comparison = compare.compare(
                ways,
                ids,
                margin=lambda prefix: compare.logit_margin(target.model, prefix),
                num_rounds=NUM_ROUNDS,
                plain=PLAIN,
                progress=update,
            )
        if args.json:
            print_json({"comparison": comparison.as_dict(), "plan": engine.plan()})
        else:
            report.print_comparison(comparison, engine.plan(), tokenizer=engine.tokenizer)
    return 0


def _asked(args: argparse.Namespace, prompts: Sequence[str]) -> list[Any]:
    """The engine's inputs for the prompts: their text, or conversations of one message."""
    if not args.chat:
        return list(prompts)
    told = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [{"messages": [*told, {"role": "user", "content": one}]} for one in prompts]


def compile_engine(args: argparse.Namespace, spec: str, **changes: Any) -> Engine:
    """The engine that the options describe; `changes` override its keywords."""
    import compilespec

    given = {**compile_keywords(args, spec), **changes}
    with report.starting(f"{args.model} (spec={spec})", quiet=args.json) as progress:
        given |= {} if progress is None else {"progress": progress}
        engine: Engine = compilespec.compile(args.model, spec, **given)
    return engine


def load_quantized(args: argparse.Namespace, dtype: str | None) -> Target:
    """The target that `compile_engine` compiles, as a module."""
    import torch

    from compilespec.pipeline.options import CompileOptions
    from compilespec.quantization import quantize_target
    from compilespec.tracing.adapters import merge_adapter
    from compilespec.tracing.load import load_target
    from compilespec.tracing.placement import read_device, read_dtype

    given = {one: getattr(args, one, None) for one in ("quantize", "adapters", "dequantize")}
    options = CompileOptions(**{name: one for name, one in given.items() if one is not None})
    device = read_device(args.device) or torch.device("cpu")
    keeps = options.keeps_blocks(device, read_dtype(dtype))
    target = load_target(args.model, dtype=dtype, device=args.device, keeps_blocks=keeps)
    if getattr(args, "adapters", None) is not None:
        target = merge_adapter(target, args.adapters)
    return quantize_target(target, options.quantization)


def spec_of(args: argparse.Namespace) -> str:
    """The requested method.  Raises: InvalidOption if there is none, but options for one."""
    spec = str(args.spec or ("eagle3" if args.model == DEMO else "none"))
    given = next((name for name in given_of(args, vars(args)) if "draft" in name), None)
    if given and not may_draft(spec):
        raise InvalidOption(
            f"{given} must go with a drafting method: give spec=, or leave {given}= out"
        )
    return spec


def set_threads(threads: int | None) -> None:
    """Set the number of threads: the given one, else torch's, at most the container's CPU quota."""
    if threads is not None and threads < 1:
        raise InvalidOption(f"--threads: expected at least 1, got {threads}")
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    from compilespec.ops._cpus import num_cpus

    torch.set_num_threads(threads or min(torch.get_num_threads(), num_cpus()))


def _read_file(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"--prompt-file {name}: expected a UTF-8 text file; {error}"
        ) from error
    return text.removesuffix("\n")


def _stdin_has_text(*, wait: bool) -> bool:
    """True where stdin has text to read: never on a terminal; without `wait`, only if input is
    ready.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return False
    if wait:
        return True
    try:
        ready, _, _ = select.select([sys.stdin], [], [], 0.1)
    except (OSError, ValueError):  # not a real file
        return False
    return bool(ready)


def print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=2, default=str)
    sys.stdout.write(os.linesep)
