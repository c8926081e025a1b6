"""The nodes of a run, with what each has and which of its processes are there; run/hosts.py asks them."""

from collections.abc import Mapping
from dataclasses import dataclass

from async_flowrl.policies.stored import StoredElements
from separation.node_memory import NodeMemory


@dataclass(frozen=True)
class NodeProcesses:
    """A node and the processes of the run on it."""

    address: str
    memory: NodeMemory
    workers: Mapping[str, tuple[int, ...]]
    """Pool → indices of its workers there."""
    controller: bool
    """True if the process that started the run is there."""


@dataclass(frozen=True)
class Hosts:
    """All nodes of a run on which it has workers, and the model that the workers load."""

    nodes: tuple[NodeProcesses, ...]
    stored: StoredElements
    devices: Mapping[str, int]
    """Pool → bytes of memory of its smallest device. Pools without GPUs are missing, and rollout workers of vllm_omni,
    which plan their devices themselves."""
