"""Load the C++ CPU kernels: those that came with the package, or compiled here, once per machine.

All `*/kernel.cpp` become one shared library, built by a few compilers side by side and cached under
a hash of everything that it depends on: sources, torch, compiler, flags, CPU features.  A wheel has
libraries beside the sources, one for each of `_levels.LEVELS`.  A process that finds a file only
loads it (a few ms), after checking its seal: the library's hash, appended after its last byte,
which the dynamic loader ignores.  Loading a truncated file would kill the process with SIGBUS.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from compilespec.errors import InvalidOption, MissingDependency
from compilespec.ops import _levels
from compilespec.ops._cpus import num_cpus
from compilespec.ops._levels import CpuLevel

CACHE_VARIABLE = "COMPILESPEC_CACHE_DIR"
_OPS = Path(__file__).parent
PREBUILT = _OPS / "prebuilt"  # in a wheel
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# The kernels use torch's OpenMP pool.  They are compiled with -fopenmp but linked without it: the
# OpenMP symbols are then found through libtorch_cpu's own dependency, so that no second OpenMP
# runtime (and no second set of spinning threads) can enter the process.
_LINK_FLAGS = ("-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden")
_SEAL_BYTES = hashlib.sha256().digest_size

_lock = threading.Lock()
_loaded: bool | None = None  # None: not tried yet


def kernels_untried() -> bool:
    """True where `load_kernels` has not run in this process."""
    return _loaded is None


def load_kernels() -> bool:
    """Register the C++ kernels on the CPU dispatch key; compile them if no cached library fits.

    Returns:
        True if the kernels serve CPU calls; False if the references do (no compiler, a failed
        compile, or COMPILESPEC_CPP_KERNELS=0), after one RuntimeWarning that says why.  Later calls
        return the first answer.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _try_load()
        return _loaded


def is_cached() -> bool | None:
    """True where `load_kernels` finds a library that fits; None if no library is wanted."""
    if os.environ.get("COMPILESPEC_CPP_KERNELS") == "0":
        return None
    try:
        return _is_whole(library_path())
    except OSError:  # `load_kernels` will report it
        return False


def cache_directory() -> Path:
    """`COMPILESPEC_CACHE_DIR`, else `~/.cache/compilespec`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "compilespec")


def unwritable(error: OSError) -> str:
    """The message for a cache directory that cannot be written."""
    return (
        f"the cache directory {cache_directory()} cannot be written ({error.strerror or error}): "
        "set COMPILESPEC_CACHE_DIR to one that can"
    )


def check_writable() -> None:
    """Raises: InvalidOption if kernels must be built first and no file can be kept."""
    if is_cached() is not False:
        return
    try:
        _make_folder(cache_directory() / "kernels")
    except OSError as error:
        raise InvalidOption(unwritable(error)) from error


def _make_folder(folder: Path) -> None:
    """Raises: OSError where it, or a file in it, cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_compiler() -> None:
    """Raises: MissingDependency where Inductor's C++ code cannot be compiled here."""
    asked = os.environ.get("CXX")
    cure = 'or give backend="eager", which is slow and compiles nothing'
    if shutil.which(asked or "g++") is None:
        other = _compiler()
        found = f"CXX={asked} is no program in PATH" if asked else "there is no g++ in PATH"
        raise MissingDependency(
            f"compiling on the CPU needs a C++20 compiler, and {found}: "
            f"{f'set CXX={other}' if other else 'install g++ (apt install g++) or set CXX'}, {cure}"
        )
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise MissingDependency(
            f"compiling on the CPU needs the headers of this Python, and {folder} has no "
            f"Python.h: install them (apt install python3-dev), {cure}"
        )


def library_path() -> Path:
    """The path of the packaged library for COMPILESPEC_CPU_LEVEL, or for the best level of this CPU
    where that is not set; else of one in the cache, which may not be built yet.

    Raises: InvalidOption for a level that the CPU does not have.
    """
    asked = _levels.asked_level()
    for level in [asked] if asked else _levels.fitting(_levels.cpu_features()):
        path = PREBUILT / _file_name(level)
        if _is_whole(path):
            return path
    return cache_directory() / "kernels" / _file_name(asked)


def build_prebuilt(folder: Path, level: CpuLevel) -> Path:
    """Compile the library of a level; a package that has it in `ops/prebuilt` compiles none where
    the level fits.

    Raises: RuntimeError (no compiler, a failed compile).
    """
    path = folder / _file_name(level)
    _compile(path, level)
    return path


