"""Levels of CPU features that the C++ kernels can be compiled for ahead of time.

The kernels choose their instructions when they are compiled.  Kernels built on the machine use
`-march=native`; a wheel holds a library for each level, and the best that fits is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from compilespec.errors import InvalidOption

VARIABLE = "COMPILESPEC_CPU_LEVEL"

_AVX2 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class CpuLevel:
    """One level of CPU features."""

    name: str
    flags: tuple[str, ...]
    """The compiler's flags."""
    features: frozenset[str]
    """The features that a CPU needs, by the names of /proc/cpuinfo."""


LEVELS = (  # the best first
    CpuLevel(
        "amx",
        (
            "-march=x86-64-v4",
            "-mavx512vnni",
            "-mavx512bf16",
            "-mavx512vbmi",
            "-mamx-tile",
            "-mamx-bf16",
            "-mamx-int8",
        ),
        _AVX512 | {"avx512_vnni", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
    ),
    CpuLevel(
        "avx512_bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _AVX512 | {"avx512_vnni", "avx512_bf16"},
    ),
    CpuLevel("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
    CpuLevel("avx512", ("-march=x86-64-v4",), _AVX512),
    CpuLevel("avx2", ("-march=x86-64-v3",), _AVX2),
)

EMULATED = (  # for tests: emulated instructions
    CpuLevel(
        "emulated_bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-DCOMPILESPEC_EMULATE_BF16_DOT"),
        _AVX512 | {"avx512_vnni"},
    ),
    CpuLevel(
        "emulated_amx",
        (
            "-march=x86-64-v4",
            "-mavx512vnni",
            "-DCOMPILESPEC_EMULATE_BF16_DOT",
            "-DCOMPILESPEC_EMULATE_MATRIX_TILES",
        ),
        _AVX512 | {"avx512_vnni"},
    ),
)


def cpu_features() -> frozenset[str]:
    """The features of this machine; none where /proc/cpuinfo does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split()[2:])


def fitting(features: frozenset[str]) -> list[CpuLevel]:
    """The levels that a CPU of these features runs, the best first."""
    return [level for level in LEVELS if level.features <= features]


def asked_level() -> CpuLevel | None:
    """The level of `COMPILESPEC_CPU_LEVEL`; None: the CPU's best.  Raises: InvalidOption for an
    unknown level, or one that the CPU does not run.

    Raises: InvalidOption for an unknown one, or one that the CPU does not run.
    """
    name = os.environ.get(VARIABLE)
    if not name or name == "native":
        return None
    features = cpu_features()
    found = next((one for one in (*LEVELS, *EMULATED) if one.name == name), None)
    if found is None or not found.features <= features:
        known = (level.name for level in fitting(features))
        raise InvalidOption(
            f"{VARIABLE}={name} does not run on this CPU; expected one of "
            f"{', '.join(('native', *known))}"
        )
    return found
