"""What one machine is and has, told there: the doctor runs `facts` on every node of a cluster. Without torch."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from separation.node_checks import code_of, sees

PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
"""Whose versions decide bits, or whether two nodes understand each other."""
SHM, BOOT = Path("/dev/shm"), Path("/proc/sys/kernel/random/boot_id")
"""Linux makes up a number when it starts: containers and pretended nodes of one machine share it, and its memory."""
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container or of a Slurm job, in version 2 and version 1 of Linux's control groups."""
NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Asked:
    """What is to be told beside what a machine is."""

    folders: tuple[str, ...] = ()
    """Whose free space counts; of the nearest folder that exists."""
    packages: tuple[str, ...] = ()
    """Whose code is compared."""
    modules: tuple[str, ...] = ()
    """Import names; those that the machine lacks are told."""
    mark: str = ""
    """A file by which a shared folder is known, and its text."""
    text: str = ""


def facts(asked: Asked) -> dict[str, Any]:
    """All that is told of a machine; sizes in bytes, as they are free now."""
    return {
        "host": socket.gethostname(),
        "boot": BOOT.read_text().strip() if BOOT.is_file() else socket.gethostname(),
        "versions": {"python": platform.python_version(), **versions()},
        "code": code_of(asked.packages),
        "cores": os.cpu_count() or 1,
        "memory": free_memory(),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        "disks": {folder: free_disk(Path(folder)) for folder in (*asked.folders, temporary(), model_cache())},
        "temporary": temporary(),
        "cache": model_cache(),
        "lacking": [module for module in asked.modules if not importable(module)],
        "marked": not asked.mark or sees(asked.mark, asked.text),
        "gpus": gpus(),
    }


def versions() -> dict[str, str]:
    """Of PACKAGES; "none" where one is missing."""
    return {package: version(package) for package in PACKAGES}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def free_memory() -> int:
    """Bytes that processes can still take: what Linux says, or less where a control group allows less."""
    available = int(psutil.virtual_memory().available)
    for limit, used in CGROUPS:
        text = Path(limit).read_text().strip() if Path(limit).is_file() else "max"
        if text.isdigit() and Path(used).is_file():
            available = min(available, max(0, int(text) - int(Path(used).read_text())))
    return available


def free_disk(folder: Path) -> dict[str, Any]:
    """Free and all bytes of the file system that `folder` is on, or will be; whether one may write there."""
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total, "device": folder.stat().st_dev, "writable": _writable(folder)}


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def temporary() -> str:
    """Where Ray keeps its files on this machine, unless `ray start --temp-dir` said otherwise."""
    return os.environ.get("RAY_TMPDIR") or str(Path(tempfile.gettempdir()) / "ray")


def model_cache() -> str:
    """Where Hugging Face keeps what it downloads on this machine."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")


def importable(module: str) -> bool:
    """Whether a module is found; it is not executed, its packages are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def gpus() -> list[dict[str, Any]]:
    """Name and bytes of every GPU that nvidia-smi shows; none where it is missing, fails or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError):
        return []
    rows = [line.rpartition(",") for line in said.splitlines() if "," in line]
    return [{"name": name.strip(), "memory": int(mib) * 2**20} for name, _, mib in rows if mib.strip().isdigit()]
