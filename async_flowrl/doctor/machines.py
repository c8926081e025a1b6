"""Findings on the machines of a run: facts of each, equality of their software, and room for a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.doctor.findings import FAILED, OK, WARNING, Finding
from async_flowrl.doctor.needs import Needs
from async_flowrl.memory.host import Process
from separation.group import PoolSpec
from separation.placement import holds, needs_of, share_of_node, totals

GIB, GB = 2**30, 10**9
SPILL_SHARE = 0.95
"""Used share of a disk above which Ray writes no objects to it (its local_fs_capacity_threshold). Ray then fails to
create those for which its object store has no room."""
LEAST_DISK = GB // 5
"""Bytes on disk that the logs of Ray need at least."""
STORE_SHARE, SHM_SHARE, SMALL_STORE, LARGEST_STORE = 0.3, 0.95, 10 * GB, 200 * GB
"""Ray's default size of the object store: this share of the memory; above SMALL_STORE bytes at most this share of
/dev/shm. A store that does not fit into /dev/shm is put into Ray's folder for temporary files."""
SAME_CODE = "install the same there, or put both on one file system; a node with other code would give other weights"


@dataclass(frozen=True)
class Machine:
    """One node with its `facts` (facts.py). `store` is its object store in bytes; 0 if the run starts Ray itself."""

    name: str
    facts: Mapping[str, Any]
    store: float = 0.0
    resources: Mapping[str, float] | None = None
    """The resources that Ray knows of the node; None if the run starts Ray itself."""
    address: str = ""
    """The node's address as Ray knows it; empty if the run starts Ray itself."""

    @property
    def memory(self) -> int:
        return int(self.facts["memory"])

    @property
    def object_store(self) -> float:
        """Bytes of the object store; without a cluster, the size that Ray would choose."""
        most = min(LARGEST_STORE, max(SMALL_STORE, SHM_SHARE * self.facts["shm"]))
        return self.store or min(STORE_SHARE * self.memory, most)

    @property
    def store_on_disk(self) -> bool:
        """True if a cluster that the run starts here would have its object store outside /dev/shm, which is slower."""
        return not self.store and 0 < self.facts["shm"] < self.object_store

    def disk(self, folder: str) -> Mapping[str, Any]:
        """Returns the facts of the file system of one of the folders asked for."""
        facts: Mapping[str, Any] = self.facts["disks"][folder]
        return facts


def machine_finding(machine: Machine) -> Finding:
    """Describes a node in one line; failed if its disk is full, a warning if Ray could not spill objects to it."""
    facts, temporary = machine.facts, machine.disk(machine.facts["temporary"])
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    kinds = ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    sentence = (
        f"{facts['host']}: {facts['cores']} cores, {kinds}; free: {machine.memory / GIB:.1f} GiB of memory, "
        f"{facts['shm'] / GIB:.1f} GiB in /dev/shm, {temporary['free'] / GIB:.1f} GiB in {facts['temporary']}"
    )
    if temporary["free"] < LEAST_DISK:
        advice = "Ray has no room for its logs there: free some, or ray start --temp-dir"
        return Finding(f"node {machine.name}", FAILED, sentence, advice, facts)
    if temporary["free"] < (1 - SPILL_SHARE) * temporary["total"]:
        advice = (
            f"the disk is more than {SPILL_SHARE:.0%} full, so Ray fails to create objects that its object store has "
            "no room for: free some, or ray start --temp-dir"
        )
        return Finding(f"node {machine.name}", WARNING, sentence, advice, facts)
    return Finding(f"node {machine.name}", OK, sentence, figures=facts)


