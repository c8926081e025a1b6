"""Memory of the node on which this process runs: Linux's figures, or less if a control group allows less.

Control groups limit containers and Slurm jobs. This module does not import torch.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, and the file that names this process's groups."""
CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with a group's memory limit and use, and the entry of memory.stat for file caches that Linux can free."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node in bytes, as far as this process's control groups let it use it."""

    host: str
    """Name of the machine or container."""
    total: int
    free: int
    """What processes can still take at the moment."""


def node_memory() -> NodeMemory:
    """Returns the memory of this node."""
    return NodeMemory(socket.gethostname(), total_memory(), free_memory())


def total_memory() -> int:
    """Returns the bytes of the machine's memory, or of the smallest limit of this process's control groups."""
    limits = (limit_of(folder, names) for folder, names in control_groups())
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def free_memory() -> int:
    """Returns the bytes that processes can still take: Linux's figure, or less if a control group allows less."""
    left = (left_in(folder, names) for folder, names in control_groups())
    return min([int(psutil.virtual_memory().available), *(bytes_ for bytes_ in left if bytes_ is not None)])


def control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields the folders of this process's control groups and their parents, with the names of the files to read.

    The roots are always included, because a container sees its own group as the root.
    """
    for line in ["0::/", "0:memory:/", *(OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else [])]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUPS / "memory", CGROUP_1) if controllers else (CGROUPS, CGROUP_2)
        parts = Path(path).parts[1:]
        yield from ((root.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1))


def limit_of(group: Path, names: tuple[str, str, str]) -> int | None:
    """Returns a group's limit in bytes; None if it has none or cannot be read."""
    try:
        most = (group / names[0]).read_text().strip()
    except OSError:
        return None
    return int(most) if most.isdigit() else None


def left_in(group: Path, names: tuple[str, str, str]) -> int | None:
    """Returns the bytes that processes of a group can still take; None if it has no limit or cannot be read."""
    _, used, files = names
    if (limit := limit_of(group, names)) is None:
        return None
    try:
        taken = int((group / used).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, limit - taken + int(stat.get(files, 0)))
