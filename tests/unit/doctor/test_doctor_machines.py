"""Tests of findings on machines: differences between nodes, and resources that are too small, by name."""

from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import plan_memory
from async_flowrl.run.findings import FAILED, OK, WARNING, Finding
from async_flowrl.run.machines import Machine, broadcast_finding, machine_finding, same_findings
from async_flowrl.run.preflight import (
    disk_findings,
    memory_finding,
    run_folder,
    store_finding,
)

GB = 10**9
PROCESSES = [("trainer rank", 4 * GB)] * 2 + [("rollout worker", 3 * GB)] * 2


def machine(name: str = "a", **changes: Any) -> Machine:
    disk = {"free": 100 * GB, "total": 200 * GB, "device": 1, "writable": True}
    facts = {
        "host": name,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "code": {"async_flowrl": "c" * 12},
        "cores": 8,
        "memory": 32 * GB,
        "shm": 16 * GB,
        "disks": dict.fromkeys(("/tmp/ray", run_folder(Config())), disk),
        "temporary": "/tmp/ray",
        "sockets": None,
        "lacking": [],
        "marked": True,
        "gpus": [],
    }
    return Machine(name, {**facts, **changes})


def by_name(findings: Any) -> Mapping[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_equal_nodes_are_ok_and_the_one_that_differs_is_named() -> None:
    here = machine("here").facts
    same = by_name(same_findings(here, [machine("a"), machine("b")]))
    assert {finding.status for finding in same.values()} == {OK}
    other = machine(
        "b", versions={"python": "3.11.7", "torch": "2.12.1"}, code={"async_flowrl": "d" * 12}, lacking=["my_rewards"]
    )
    found = by_name(same_findings(here, [machine("a"), other]))
    assert found["versions of the nodes"].status == FAILED
    assert found["versions of the nodes"].sentence == "b has another torch (2.12.1, here 2.13.0)"
    assert found["code"].status == FAILED and "b has another async_flowrl (dddddddddddd" in found["code"].sentence
    assert found["modules of your own"].sentence == "not found: my_rewards on b"


def test_memory_is_enough_altogether_and_for_the_largest_process() -> None:
    assert memory_finding(PROCESSES, [machine()]).status == OK
    assert memory_finding(PROCESSES, [machine(memory=10 * GB)]).status == FAILED
    assert memory_finding(PROCESSES, [machine(name, memory=int(3.5 * GB)) for name in "abcde"]).status == FAILED
    nodes = [machine(name, memory=10 * GB) for name in "abc"]
    assert memory_finding(PROCESSES, nodes).status == OK


@pytest.mark.parametrize(
    ("shm", "memory", "status"),
    [(16 * GB, 32 * GB, OK), (64_000_000, 32 * GB, WARNING), (16 * GB, 6 * GB, FAILED), (0, 32 * GB, OK)],
)
def test_the_object_store_is_as_large_as_ray_makes_it(shm: int, memory: int, status: str) -> None:
    """A container's /dev/shm of 64 MB makes it slow, not small."""
    from ray._private.utils import resolve_object_store_memory

    found = store_finding(2 * GB, [machine(shm=shm, memory=memory)])
    assert found.status == status and ("--shm-size" in found.advice) == (status == WARNING)
    if shm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: shm)
            assert int(machine(shm=shm, memory=memory).object_store) == resolve_object_store_memory(memory)


def test_a_run_directory_that_is_full_locked_or_not_shared() -> None:
    config: Config = compose_config("sync")
    plan, folder = plan_memory(config), run_folder(config)

    def statuses(here: Machine, *others: Machine) -> list[str]:
        return [finding.status for finding in disk_findings(config, plan, here, [here, *others])]

    disks = machine().facts["disks"]
    fine = {"free": 100 * GB, "total": 200 * GB, "writable": True}
    here = machine(disks={**disks, folder: fine})
    assert statuses(here) == [OK]
    assert statuses(machine(disks={**disks, folder: {**fine, "free": GB // 10}})) == [FAILED]
    assert statuses(machine(disks={**disks, folder: {**fine, "writable": False}})) == [FAILED]
    assert statuses(here, machine("b")) == [OK, OK]
    assert statuses(here, machine("b", marked=False)) == [OK, WARNING]
    blind = machine("a", marked=False, disks={**disks, folder: fine})
    assert statuses(blind, machine("b", marked=False)) == [OK, FAILED]


@pytest.mark.parametrize(("free", "status"), [(5.1, OK), (4.9, WARNING), (0.3, WARNING), (0.1, FAILED)])
def test_a_disk_to_which_ray_could_not_spill_is_a_warning_and_a_full_one_a_failure(free: float, status: str) -> None:
    disk = {"free": free * GB, "total": 100 * GB, "device": 1, "writable": True}
    assert machine_finding(machine(disks={"/tmp/ray": disk})).status == status


def test_a_broadcast_names_the_node_that_is_slow() -> None:
    fast = broadcast_finding({"a": 0.001, "b": 0.1}, 32_000_000, 64_000_000)
    assert fast.status == OK and "a version of 64.0 MB takes 0.20 s" in fast.sentence
    slow = broadcast_finding({"a": 0.001, "b": 3.2}, 32_000_000, 64_000_000)
    assert slow.status == WARNING and "b is slow" in slow.advice
