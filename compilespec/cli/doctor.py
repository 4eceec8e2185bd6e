"""`compilespec doctor`: what this machine has and lacks, with cures, on one screen."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

from compilespec.errors import InvalidOption, MissingDependency

MISSING = 1  # exit code: something needed is not there
GIB = 2**30
OK, NOTE, NEEDED = "ok", "note", "MISSING"
KERNELS = {True: "built", False: "built at the first start", None: "switched off"}
EXTRAS = {
    "torchao": "quant",
    "llguidance": "guide",
    "gguf": "gguf",
    "fastapi": "serve",
    "pillow": "images",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the screen."""

    subject: str
    state: str
    """`ok`, `note` (works, but could be better) or `MISSING`."""
    said: str
    cure: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has and lacks, with cures",
        description="Versions, CPU, compiler, cache, memory and GPU, each with a cure where one is "
        f"needed.  The exit code is {MISSING} where something needed is missing.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list instead of a screen"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = list(findings())
    if args.json:
        json.dump([asdict(one) for one in found], sys.stdout, indent=2)
        print()
    else:
        for one in found:
            print(f"{one.state:8}{one.subject:14}{one.said}")
            if one.cure:
                print(f"{'':22}-> {one.cure}")
    return MISSING if any(one.state == NEEDED for one in found) else 0


def findings() -> Iterator[Finding]:
    """Each check in turn; what a check itself breaks on is its finding."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _extras, _cpu, _compiler, _cache, _memory, _gpu,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except ImportError as error:
            subject = check.__name__.strip("_")
            yield Finding(
                subject=subject, state=NEEDED, said=str(error), cure="pip install compilespec"
            )


def _versions() -> Iterator[Finding]:
    import torch

    from compilespec import _torch_compat as door

    yield Finding(subject="python", state=OK, said=platform.python_version())
    oldest, newest = (".".join(map(str, one)) for one in (door.OLDEST, door.NEWEST))
    state, cure = OK, ""
    if door.VERSION > door.NEWEST:
        state, cure = NOTE, f"newer than {newest}, the newest tested; if it fails, install that"
    elif door.VERSION < door.OLDEST:
        state, cure = NEEDED, f"pip install 'torch>={oldest}'"
    yield Finding(subject="torch", state=state, said=torch.__version__, cure=cure)
    for name in ("transformers", "tokenizers", "triton"):
        version = _version(name)
        if version is not None:
            yield Finding(subject=name, state=OK, said=version)
        elif name != "triton":
            yield Finding(subject=name, state=NEEDED, said="-", cure=f"pip install {name}")


def _extras() -> Iterator[Finding]:
    lacking = {name: extra for name, extra in EXTRAS.items() if _version(name) is None}
    present = [name for name in EXTRAS if name not in lacking]
    cure = f"pip install 'compilespec[{','.join(lacking.values())}]' if you need them"
    yield Finding(
        subject="extras",
        state=NOTE if lacking else OK,
        said=", ".join(present) or "none",
        cure=cure if lacking else "",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> Iterator[Finding]:
    from compilespec.ops._cpus import num_cpus
    from compilespec.ops._levels import cpu_features, fitting

    levels = fitting(cpu_features())
    best = levels[0].name if levels else "none of ours"
    yield Finding(
        subject="cpu",
        state=OK if levels else NOTE,
        said=f"{platform.machine()}, level {best}, {num_cpus()} processors for this process",
        cure="" if levels else "kernels need AVX2; slower references serve here",
    )


def _compiler() -> Iterator[Finding]:
    from compilespec.ops._build import check_compiler

    try:
        check_compiler()
    except MissingDependency as error:
        said, _, cure = str(error).partition(": ")
        yield Finding(subject="compiler", state=NEEDED, said=said, cure=cure)
    else:
        found = shutil.which(os.environ.get("CXX") or "g++")
        yield Finding(subject="compiler", state=OK, said=f"{found}, with the headers of Python")


def _cache() -> Iterator[Finding]:
    from compilespec.ops import _build

    folder = _build.cache_directory()
    try:
        kernels = KERNELS[_build.is_cached()]
        _build.check_writable()
    except InvalidOption as error:
        said, _, cure = str(error).partition(": ")
        yield Finding(subject="cache", state=NEEDED, said=said, cure=cure)
        return
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    yield Finding(
        subject="cache",
        state=OK if free > GIB else NOTE,
        said=f"{folder}, {free / GIB:.0f} GiB free, kernels are {kernels}",
        cure="" if free > GIB else "set COMPILESPEC_CACHE_DIR to a larger disk",
    )


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / GIB
    yield Finding(
        subject="memory",
        state=OK if total > 4 else NOTE,
        said=f"{total:.1f} GiB, {free:.1f} unused",
        cure="" if total > 4 else "take a small model, or quantize='int8_weight_only'",
    )


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding(subject="gpu", state=OK, said="none; the CPU serves")
        return
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        said = f"{one.name}, sm_{one.major}{one.minor}, {one.total_memory / GIB:.0f} GiB"
        yield Finding(subject="gpu", state=OK, said=said)
