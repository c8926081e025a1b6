"""NUMA binding: restricts a process that owns a GPU, with all its threads, to the CPUs of the GPU's NUMA node.

Trainer and rollout workers call `bind`. torch offers the same by `torchrun --numa-binding`, which starts the processes
itself and needs `numactl`; here Ray starts the workers, so the kernel's list of local CPUs in sysfs is read.
"""

import os
from pathlib import Path
from typing import Any

PCI = Path("/sys/bus/pci/devices")


def bind() -> str:
    """Restricts this process to the CPUs near its first GPU; returns a sentence for the log that says what was done.

    Only CPUs that the process may use already (cgroups, `taskset`) are taken. Initialises CUDA if that is not done yet.
    """
    import torch

    if not torch.cuda.is_available():
        return "owns no GPU"
    properties: Any = torch.cuda.get_device_properties(0)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return bind_beside(PCI / address)


def bind_beside(device: Path) -> str:
    """Does what `bind` does, for the PCI device whose folder in sysfs is `device`."""
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
