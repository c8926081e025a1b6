"""Survey of a Ray cluster from outside of any run: its nodes, a function on each node, and a broadcast."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from separation.ray_cluster import RayConnection
from separation.ray_internals import free_by_node
from separation.resources import ResourcesMissing
from separation.worker_process import resolve

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    resources: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def name(self) -> str:
        # Address and short id, because several nodes of a pretended cluster may have the same address.
        return f"{self.address} {self.id[:6]}"


def _run(place: str, *arguments: Any) -> Any:
    return resolve(place)(*arguments)


def _fetch(refs: Sequence[Any]) -> float:
    began = time.perf_counter()
    ray.get(list(refs))
    return time.perf_counter() - began


class Survey:
    """A survey of one cluster by tasks on its nodes. Methods return node id → the value or the error."""

    def __init__(self, nodes: Sequence[Node], seconds: float) -> None:
        # `seconds` is the time limit for the answer of a node.
        self.nodes, self._seconds = nodes, seconds

    def run(self, place: str, *arguments: Any) -> dict[str, Any]:
        return self._answers({node.id: _started(node.id, _run, place, *arguments) for node in self.nodes})

    def broadcast(self, nbytes: int) -> dict[str, float | Exception]:
        """Stores `nbytes` bytes on this node; returns the seconds until each node, all at once, has fetched them."""
        ref = ray.put(np.zeros(nbytes, dtype=np.uint8))
        return self._answers({node.id: _started(node.id, _fetch, [ref]) for node in self.nodes})

    def _answers(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._seconds)
        answers: dict[str, Any] = {}
        for node, ref in refs.items():
            try:
                answers[node] = ray.get(ref, timeout=0)
            except exceptions.GetTimeoutError:
                answers[node] = TimeoutError(f"no answer within {self._seconds:g} s")
            except exceptions.RayTaskError as error:
                answers[node] = error.cause
            except exceptions.RayError as error:
                answers[node] = error
        return answers


@contextmanager
def survey(address: str, *, nodes: int = 1, wait: float = 0.0, seconds: float = 120.0) -> Iterator[Survey]:
    """Joins the cluster at `address`, yields a Survey of it, and leaves the cluster unchanged.

    It waits at most `wait` seconds for `nodes` living nodes, and then surveys those that live. `seconds` limits a
    node's answer. Raises ResourcesMissing if nothing answers at the address, and ConnectionError if Ray finds no
    cluster there.
    """
    until = time.monotonic() + wait
    connection = _joined(address, until)
    try:
        while len(nodes_now := living()) < nodes and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        yield Survey(nodes_now, seconds)
    finally:
        connection.close()


def _joined(address: str, until: float) -> RayConnection:
    while True:
        try:
            return RayConnection([], address)
        except (ResourcesMissing, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)


def living() -> list[Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free)
        for node, free in zip(alive, free_by_node(alive), strict=True)
    ]
    return sorted(nodes, key=lambda node: node.name)


def _started(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    # Returns the ref of the result of a task on the node. It reserves no CPU, because a run may hold all of them.
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(*arguments)
