"""Findings on the nodes of a run: what each has, where they differ, whether workers find a place, and the network."""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from async_flowrl.config.own_code import SUFFIX
from async_flowrl.run.findings import FAILED, OK, WARNING, Finding, failed, verdict
from separation import resources
from separation.cluster_probe import Node, Survey
from separation.group import PoolSpec
from separation.node import code_of, free_memory, sees, temporary_folder, temporary_refusal

GIB, GB = 2**30, 10**9
# Used share of a disk above which Ray writes no objects to it (its local_fs_capacity_threshold). Ray then fails to
# create those for which its object store has no room.
SPILL_SHARE = 0.95
LEAST_DISK = GB // 5  # Bytes on disk that the logs of Ray need at least.
# Ray's default size of the object store: this share of the memory; above SMALL_STORE bytes at most this share of
# /dev/shm. A store that does not fit into /dev/shm is put into Ray's folder for temporary files.
STORE_SHARE, SHM_SHARE, SMALL_STORE, LARGEST_STORE = 0.3, 0.95, 10 * GB, 200 * GB
# Size of the object whose broadcast is timed; it takes at most 1 / STORE_PART of the smallest object store.
BROADCAST_BYTES, STORE_PART = 32_000_000, 8
SLOW_BYTES_PER_SECOND = 50e6  # Half of gigabit Ethernet.
NETWORK = "check the interface that Ray uses (ray start --node-ip-address) and the link"


@dataclass(frozen=True)
class FactsRequest:
    # Folders whose file system's free space is reported; for a missing one, that of its nearest parent.
    folders: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # Packages whose code is digested, for comparison between nodes.
    modules: tuple[str, ...] = ()  # Import names; those that the machine lacks are reported.
    mark: str = ""  # Path of a file with the content `text`; a node that sees it shares the folder. Empty: not asked.
    text: str = ""


def facts(request: FactsRequest) -> dict[str, Any]:
    """Returns all facts of this machine; sizes are in bytes, of memory and disks what is free at this moment."""
    temporary = temporary_folder()
    return {
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "code": code_of(request.packages),
        "cores": os.cpu_count() or 1,
        "memory": free_memory(),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        "disks": {folder: free_disk(Path(folder)) for folder in (*request.folders, temporary)},
        "temporary": temporary,
        "sockets": temporary_refusal(),
        "lacking": [module for module in request.modules if not importable(module)],
        "marked": not request.mark or sees(request.mark, request.text),
        "gpus": gpus(),
    }


@dataclass(frozen=True)
class Machine:
    """One node with the result of `facts`. `store` is its object store in bytes; 0 if the run starts Ray itself."""

    name: str
    facts: Mapping[str, Any]
    store: float = 0.0
    # The resources that Ray knows of the node; None if the run starts Ray itself.
    resources: Mapping[str, float] | None = None
    # Optional feature that the configuration needs → what the node lacks of it (features.py).
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def object_store(self) -> float:
        """Bytes of the object store; without a cluster, the size that Ray would choose."""
        most = min(LARGEST_STORE, max(SMALL_STORE, SHM_SHARE * self.facts["shm"]))
        return self.store or min(STORE_SHARE * self.facts["memory"], most)


def machine_finding(machine: Machine) -> Finding:
    facts, disk = machine.facts, machine.facts["disks"][machine.facts["temporary"]]
    memory, shm, free = (f"{size / GIB:.1f} GiB" for size in (facts["memory"], facts["shm"], disk["free"]))
    kinds = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "no GPU"
    summary = f"{facts['host']}: {facts['cores']} cores, {kinds}; free: {memory} of memory, {shm} in /dev/shm"
    cure = "free some, or ray start --temp-dir"
    sockets = machine.resources is None and bool(facts["sockets"]), FAILED, f"{facts['sockets']}"
    full = disk["free"] < LEAST_DISK, FAILED, f"Ray has no room for its logs there: {cure}"
    tight = disk["free"] < (1 - SPILL_SHARE) * disk["total"], WARNING, f"Ray spills nothing to a disk this full: {cure}"
    return verdict(f"node {machine.name}", f"{summary}, {free} in {facts['temporary']}", sockets, full, tight)


