"""Facts of one machine, gathered on it: the doctor runs `facts` on every node of a cluster. Without torch."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from separation.node_checks import code_of, sees

PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
"""Whose versions decide bits, or whether two nodes understand each other."""
SHM, BOOT = Path("/dev/shm"), Path("/proc/sys/kernel/random/boot_id")
"""Linux makes up a number when it starts: containers and pretended nodes of one machine share it, and its memory."""
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, which limit containers and Slurm jobs, and the file that says which this process is in."""
CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with a group's limit and use, and what memory.stat calls files in memory that Linux gives up when asked."""
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
        "machine_memory": int(psutil.virtual_memory().available),
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
    left = [left_in(folder, names) for folder, names in control_groups()]
    return min([int(psutil.virtual_memory().available), *(bytes_ for bytes_ in left if bytes_ is not None)])


def control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's groups and of all around them: a container sees its own as the root, a job does not."""
    for line in ["0::/", "0:memory:/", *(OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else [])]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUPS / "memory", CGROUP_1) if controllers else (CGROUPS, CGROUP_2)
        parts = Path(path).parts[1:]
        yield from ((root.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1))


def left_in(group: Path, names: tuple[str, str, str]) -> int | None:
    """Bytes that a group may still take; None where it has no limit."""
    limit, used, files = names
    try:
        most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(most) - taken + int(stat.get(files, 0))) if most.isdigit() else None


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
