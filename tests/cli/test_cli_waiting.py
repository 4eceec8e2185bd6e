"""How OpenMP's threads wait under the command line: they sleep soon, unless the user says how."""

import os
import subprocess
import sys

import pytest

from compilespec.cli import SPIN_COUNT, main


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SPIN_COUNT),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_sleep_soon_unless_the_user_says_how_they_wait(monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back in any case
        monkeypatch.delenv(name)
        if name in given:
            monkeypatch.setenv(name, given[name])
    assert main(["methods"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_it_is_said_before_torch_is_imported():
    script = "import sys, compilespec.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
