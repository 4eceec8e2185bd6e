"""Makes the environment of the fake device: `python -m tools.fake_cuda.setup FOLDER`.

FOLDER gets a virtual environment with the CUDA build of torch, as PyPI has it, and no library of
NVIDIA: the driver built here lies where torch's libraries look for theirs.  2.3 GB of disk.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec",
               "numpy", "setuptools")  # fmt: skip
TESTS_NEED = ("pytest", "pytest-xdist", "hypothesis", "llguidance", "prometheus-client", "psutil")
OURS = ("torch", "triton")  # of the project's dependencies, those that are installed apart


def main(folder: Path) -> None:
    """Install once, and build again whenever a source changed."""
    python = folder / "venv/bin/python"
    if not python.exists():
        print(f"creating {folder} (2.3 GB; some minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    stamp = folder / "installed"
    wanted = _digest(ROOT / "constraints.txt", ROOT / "pyproject.toml", Path(__file__))
    if not stamp.exists() or stamp.read_text() != wanted:
        install(python, folder / "headers")
        stamp.write_text(wanted)
    include = str(folder / "headers/nvidia/cu13/include")
    subprocess.run([python, "-m", "tools.fake_cuda.build", include], cwd=ROOT, check=True)


def install(python: Path, headers: Path) -> None:
    constraints = ROOT / "constraints.txt"
    pinned = dict(re.findall(r"^(torch|triton)==([\w.]+)", constraints.read_text(), re.M))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    exactly = f"torch==={pinned['torch']}"  # else a build for the CPU, 2.x+cpu, is taken too
    _quietly([*pip, "--no-deps", exactly, f"triton=={pinned['triton']}"])
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]["dependencies"]
    others = [one for one in project if not one.startswith(OURS)]
    _quietly([*pip, "-c", str(constraints), *TORCH_NEEDS, *TESTS_NEED, *others])
    _quietly([*pip, "--no-deps", "--upgrade", "--target", str(headers), *HEADERS])


def _quietly(command: Sequence[str]) -> None:
    """Run pip, which complains that NVIDIA's libraries are missing: they shall be."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
