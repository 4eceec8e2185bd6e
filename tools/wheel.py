"""A wheel that brings the C++ kernels, compiled for common CPUs: `make wheel`.

    python -m tools.wheel [--output dist] [--level NAME ...]

A library serves the torch release that it was compiled against, 1.2 MB each; with another one the
kernels are compiled on the machine, as they are from a checkout.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from compilespec.ops import _build, _levels

ROOT = Path(__file__).parents[1]
PACKAGED = ("compilespec", "pyproject.toml", "README.md", "LICENSE")


def main(argv: Sequence[str] | None = None) -> None:
    names = [level.name for level in _levels.LEVELS]
    parser = argparse.ArgumentParser(description=__doc__, prog="tools.wheel")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--level", choices=names, nargs="+", default=names, dest="levels")
    options = parser.parse_args(argv)
    wheel = build_wheel(
        options.output, [one for one in _levels.LEVELS if one.name in options.levels]
    )
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, kernels for torch {torch.__version__}")


def build_wheel(output: Path, levels: Iterable[_levels.CpuLevel]) -> Path:
    """Build from a copy: a checkout that held the libraries would use them, too."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        for name in PACKAGED:
            _copy(ROOT / name, tree / name)
        prebuilt = tree / "compilespec" / "ops" / "prebuilt"
        libraries = []
        for level in levels:
            print(f"compiling the kernels for {level.name}", flush=True)
            libraries.append(_build.build_prebuilt(prebuilt, level))
        built = Path(folder, "wheel")
        _run(
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            f"--config-settings=--build-option=--plat-name={platform_tag(libraries)}",
            "--wheel-dir", str(built), str(tree),
        )  # fmt: skip
        (wheel,) = built.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, output))


def platform_tag(libraries: Iterable[Path]) -> str:
    """The oldest manylinux that has every symbol of glibc that the libraries ask for."""
    newest = 0
    for library in libraries:
        symbols = _run("objdump", "-T", str(library))
        newest = max([newest, *map(int, re.findall(r"GLIBC_2\.(\d+)", symbols))])
    return f"manylinux_2_{newest}_x86_64"


def _copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    else:
        shutil.copy(source, to)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[:4])} failed:\n{done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
