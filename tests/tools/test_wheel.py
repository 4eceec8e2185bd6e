"""The wheel: its kernels serve where there is no compiler."""

import os
import re
import subprocess
import sys

import pytest

from compilespec.ops import _levels
from tools.wheel import build_wheel

SCRIPT = """
import torch
from compilespec.ops import _build, load_kernels
assert load_kernels()
maps = open("/proc/self/maps").read()
print(_build.library_path(), str(_build.library_path()) in maps)
"""


def test_its_kernels_serve_without_a_compiler(tmp_path):
    fitting = _levels.fitting(_levels.cpu_features())
    if not fitting:
        pytest.skip("no level runs on this CPU")
    wheel = build_wheel(tmp_path / "dist", fitting[-1:])
    assert re.fullmatch(r"compilespec-.*-py3-none-manylinux_2_\d+_x86_64.whl", wheel.name)
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run([sys.executable, *map(str, install)], check=True)
    environment = {
        **os.environ, "PYTHONPATH": str(site), "CXX": "/no/compiler",
        "COMPILESPEC_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    path, is_mapped = done.stdout.split()
    assert path.startswith(str(site)), path
    assert fitting[-1].name in path
    assert is_mapped == "True"
