"""Facts of one machine, such as versions, memory and disks; the doctor runs `facts` on every node of a cluster.

This module does not import torch.
"""

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from async_flowrl.config.own_code import SUFFIX
from separation.node_checks import code_of, sees, temporary_folder, temporary_refusal
from separation.node_memory import free_memory

PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
"""Packages whose versions affect results bit for bit, or the communication between nodes."""
SHM = Path("/dev/shm")
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
    temporary = temporary_folder()
    return {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "code": code_of(asked.packages),
        "cores": os.cpu_count() or 1,
        "memory": free_memory(),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        "disks": {folder: free_disk(Path(folder)) for folder in (*asked.folders, temporary)},
        "temporary": temporary,
        "sockets": temporary_refusal(),
        "lacking": [module for module in asked.modules if not importable(module)],
        "marked": not asked.mark or sees(asked.mark, asked.text),
        "gpus": gpus(),
    }


def version(package: str) -> str:
    """Returns the version of a package; "none" if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def free_disk(folder: Path) -> dict[str, Any]:
    """Returns free and total bytes of the file system of `folder` or its nearest parent, and whether it is writable."""
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total, "writable": os.access(folder, os.W_OK | os.X_OK)}


def importable(module: str) -> bool:
    """Returns True if a module is found. It is not executed, but its parent packages are.

    A folder without Python files, as an uninstalled package may leave one, is not a module; a file is one.
    """
    if module.endswith(SUFFIX):
        return Path(module).is_file()
    try:
        spec = util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


def gpus() -> list[dict[str, Any]]:
    """Returns name and total bytes of every GPU that nvidia-smi shows; empty if it is missing, fails or hangs."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = (line.rpartition(",") for line in said.splitlines())
    return [{"name": name.strip(), "memory": int(mib) * 2**20} for name, _, mib in rows if mib.strip().isdigit()]