def same_findings(here: Mapping[str, Any], machines: Sequence[Machine]) -> Iterator[Finding]:
    kinds = {"versions of the nodes": "versions", "code": "code"}
    advice = "install the same everywhere, or use one file system; other code would give other weights"
    for name, kind in kinds.items():
        sentence = "; ".join(
            f"{machine.name} has another {package} ({machine.facts[kind].get(package)}, here {number})"
            for machine in machines
            for package, number in here[kind].items()
            if machine.facts[kind].get(package) != number
        )
        equal = f"{', '.join(map(' '.join, here[kind].items()))} on {everywhere(machines)}"
        yield verdict(name, sentence or equal, (bool(sentence), FAILED, advice))
    if lacking := [f"{module} on {machine.name}" for machine in machines for module in machine.facts["lacking"]]:
        advice = "put the module on the import path there, or install it as a package"
        yield Finding("modules of your own", FAILED, f"not found: {', '.join(lacking)}", advice)


def room_for(spec: PoolSpec, machines: Sequence[Machine]) -> list[Machine]:
    """Returns the nodes that could hold a worker of the pool (`workers_per_node` of them) if nothing else ran."""
    exists = resources.totals(machine.resources for machine in machines if machine.resources is not None)
    bundle = resources.share_of_node(resources.needs_of(spec, exists), spec.workers_per_node or 1)
    return [one for one in machines if one.resources is None or resources.holds(one.resources, bundle)]


def everywhere(machines: Sequence[object]) -> str:
    return "this machine" if len(machines) == 1 else f"all {len(machines)} nodes"


def seats(specs: Sequence[PoolSpec], nodes: Sequence[Node]) -> Finding:
    exists = [node.resources for node in nodes]
    waits = [node.free for node in nodes], WARNING, "others hold them now: a run waits for deadlines.load"
    for left, status, advice in ((exists, FAILED, "fewer workers, or more nodes"), waits):
        try:
            resources.check_fits(resources.reserve(specs, resources.totals(exists)), left)
        except (resources.ResourcesMissing, ValueError) as error:
            return Finding("seats", status, str(error).splitlines()[0], advice)
    return Finding("seats", OK, f"free for {', '.join(f'{spec.name} {spec.least}' for spec in specs)}")


def network_findings(survey: Survey, version_bytes: int) -> Iterator[Finding]:
    names = {node.id: node.name for node in survey.nodes}
    stores = (node.resources.get("object_store_memory", BROADCAST_BYTES * STORE_PART) for node in survey.nodes)
    size = min(BROADCAST_BYTES, *(int(store / STORE_PART) for store in stores))
    measured: dict[str, float] = {}
    for node, seconds in survey.broadcast(size).items():
        if isinstance(seconds, Exception):
            yield failed(f"broadcast, {names[node]}", seconds, NETWORK)
        else:
            measured[names[node]] = seconds
    if measured:
        yield broadcast_finding(measured, size, version_bytes)


def broadcast_finding(seconds: Mapping[str, float], nbytes: int, version_bytes: int) -> Finding:
    slowest = max(seconds, key=lambda name: seconds[name])
    rate = nbytes / seconds[slowest]
    sentence = f"{nbytes / 1e6:.0f} MB by object store, {rate / 1e6:.0f} MB/s to the slowest node, {slowest}"
    sentence += f", so a version of {version_bytes / 1e6:.1f} MB takes {version_bytes / rate:.2f} s"
    return verdict("broadcast", sentence, (rate < SLOW_BYTES_PER_SECOND, WARNING, f"{slowest} is slow: {NETWORK}"))


# Packages whose versions affect results bit for bit, or the communication between nodes.
PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
SHM = Path("/dev/shm")
NVIDIA_SMI_SECONDS = 20.0


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def free_disk(folder: Path) -> dict[str, Any]:
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total, "writable": os.access(folder, os.W_OK | os.X_OK)}


def importable(module: str) -> bool:
    """Returns True if a module is found. It is not executed, but its parent packages are."""
    # A folder without Python files, as an uninstalled package may leave one, is not a module; a file is one.
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
        output = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = (line.rpartition(",") for line in output.splitlines())
    return [{"name": name.strip(), "memory": int(mib) * 2**20} for name, _, mib in rows if mib.strip().isdigit()]
