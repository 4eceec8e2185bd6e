"""Builds the driver into the folder where torch's libraries look for NVIDIA's, and the values.

    python -m tools.fake_cuda.build HEADERS     # with the Python of the environment

HEADERS is the include folder of the wheel nvidia-cuda-runtime; cuda.h comes from Triton.  Every
name that torch's libraries want and nobody wrote gets an entry that ends the process and says its
name.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
VALUES = "libfake_values.so"
# Whose a name is, by its beginning: the longer ones first.
OWNERS = {
    "cudnn": "libcudnn.so.9", "cusparseLt": "libcusparseLt.so.0", "cuFile": "libcufile.so.0",
    "nccl": "libnccl.so.2", "curand": "libcurand.so.10", "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13", "cusparse": "libcusparse.so.12", "cufft": "libcufft.so.12",
    "cusolver": "libcusolver.so.12", "nvrtc": "libnvrtc.so.13", "nvshmem": "libnvshmem_host.so.3",
    "nvml": "libnvidia-ml.so.1",
    "__cuda": "libcudart.so.13", "cuda": "libcudart.so.13", "cu": "libcuda.so.1",
}  # fmt: skip
DRIVER = "libcuda.so.1"  # holds all that is written
# Names of the driver that c10 asks for by name when it starts.
BY_NAME = (
    "cuMemAddressReserve", "cuMemRelease", "cuMemMap", "cuMemAddressFree", "cuMemSetAccess",
    "cuMemUnmap", "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle", "cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle", "cuStreamWriteValue32", "cuTensorMapEncodeIm2col",
)  # fmt: skip


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def library_folder() -> Path:
    return package("torch").parent / "nvidia/cu13/lib"


def main(headers: Path) -> None:
    into = library_folder()
    work = into / "generated"
    work.mkdir(parents=True, exist_ok=True)
    sources = [*sorted((HERE / "driver").iterdir()), *sorted((HERE / "values").iterdir())]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = into / "built"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    for old in into.glob("lib*.so*"):
        old.unlink()
    build_driver(headers, into, work)
    build_values(headers, into)
    stamp.write_text(wanted)


def build_driver(headers: Path, into: Path, work: Path) -> None:
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-Wno-deprecated-declarations",
             f"-I{headers}", f"-I{package('triton') / 'backends/nvidia/include'}"]  # fmt: skip
    sources = sorted((HERE / "driver").glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: _compile(flags, *pair), zip(sources, objects, strict=True)))
    written = {name for one in objects for name in names(one, "--defined-only")}
    tables = wanted_names()
    for owner in (DRIVER, *sorted(set(OWNERS.values()) - {DRIVER})):
        table = tables[owner]
        missing = sorted(set(table) - written)
        source = work / f"table_{owner.split('.')[0]}.cpp"
        source.write_text(_table(owner, missing))
        versions, script = sorted(set(table.values()) - {""}), work / f"{owner}.map"
        if owner == DRIVER:
            script.write_text("libcudart.so.13 { global: cuda*; __cuda*; };\n")
            _link([*objects, source], into / owner, script, ["-ldl", "-lpthread"])
        else:
            script.write_text(f"{versions[0] if versions else ''} {{ global: *; }};\n")
            uses_driver = ["-Wl,--no-as-needed", f"-L{into}", f"-l:{DRIVER}"]
            _link([source], into / owner, script, uses_driver)
        print(f"{owner}: {len(table)} names, {len(missing)} of them end the process", flush=True)


def build_values(headers: Path, into: Path) -> None:
    torch = package("torch")
    folders = [torch / "include", torch / "include/torch/csrc/api/include", headers,
               sysconfig.get_path("include")]  # fmt: skip
    _cxx(
        "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *(f"-I{folder}" for folder in folders),
        HERE / "values/values.cpp", "-o", into / VALUES, f"-L{torch}/lib", "-ltorch_cpu", "-lc10",
        "-lc10_cuda", f"-L{into}", f"-l:{DRIVER}", "-l:libcudart.so.13", f"-Wl,-rpath,{torch}/lib",
        "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip


def wanted_names() -> dict[str, dict[str, str]]:
    """By library, the names that torch's libraries want of it, with their versions."""
    wanted: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for library in (package("torch") / "lib").glob("*.so"):
        for name in names(library, "-D", "--undefined-only"):
            name, _, version = name.partition("@")
            owner = next((o for start, o in OWNERS.items() if re.match(f"{start}[A-Z_a-z]", name)),
                         None)  # fmt: skip
            if owner and (owner != DRIVER or re.match(r"cu[A-Z]", name)):
                wanted[owner][name] = version.lstrip("@")
    wanted[DRIVER] |= dict.fromkeys(BY_NAME, "")
    return wanted


def names(path: Path, *flags: str) -> list[str]:
    done = subprocess.run(["nm", *flags, path], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def _compile(flags: Sequence[str], source: Path, target: Path) -> None:
    newest = max(path.stat().st_mtime for path in (source, HERE / "driver/device.h"))
    if target.exists() and target.stat().st_mtime > newest:
        return
    _cxx(*flags, "-c", source, "-o", target)


def _link(sources: Iterable[Path], target: Path, script: Path, extra: Sequence[str]) -> None:
    _cxx(
        "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-Wl,-rpath,$ORIGIN", "-o", target,
        *sources, *extra, f"-Wl,--version-script={script}",
    )  # fmt: skip


def _cxx(*arguments: str | Path) -> None:
    subprocess.run(["g++", *arguments], check=True)


def _table(owner: str, missing: Iterable[str]) -> str:
    lines = ['extern "C" void fake_missing(const char*);']
    for name in missing:
        lines.append(f'extern "C" int {name}() {{ fake_missing("{name}"); return 1; }}')
    mark = re.sub(r"\W", "_", owner)
    return "\n".join([*lines, f'extern "C" int mark_{mark}() {{ return 0; }}']) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