def same_findings(here: Mapping[str, Any], machines: Sequence[Machine]) -> Iterator[Finding]:
    """Compares versions, code and modules with this machine; a failure names the nodes that differ."""
    differing = [
        f"{machine.name} has {package} {number} instead of {here['versions'][package]}"
        for machine in machines
        for package, number in machine.facts["versions"].items()
        if number != here["versions"][package]
    ]
    said = ", ".join(f"{package} {number}" for package, number in here["versions"].items())
    yield (
        Finding("versions of the nodes", FAILED, "; ".join(differing), "install the same everywhere")
        if differing
        else Finding("versions of the nodes", OK, f"{said} on {_all(machines)}", figures=here["versions"])
    )
    others = [
        f"{machine.name} has another {package} ({machine.facts['code'].get(package)}, here {digest})"
        for machine in machines
        for package, digest in here["code"].items()
        if machine.facts["code"].get(package) != digest
    ]
    code = ", ".join(f"{package} {digest}" for package, digest in here["code"].items())
    yield (
        Finding("code", FAILED, "; ".join(others), SAME_CODE)
        if others
        else Finding("code", OK, f"{code} on {_all(machines)}", figures=here["code"])
    )
    lacking = [f"{module} on {machine.name}" for machine in machines for module in machine.facts["lacking"]]
    if lacking:
        advice = "put the module on the import path there, or install it as a package"
        yield Finding("modules of your own", FAILED, f"not found: {', '.join(lacking)}", advice)


def interface_findings(machines: Sequence[Machine]) -> Iterator[Finding]:
    """Warns of nodes on which gloo would use another address than Ray.

    gloo is told the name of an interface and uses the first address of it. Nodes with older code do not report their
    interfaces; `same_findings` reports such nodes.
    """
    others = [
        f"{machine.name} has {', '.join(addresses)} on {name}, and Ray uses {machine.address}"
        for machine in machines
        for name, addresses in machine.facts.get("interfaces", {}).items()
        if machine.address in addresses[1:]
    ]
    if others:
        advice = "trainer ranks meet at an interface's first address: give Ray that one (ray start --node-ip-address)"
        yield Finding("interfaces", WARNING, "; ".join(others), advice)


def room_for(spec: PoolSpec, machines: Sequence[Machine]) -> list[Machine]:
    """Returns the nodes that could hold a worker of the pool if nothing else ran there; without a cluster, all.

    With `workers_per_node` a node must hold as many.
    """
    exists = totals(machine.resources for machine in machines if machine.resources is not None)
    bundle = share_of_node(needs_of(spec, exists), spec.workers_per_node or 1)
    return [one for one in machines if one.resources is None or holds(one.resources, bundle)]


def _all(machines: Sequence[Machine]) -> str:
    return "this machine" if len(machines) == 1 else f"all {len(machines)} nodes"


def together(machines: Sequence[Machine]) -> int:
    """Returns the free memory of all nodes in bytes; nodes on one machine together count at most its free memory."""
    of_boot: dict[str, list[Machine]] = {}
    for machine in machines:
        of_boot.setdefault(machine.facts["boot"], []).append(machine)
    return sum(
        min(sum(one.memory for one in same), max(int(one.facts["machine_memory"]) for one in same))
        for same in of_boot.values()
    )


def memory_findings(needs: Needs, machines: Sequence[Machine]) -> Iterator[Finding]:
    """Compares the planned host memory, in total and of the largest process, and object stores with what is free."""
    free, largest = together(machines), needs.largest
    best = max(machines, key=lambda machine: machine.memory)
    counted = " + ".join(parts_of(p) for p in needs.processes if p.count)
    sentence = f"{needs.memory / GIB:.1f} GiB planned ({counted}), {free / GIB:.1f} free on {_all(machines)}"
    sentence += "".join(f"; {joining(p, free - needs.memory)}" for p in needs.processes if p.later)
    figures = {"planned": needs.memory, "free": free}
    advice = "fewer workers, a smaller batch, or machines with more: `async-flowrl plan --memory` shows the parts"
    if needs.memory > free:
        yield Finding("memory", FAILED, sentence, advice, figures)
    elif largest.on_a_node > best.memory:
        processes = f"{largest.per_node} {largest.pool} process{'es' * (largest.per_node > 1)}"
        lacks = f"{sentence}; no node has {largest.on_a_node / GIB:.1f} GiB for {processes}"
        yield Finding("memory", FAILED, lacks, advice, figures)
    else:
        yield Finding("memory", OK, sentence, figures=figures)
    store = sum(machine.object_store for machine in machines)
    sentence = f"{needs.store / GB:.2f} GB of images and trajectories wait at most, there is room for {store / GB:.2f}"
    advice = "fewer or smaller images per step, a smaller max_staleness, or a larger /dev/shm and --object-store-memory"
    figures = {"planned": needs.store, "room": int(store)}
    if needs.store > store:
        yield Finding("object store", FAILED, sentence, advice, figures)
    elif slow := [machine for machine in machines if machine.store_on_disk]:
        facts = slow[0].facts
        sentence += f"; it would lie in {facts['temporary']}, /dev/shm has {facts['shm'] / GB:.2f} GB"
        yield Finding("object store", WARNING, sentence, "a larger /dev/shm: docker run --shm-size", figures)
    else:
        yield Finding("object store", OK, sentence, figures=figures)


