"""A look at a Ray cluster from outside of any run: its nodes, a function on each of them, clocks, and a broadcast."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from separation.host import resolve
from separation.placement import ResourcesMissing
from separation.ray_session import RaySession, free_by_node

_POLL_SECONDS = 0.2
CLOCK_ROUNDS = 5
"""Of a node's clock: the quickest answer is the one that says most."""


@dataclass(frozen=True)
class Node:
    """One living node; `resources` are what it has, `free` what nobody holds at the moment."""

    id: str
    address: str
    resources: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def name(self) -> str:
        """Address and short id: several nodes of a pretended cluster share an address."""
        return f"{self.address} {self.id[:6]}"


@dataclass(frozen=True)
class Offset:
    """Of a node's clock from this process's, known to within `within`; both in seconds."""

    seconds: float
    within: float


class _Probe:
    """An actor without a share of its node's CPUs, so that it starts where a run holds all of them."""

    def run(self, place: str, *arguments: Any) -> Any:
        return resolve(place)(*arguments)

    def clock(self) -> float:
        return time.time()

    def fetch(self, refs: Sequence[Any]) -> tuple[float, int]:
        """Seconds until the bytes are in this node's object store, and how many arrived."""
        began = time.perf_counter()
        (values,) = ray.get(list(refs))
        return time.perf_counter() - began, int(values.nbytes)


class Survey:
    """Of one cluster, with an actor on every node. Every answer is the value or the error, by node id."""

    def __init__(self, nodes: Sequence[Node], seconds: float) -> None:
        self.nodes, self._seconds = nodes, seconds
        self._probes = {node.id: _started_on(node.id) for node in nodes}

    def run(self, place: str, *arguments: Any) -> dict[str, Any]:
        """The result of `pkg.module:function` on every node."""
        return self._answers({node: probe.run.remote(place, *arguments) for node, probe in self._probes.items()})

    def clocks(self) -> dict[str, Offset | Exception]:
        """How far every node's clock is from this one's: half way between question and answer."""
        return {node: self._offset(probe) for node, probe in self._probes.items()}

    def _offset(self, probe: Any) -> Offset | Exception:
        found: list[Offset] = []
        for _ in range(CLOCK_ROUNDS):
            asked = time.time()
            answer = self._answers({"": probe.clock.remote()})[""]
            if isinstance(answer, Exception):
                return answer
            answered = time.time()
            found.append(Offset(answer - (asked + answered) / 2, (answered - asked) / 2))
        return min(found, key=lambda offset: offset.within)

    def broadcast(self, nbytes: int) -> dict[str, float | Exception]:
        """Seconds until every node has an object of so many bytes that was put into this node's store; all at once."""
        ref = ray.put(np.zeros(nbytes, dtype=np.uint8))
        answers = self._answers({node: probe.fetch.remote([ref]) for node, probe in self._probes.items()})
        return {node: each if isinstance(each, Exception) else each[0] for node, each in answers.items()}

    def close(self) -> None:
        for probe in self._probes.values():
            ray.kill(probe)

    def _answers(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        """What every node answers within the time; an exception where it fails or is late."""
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
    """Joins the cluster at `address`, looks at it, and leaves it as it was.

    nodes: how many it is waited for, `wait` seconds at most; the survey has those that live then.
    seconds: how long a node may take to answer.
    Raises ResourcesMissing where nothing answers at the address, ConnectionError where Ray finds no cluster.
    """
    until = time.monotonic() + wait
    session = _joined(address, until)
    try:
        while len(found := living()) < nodes and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        looked = Survey(found, seconds)
        try:
            yield looked
        finally:
            looked.close()
    finally:
        session.close()


def _joined(address: str, until: float) -> RaySession:
    """A session with the cluster, which may still be starting up to the time `until`."""
    while True:
        try:
            return RaySession([], address)
        except (ResourcesMissing, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)


def living() -> list[Node]:
    """The nodes of the cluster that this process has joined, by address."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free)
        for node, free in zip(alive, free_by_node(alive), strict=True)
    ]
    return sorted(found, key=lambda node: node.name)


def _started_on(node: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_restarts=0)(_Probe).options(scheduling_strategy=here).remote()
