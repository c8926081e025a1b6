"""A node of a cluster: its code, its files and sockets, its memory within control groups, and the CPUs near a GPU."""

import hashlib
import importlib.util
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

# Time after which a new file must be visible on another node; network file systems cache their directories.
SIGHT_SECONDS = 10.0
_POLL_SECONDS = 0.2


SOCKET_BYTES = 107  # Longest path of a socket.


def temporary_folder() -> str:
    """Returns the folder below which a cluster that is started here keeps its files and sockets, as Ray chooses it."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def temporary_refusal() -> str | None:
    """Returns one sentence if Ray cannot have its sockets in `temporary_folder`; None if it can."""
    folder = temporary_folder()
    longest = f"{folder}/ray/session_2000-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    if folder.isascii() and len(longest) <= SOCKET_BYTES:
        return None
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    return (
        f"Ray keeps sockets in {variable}={folder!r}, whose name must be ASCII and have at most "
        f"{len(folder) + SOCKET_BYTES - len(longest)} characters: set RAY_TMPDIR to another folder, such as /tmp"
    )


class OtherCode(RuntimeError):
    """Raised if a node has another version of a package than the process that started the run."""


def code_of(packages: Sequence[str]) -> dict[str, str]:
    """Returns package → digest (12 hex digits) of its Python files, not imported, or `none` if there are none."""
    digests: dict[str, str] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        digest = hashlib.sha256()
        files = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.py")}
        for name in sorted(files):
            digest.update(f"{name}\0".encode() + hashlib.sha256(files[name].read_bytes()).digest())
        digests[package] = digest.hexdigest()[:12] if files else "none"
    return digests


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Returns package → its version here, or `none` if it is not installed."""
    versions = dict.fromkeys(packages, "none")
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def compare_code(here: Mapping[str, str], remote: Mapping[str, str], *, node: str, worker: str) -> None:
    """Raises OtherCode, which names package and node, if a digest differs: on the node, or because of an edit since."""
    for package, digest in here.items():
        if remote.get(package) != digest:
            if (now := code_of([package])[package]) != digest:
                raise OtherCode(
                    f"{package} was edited while the run goes on (its code is {now} here, and {digest} when the run "
                    f"started), so {worker} on node {node} would compute with other code than those before it: put it "
                    "back, or start again with resume=auto"
                )
            raise OtherCode(
                f"node {node} has another version of {package} than the node that this is started on (its code is "
                f"{remote.get(package)}, here {digest}; asked by {worker}): install the same version on every node, or "
                "run it from a folder that all nodes see"
            )


def sees(path: str, text: str) -> bool:
    """Returns True as soon as the file at `path` has exactly this text; False if it has not after SIGHT_SECONDS."""
    end = time.monotonic() + SIGHT_SECONDS
    while True:
        try:
            if Path(path).read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)


# Linux's control groups, and the file that names this process's groups.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Link that names the namespace of this process's control groups; a container usually has one of its own.
NAMESPACE = Path("/proc/self/ns/cgroup")


CGROUP_2 = ("memory.max", "memory.current", "inactive_file", "active_file")
# Names of a control group's files of limit and use, and of the entries of memory.stat with the caches of files, which
# count as used and which Linux frees on demand.
CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node in bytes, as far as this process's control groups let it use it."""

    host: str  # Name of the machine or container.
    total: int
    free: int  # What processes can still take at the moment.
    swap: int = 0  # The machine's swap space, which comes on top of `total`.
    # The namespace of the control groups and the folders of those that limit memory. Processes of one host with the
    # same place share `total`.
    place: str = ""


def node_memory() -> NodeMemory:
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
        used = int((group / files[1]).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, limit - used + sum(int(stat.get(entry, 0)) for entry in files[2:]))


PCI = Path("/sys/bus/pci/devices")


def bind() -> str:
    """Restricts this process to the CPUs near its first GPU, among those it may use; returns a sentence for the log."""
    import torch

    if not torch.cuda.is_available():
        return "owns no GPU"
    properties: Any = torch.cuda.get_device_properties(0)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return bind_beside(PCI / address)


def bind_beside(device: Path) -> str:
    """As `bind`, for the PCI device whose folder in sysfs is `device`."""
    table = device / "local_cpulist"
    if not table.is_file():
        return f"{table} does not exist, so the GPU's NUMA node is unknown"
    node = (device / "numa_node").read_text().strip()
    allowed = os.sched_getaffinity(0)
    local = cpus(table.read_text()) & allowed
    if not local:
        return f"NUMA node {node} of the GPU has none of the CPUs that the process may use"
    if local == allowed:
        return f"all CPUs that the process may use belong to NUMA node {node} of the GPU"
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), local)
        except ProcessLookupError:  # the thread has ended since the folder was read
            continue
    return f"bound to {len(local)} of {len(allowed)} CPUs, those of NUMA node {node}"


def cpus(ranges: str) -> set[int]:
    """Returns the CPU numbers in the kernel's notation, e.g. `0-3,8`."""
    numbers: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