def parts_of(process: Process) -> str:
    """Returns e.g. "4 × trainer 6.0 + 2 × copy for a checkpoint 1.5", in GiB; copies below 0.05 GiB are left out."""
    each = f"{process.count} × {process.pool} {process.bytes / GIB:.1f}"
    if process.copy < 0.05 * GIB:
        return each
    return f"{each} + {process.copies} × copy for a checkpoint {process.copy / GIB:.1f}"


def joining(process: Process, free: int) -> str:
    """Returns how many more workers of an elastic pool may join, and for how many `free` bytes of memory are enough."""
    room = min(process.later, max(0, free) // process.bytes)
    return (
        f"{process.later} more {process.pool} workers of {process.bytes / GIB:.1f} may join, {room} of them in what is "
        "left now"
    )


def disk_findings(config: Config, needs: Needs, here: Machine, machines: Sequence[Machine]) -> Iterator[Finding]:
    """Compares the planned sizes of the run directory and of the model files with the free disk space."""
    folder = run_folder(config)
    disk = here.disk(folder)
    sentence = f"{folder}: {needs.run_directory / GB:.2f} GB planned, {disk['free'] / GB:.1f} free"
    figures = {"planned": needs.run_directory, "free": disk["free"]}
    if not disk["writable"]:
        yield Finding("run directory", FAILED, f"{folder} cannot be written", "set output_dir to a folder of yours")
    elif needs.run_directory > disk["free"]:
        yield Finding("run directory", FAILED, sentence, "free some, set output_dir, or lower save.keep", figures)
    else:
        yield Finding("run directory", OK, sentence, figures=figures)
    if len(machines) > 1:
        yield shared_finding(folder, machines)
    if config.model.path == "tiny" or Path(config.model.path).expanduser().exists():
        return
    free = {machine.name: machine.disk(machine.facts["cache"])["free"] for machine in machines}
    tight = [f"{name} ({left / GB:.1f} free)" for name, left in free.items() if left < needs.model_files]
    sentence = f"{config.model.path} takes {needs.model_files / GB:.1f} GB in the cache of each node"
    if tight:
        advice = "where the files are there already nothing is missing; else set HF_HOME where Ray is started"
        yield Finding("model files", WARNING, f"{sentence}: too much for {', '.join(tight)}", advice)
    else:
        yield Finding("model files", OK, sentence)


def run_folder(config: Config) -> str:
    """Returns the absolute path of the run directory."""
    return str(Path(config.output_dir).expanduser().absolute())


def shared_finding(folder: str, machines: Sequence[Machine]) -> Finding:
    """Reports whether every node sees the files that this machine writes into the run directory."""
    blind = [machine.name for machine in machines if not machine.facts["marked"]]
    name = "shared run directory"
    if not blind:
        return Finding(name, OK, f"seen by {_all(machines)}")
    sentence = f"not seen on {', '.join(blind)}"
    advice = "set output_dir to a file system that all nodes see: trainer ranks write and read checkpoints there"
    return Finding(name, FAILED if len(blind) == len(machines) else WARNING, sentence, advice)
