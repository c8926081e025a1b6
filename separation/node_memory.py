"""Memory of the node on which this process runs: Linux's figures, or less if a control group allows less.

Control groups limit containers and Slurm jobs. This module does not import torch.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, and the file that names this process's groups."""
NAMESPACE = Path("/proc/self/ns/cgroup")
"""Link that names the namespace of this process's control groups; a container usually has one of its own."""


CGROUP_2 = ("memory.max", "memory.current", "inactive_file", "active_file")
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
"""Names of a control group's files of limit and use, and of the entries of memory.stat with the caches of files, which
count as used and which Linux frees on demand."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node in bytes, as far as this process's control groups let it use it."""

    host: str
    """Name of the machine or container."""
    total: int
    free: int
    """What processes can still take at the moment."""
    swap: int = 0
    """The machine's swap space, which comes on top of `total`."""
    place: str = ""
    """The namespace of the control groups and the folders of those that limit memory. Processes of one host with the
    same place share `total`."""


def node_memory() -> NodeMemory:
    """Returns the memory of this node."""
    namespace = NAMESPACE.readlink().name if NAMESPACE.is_symlink() else ""
    place = " ".join([namespace, *(str(folder) for folder, _ in control_groups())])
    return NodeMemory(socket.gethostname(), total_memory(), free_memory(), swap_space(), place)


def total_memory() -> int:
    """Returns the bytes of the machine's memory, or of the smallest limit of this process's control groups."""
    limits = (limit_of(folder, files) for folder, files in control_groups())
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def free_memory() -> int:
    """Returns the bytes that processes can still take: Linux's figure, or less if a control group allows less."""
    left = (left_in(folder, files) for folder, files in control_groups())
    return min([int(psutil.virtual_memory().available), *(bytes_ for bytes_ in left if bytes_ is not None)])


def swap_space() -> int:
    """Returns the bytes of the machine's swap space; a control group may allow less."""
    return int(psutil.swap_memory().total)


def control_groups() -> Iterator[tuple[Path, Sequence[str]]]:
    """Yields the folders of this process's control groups and their parents, with the names of the files to read.

    The roots are always included, because a container sees its own group as the root.
    """
    for line in ["0::/", "0:memory:/", *(OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else [])]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUPS / "memory", CGROUP_1) if controllers else (CGROUPS, CGROUP_2)
        parts = Path(path).parts[1:]
        yield from ((root.joinpath(*parts[:depth]), files) for depth in range(len(parts) + 1))


def limit_of(group: Path, files: Sequence[str]) -> int | None:
    """Returns a group's limit in bytes; None if it has none or cannot be read."""
    try:
        most = (group / files[0]).read_text().strip()
    except OSError:
        return None
    return int(most) if most.isdigit() else None


def left_in(group: Path, files: Sequence[str]) -> int | None:
    """Returns the bytes that processes of a group can still take; None if it has no limit or cannot be read."""
    if (limit := limit_of(group, files)) is None:
        return None
    try:
        taken = int((group / files[1]).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, limit - taken + sum(int(stat.get(entry, 0)) for entry in files[2:]))