def _try_load() -> bool:
    if os.environ.get("COMPILESPEC_CPP_KERNELS") == "0":
        return False
    try:
        path = library_path()
        if not _is_whole(path):
            _compile(path, _levels.asked_level())
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            "the C++ CPU kernels are not available, the slow references in torch serve instead: "
            f"{error}; COMPILESPEC_CPP_KERNELS=0 silences this",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def _is_whole(path: Path) -> bool:
    """True where the file exists and ends with its seal."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES])


def _seal(library: bytes) -> bytes:
    return hashlib.sha256(library).digest()


def _compile(path: Path, level: CpuLevel | None) -> None:
    """Build in a private directory beside `path`, then rename: readers see all of it or nothing."""
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found (CXX, g++, clang++); set CXX to a C++20 compiler")
    try:
        _make_folder(path.parent)
    except OSError as error:
        raise RuntimeError(unwritable(error)) from error
    torch_dir = Path(torch.__file__).parent
    with (
        _only_builder(path),
        tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder,
    ):
        if _is_whole(path):  # another process has built it meanwhile
            return
        include = torch_dir / "include"
        headers = [_OPS, include, include / "torch" / "csrc" / "api" / "include"]
        command = [compiler, *_flags(level), *_LINK_FLAGS, "-I", str(headers[0])]
        command += [word for header in headers[1:] for word in ("-isystem", str(header))]
        units = _write_units(Path(folder))
        with ThreadPoolExecutor(len(units)) as pool:
            jobs = ([*command, str(u), "-c", "-o", str(u.with_suffix(".o"))] for u in units)
            list(pool.map(_run, jobs))
        result = Path(folder) / path.name
        libraries = ["-L", str(torch_dir / "lib"), "-ltorch_cpu", "-lc10"]
        objects = [str(unit.with_suffix(".o")) for unit in units]
        _run([compiler, "-shared", *objects, "-o", str(result), *libraries])
        with result.open("ab") as file:
            file.write(_seal(result.read_bytes()))
        os.replace(result, path)


def _write_units(folder: Path) -> list[Path]:
    """Files that together include all kernels, one for each of up to four processors.

    Torch's headers take as long as a kernel, so a unit a kernel would cost twice the work.
    """
    count = min(num_cpus(), 4)
    units: list[list[Path]] = [[] for _ in range(count)]
    kernels = [source for source in _sources() if source.suffix == ".cpp"]
    for kernel in sorted(kernels, key=lambda source: -source.stat().st_size):
        min(units, key=lambda unit: sum(one.stat().st_size for one in unit)).append(kernel)
    files = []
    for number, unit in enumerate(units):
        file = folder / f"kernels{number}.cpp"
        file.write_text("".join(f'#include "{kernel}"\n' for kernel in unit))
        files.append(file)
    return files


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Waits while another process builds the same library; elsewhere than on POSIX, both build."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()
        raise RuntimeError(
            f"{command[0]} failed: {lines[0] if lines else done.returncode}; set CXX to a C++20 "
            "compiler"
        )


def _sources() -> list[Path]:
    return sorted([*_OPS.glob("*.h"), *_OPS.glob("*/kernel.cpp")])


def _flags(level: CpuLevel | None) -> tuple[str, ...]:
    abi = int(torch.compiled_with_cxx11_abi())
    target = ("-march=native",) if level is None else level.flags
    return (*_FLAGS, *target, f"-D_GLIBCXX_USE_CXX11_ABI={abi}")


def _compiler() -> str | None:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def _file_name(level: CpuLevel | None) -> str:
    return f"compilespec_ops_{'' if level is None else level.name + '_'}{_key(level)}.so"


def _key(level: CpuLevel | None) -> str:
    """Hash of everything that decides what the library contains and where it may run; that of a
    level is the same on every machine.
    """
    here = toolchain() if level is None else (torch.__version__.split("+")[0],)
    parts = (_source_digest(), *_flags(level), *_LINK_FLAGS, *here)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.relative_to(_OPS).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()


def toolchain() -> tuple[str, ...]:
    """The environment of C++ code compiled here: torch, CPU, compiler."""
    compiler = _compiler()
    stamp = os.stat(compiler) if compiler else None
    found = compiler or "", str(stamp and (stamp.st_size, stamp.st_mtime_ns))
    return torch.__version__, _cpu_features(), *found


def _cpu_features() -> str:
    """The CPU's features as `-march=native` sees them, without asking the compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    found = {name: line for line in lines for name in names if line.startswith(name)}
    return platform.machine() + "".join(found[name] for name in sorted(found))
