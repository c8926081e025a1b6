"""Launcher of Python on pretended GPUs: `python -m tests.pretend_gpu.launch -m async_flowrl.main --config-name sync`.

The libraries are built by g++ where they are missing, in build/pretend_gpu/, by a hash of their sources and of torch.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
BUILT = ROOT / "build" / "pretend_gpu"
CUPY = ROOT / "build" / "pretend_cupy"
"""Where the Makefile puts cupy, which transport pynccl is made of; nobody else's environment has it."""
SECONDS_KEPT = 86_400
"""Of a build of other sources: a run may still start workers with it."""
DEVICES = 4
COMPILER = ("g++", "-O1", "-std=c++20", "-fPIC", "-shared")


def environment(libraries: Path, *, devices: int = DEVICES, report: Path | None = None) -> dict[str, str]:
    """That of a process, and of those it starts, in which torch and Ray find so many pretended GPUs."""
    paths = [str(HERE / "site"), str(ROOT), *([str(CUPY)] if CUPY.exists() else []), os.environ.get("PYTHONPATH", "")]
    preset = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return preset | {
        "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        "PRETEND_CUDA_DEVICES": str(devices),
        "PRETEND_LIBRARIES": str(libraries),
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": devices}),
        "OMP_NUM_THREADS": "1",
        **({} if report is None else {"PRETEND_REPORT": str(report)}),
    }


def build() -> Path:
    """The folder with pretend_cuda.so and libnccl.so.2, made if need be. Raises SystemExit in one sentence."""
    sources = sorted([*HERE.glob("device/*"), *HERE.glob("libnccl/*")])
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("the pretended GPU is built against torch, which this Python does not have: make setup")
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    key.update(" ".join((version("torch"), *COMPILER)).encode())
    made = BUILT / key.hexdigest()[:16]
    if made.exists():
        return made
    if shutil.which(COMPILER[0]) is None:
        raise SystemExit("the pretended GPU is C++ and needs g++, which was not found: install it (apt install g++)")
    BUILT.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=BUILT))
    _compile(Path(spec.origin).parent, partial)
    try:
        partial.rename(made)
    except OSError:  # somebody else was faster
        shutil.rmtree(partial)
    for old in BUILT.iterdir():
        if old != made and time.time() - old.stat().st_mtime > SECONDS_KEPT:
            shutil.rmtree(old)
    return made


def _compile(torch: Path, folder: Path) -> None:
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    device = [*COMPILER, *include, str(HERE / "device/device.cpp"), "-o", str(folder / "pretend_cuda.so"), *linked]
    nccl = [*COMPILER, str(HERE / "libnccl/nccl.cpp"), "-o", str(folder / "libnccl.so.2"), "-lpthread", "-lrt"]
    compilers = [subprocess.Popen(command) for command in (device, nccl)]
    failed = [compiler.wait() != 0 for compiler in compilers]
    if any(failed):
        shutil.rmtree(folder)
        raise SystemExit("the pretended GPU could not be built, see g++'s messages above")


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit("usage: python -m tests.pretend_gpu.launch -m module [arguments], or a script")
    report = os.environ.get("PRETEND_REPORT")
    prepared = environment(build(), report=Path(report) if report else None)
    os.execve(sys.executable, [sys.executable, *arguments], prepared)


if __name__ == "__main__":
    main(sys.argv[1:])
