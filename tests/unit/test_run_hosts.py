"""Tests of what a run asks its workers about the memory of their nodes, on pools of threads."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.host import Hosts, NodeProcesses
from async_flowrl.policies.stored import FILE
from async_flowrl.run import nodes as hosts
from async_flowrl.run.nodes import look_at, ready_nodes
from async_flowrl.run.prepare import Prepared, prepare
from separation import node as memory
from separation.cluster import cluster
from separation.group import PoolSpec, WorkerGroup
from separation.node import NodeMemory

TOY = "tests.unit.separation.toy:Toy"
POOLS = (
    PoolSpec("server/judge", TOY, 1, lanes=("wait", "stop")),
    PoolSpec("rollout", TOY, 2, lanes=("sync", "control")),
    PoolSpec("trainer", TOY, 2, lanes=("publish", "save", "control")),
    PoolSpec("reward", TOY, 1),
)


def asked(
    check: Callable[[Config, Hosts], Sequence[str]],
    prepared: Prepared,
    *,
    busy: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Has `ready_nodes` ask the pools while lanes are taken; `check` compares what they say."""

    async def main() -> None:
        async with cluster(POOLS, backend="local", start_deadline=10) as groups:
            waits = [
                asyncio.create_task(worker.call("wait", lane=lane))
                for pool, lanes in (busy or {}).items()
                for worker in groups[pool].workers
                for lane in lanes
            ]
            await asyncio.sleep(0)
            async with asyncio.timeout(10):
                await ready_nodes(prepared, groups, {"trainer": 7})
            for worker in (worker for pool in busy or {} for worker in groups[pool].workers):
                await worker.call("release", lane=hosts.quick_lane(groups[worker.pool].spec))
            await asyncio.gather(*waits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "check_hosts", check)
        asyncio.run(main())


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """A run whose model has one tensor."""
    (tmp_path / "transformer").mkdir()
    save_file({"a": torch.zeros(3)}, tmp_path / "transformer" / FILE)
    ready = prepare(compose_config("one_step_off", [f"output_dir={tmp_path / 'run'}"]))
    return replace(ready, model=replace(ready.model, path=str(tmp_path), revision=None))


def test_nodes_are_compared_while_reward_servers_start_and_tickets_are_made(prepared: Prepared) -> None:
    seen: list[Hosts] = []
    busy = {"server/judge": ("main", "wait"), "trainer": ("main", "publish", "save"), "rollout": ("sync",)}
    asked(lambda config, of: seen.append(of) or (), prepared, busy=busy)  # type: ignore[func-returns-value]
    ((node,),) = (of.nodes for of in seen)
    assert node.workers == {"trainer": (0, 1), "server/judge": (0,), "rollout": (0, 1), "reward": (0,)}
    assert node.memory.total == memory.total_memory()
    assert seen[0].devices == {"trainer": 7} and seen[0].stored.transformer == {"a": 3}


def fails() -> NodeMemory:
    raise OSError("no such figures")


def hangs() -> NodeMemory:
    threading.Event().wait(1.0)
    raise AssertionError("nobody waits any more")


@pytest.mark.parametrize(
    ("fault", "said"),
    [(fails, "no such figures"), (hangs, "DeadlineExceeded: looking at the memory of the nodes was not done within")],
)
def test_a_worker_that_cannot_say_what_its_node_has_ends_no_run(
    fault: object, said: str, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(memory, "node_memory", fault)
    with caplog.at_level(logging.INFO):
        asked(lambda config, of: pytest.fail("compared"), prepared)
    assert f"the nodes' memory is not compared with a plan: {said}" in caplog.text


def test_a_model_without_safetensors_files_is_not_compared(
    prepared: Prepared, caplog: pytest.LogCaptureFixture
) -> None:
    (Path(prepared.model.path) / "transformer" / FILE).unlink()
    with caplog.at_level(logging.INFO):
        asked(lambda config, of: pytest.fail("compared"), prepared)
    assert "only safetensors weights are loaded" in caplog.text


def test_workers_of_one_address_in_two_containers_are_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers of one machine with its network; a third node has another address."""
    first, second = NodeMemory("m", 100, 50, place="cgroup:[1] a"), NodeMemory("m", 100, 40, place="cgroup:[2] a")
    third = NodeMemory("n", 100, 30, place="cgroup:[1] a")
    pools = (PoolSpec("rollout", TOY, 3, lanes=("control",)), PoolSpec("trainer", TOY, 2, lanes=("control",)))
    there = {"trainer-0": second, "trainer-1": first, "rollout-0": first, "rollout-1": second, "rollout-2": third}
    # Each worker sees the memory that stands here for the name of its thread.
    monkeypatch.setattr(memory, "node_memory", lambda: there[threading.current_thread().name.partition("/")[0]])

    async def main() -> tuple[NodeProcesses, ...]:
        async with cluster(pools, backend="local", start_deadline=10) as groups:
            named: Mapping[str, WorkerGroup] = groups
            named["rollout"].workers[2].node = "10.0.0.2"
            return await look_at(named)

    assert asyncio.run(main()) == (
        NodeProcesses("127.0.0.1", second, {"trainer": (0,), "rollout": (1,)}),
        NodeProcesses("127.0.0.1", first, {"trainer": (1,), "rollout": (0,)}),
        NodeProcesses("10.0.0.2", third, {"rollout": (2,)}),
    )
