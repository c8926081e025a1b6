"""Facts of one machine, such as versions, memory and disks; the doctor runs `facts` on every node of a cluster.

This module does not import torch.
"""

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
from separation.node_memory import free_memory

PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
"""Packages whose versions affect results bit for bit, or the communication between nodes."""
SHM, BOOT = Path("/dev/shm"), Path("/proc/sys/kernel/random/boot_id")
"""/dev/shm, and Linux's random number of the last start: containers and imitated nodes on one machine share it."""
NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Asked:
    """Questions to a machine, in addition to the usual facts."""

    folders: tuple[str, ...] = ()
    """Folders whose file system's free space is reported; for a missing one, that of its nearest parent."""
    packages: tuple[str, ...] = ()
    """Packages whose code is digested, for comparison between nodes."""
    modules: tuple[str, ...] = ()
    """Import names; those that the machine lacks are reported."""
    mark: str = ""
    """Path of a file with the content `text`; a node that sees it shares the folder. Empty: not asked."""
    text: str = ""


def facts(asked: Asked) -> dict[str, Any]:
    """Returns all facts of this machine; sizes are in bytes, of memory and disks what is free at this moment."""
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
        "interfaces": interfaces(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of PACKAGES; "none" for a missing package."""
    return {package: version(package) for package in PACKAGES}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def interfaces() -> dict[str, list[str]]:
    """Returns name of a network interface → its IPv4 addresses, in their order."""
    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def free_disk(folder: Path) -> dict[str, Any]:
    """Returns free and total bytes of the file system of `folder` or its nearest parent, and whether it is writable."""
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total, "device": folder.stat().st_dev, "writable": _writable(folder)}


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def temporary() -> str:
    """Returns the folder of Ray's files on this machine, unless `ray start --temp-dir` gave another one."""
    return os.environ.get("RAY_TMPDIR") or str(Path(tempfile.gettempdir()) / "ray")


def model_cache() -> str:
    """Returns the folder of Hugging Face's downloads on this machine."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")


def importable(module: str) -> bool:
    """Returns True if a module is found. It is not executed, but its parent packages are.

    A folder without Python files, as an uninstalled package may leave one, is not a module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


def gpus() -> list[dict[str, Any]]:
    """Returns name and total bytes of every GPU that nvidia-smi shows; empty if it is missing, fails or hangs."""
    rows = [line.rpartition(",") for line in nvidia_smi("name,memory.total", "nounits") if "," in line]
    return [{"name": name.strip(), "memory": int(mib) * 2**20} for name, _, mib in rows if mib.strip().isdigit()]


def nvidia_smi(query: str, *form: str) -> list[str]:
    """Returns one line per GPU with the asked properties; empty if nvidia-smi is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={query}", f"--format={','.join(('csv', 'noheader', *form))}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError):
        return []
    return said.splitlines()
