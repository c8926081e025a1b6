"""Made-up nodes and a made-up model, for tests of the comparison of a run's host memory with its nodes."""

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.node_needs import GIB, total_need
from async_flowrl.memory.nodes import Hosts, NodeProcesses
from async_flowrl.policies.stored import StoredElements
from separation.node_memory import NodeMemory

ELEMENTS, TEXT = 2_048_000_000, 1_000_000_000
"""Of the network, of which 40 % are in each of two blocks, and of the text encoders. A version fills whole pages."""
STORED = StoredElements({"layers.0.weight": 819_200_000, "layers.1.weight": 819_200_000, "proj": 409_600_000}, TEXT, 0)
VERSION = 2 * ELEMENTS
"""Bytes of a version in bfloat16."""


def config(*overrides: str) -> Config:
    """Two trainer ranks and two rollout workers that train whole weights, one step off."""
    given = ["tune=full", "trainer.num_workers=2", "rollout.num_workers=2", "max_staleness=1", "evaluate.every=0"]
    composed = compose_config("one_step_off", [*given, "model.dtype=bfloat16", "trainer.shard=none", *overrides])
    if composed.runtime.backend == "local":
        composed.trainer.num_workers = 1
    return composed


def node(total: float, free: float | None = None, **workers: tuple[int, ...]) -> NodeProcesses:
    """A node with so many bytes; without `workers` all of them are on it, and one for rewards."""
    there = workers or {"trainer": (0, 1), "rollout": (0, 1), "reward/color": (0,)}
    memory = NodeMemory("a", round(total), round(total if free is None else free))
    return NodeProcesses("10.0.0.1", memory, there, controller="trainer" in there)


def on(*nodes: NodeProcesses, gpus: bool = True, each: float = 80 * GIB) -> Hosts:
    """These nodes, with GPUs of `each` bytes or without."""
    return Hosts(nodes, STORED, {"trainer": round(each), "rollout": round(each)} if gpus else {})


def total(given: Config, of: NodeProcesses, *, gpus: bool = True) -> int:
    return total_need(given, on(of, gpus=gpus), of)


def gpus(given: Config) -> Config:
    given.trainer.gpus_per_worker = given.rollout.gpus_per_worker = 1.0
    return given
