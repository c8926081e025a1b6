"""Tests of findings on machines: differences between nodes, and resources that are too small, by name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.doctor import facts as told
from async_flowrl.doctor import start
from async_flowrl.doctor.facts import Asked
from async_flowrl.doctor.findings import FAILED, OK, WARNING, Finding
from async_flowrl.doctor.machines import (
    Machine,
    disk_findings,
    interface_findings,
    machine_finding,
    memory_findings,
    run_folder,
    same_findings,
    together,
)
from async_flowrl.doctor.needs import Needs
from async_flowrl.doctor.network import broadcast_finding, clock_finding
from async_flowrl.doctor.start import Wanted, marked, modules_of, reached, told_here
from async_flowrl.memory.host import Process
from separation.cluster_probe import Node, Offset

GB = 10**9
NEEDS = Needs(
    (Process("trainer", 2, 4 * GB), Process("rollout", 2, 3 * GB)),
    store=2 * GB,
    run_directory=3 * GB,
    model_files=50 * GB,
    version=10**6,
)


def machine(name: str = "a", **changes: Any) -> Machine:
    disk = {"free": 100 * GB, "total": 200 * GB, "device": 1, "writable": True}
    facts = {
        "host": name,
        "boot": name,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "code": {"async_flowrl": "c" * 12},
        "cores": 8,
        "memory": 32 * GB,
        "machine_memory": 32 * GB,
        "shm": 16 * GB,
        "disks": dict.fromkeys(("/tmp/ray", "/cache", run_folder(Config())), disk),
        "temporary": "/tmp/ray",
        "cache": "/cache",
        "lacking": [],
        "marked": True,
        "gpus": [],
        "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
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
    assert found["versions of the nodes"].sentence == "b has torch 2.12.1 instead of 2.13.0"
    assert found["code"].status == FAILED and "b has another async_flowrl (dddddddddddd" in found["code"].sentence
    assert found["modules of your own"].sentence == "not found: my_rewards on b"


def test_an_interface_whose_first_address_is_not_rays_is_named() -> None:
    two = {"eth0": ["192.168.0.7", "10.0.0.7"]}
    fine = Machine("a", machine("a").facts, address="10.0.0.1")
    assert not list(interface_findings([fine, Machine("b", machine("b", interfaces=two).facts, address="192.168.0.7")]))
    (found,) = interface_findings([fine, Machine("b", machine("b", interfaces=two).facts, address="10.0.0.7")])
    assert found.status == WARNING and "ray start --node-ip-address" in found.advice
    assert found.sentence == "b has 192.168.0.7, 10.0.0.7 on eth0, and Ray uses 10.0.0.7"


def test_a_node_whose_older_code_tells_no_interfaces_does_not_end_the_doctor() -> None:
    told = {name: fact for name, fact in machine("a").facts.items() if name != "interfaces"}
    assert not list(interface_findings([Machine("a", told, address="10.0.0.1")]))


def test_memory_is_enough_altogether_and_for_the_largest_process() -> None:
    assert by_name(memory_findings(NEEDS, [machine()]))["memory"].status == OK
    assert by_name(memory_findings(NEEDS, [machine(memory=10 * GB)]))["memory"].status == FAILED
    many = [machine(name, memory=int(3.5 * GB)) for name in "abcde"]
    found = by_name(memory_findings(NEEDS, many))["memory"]
    assert found.status == FAILED and "GiB for 1 trainer process" in found.sentence


def test_workers_of_a_node_must_fit_on_one() -> None:
    nodes = [machine(name, memory=10 * GB) for name in "abc"]
    assert by_name(memory_findings(NEEDS, nodes))["memory"].status == OK
    together_on_one = replace(
        NEEDS, processes=(Process("trainer", 2, 4 * GB), Process("rollout", 4, 3 * GB, per_node=4))
    )
    found = by_name(memory_findings(together_on_one, nodes))["memory"]
    assert found.status == FAILED and "no node has 11.2 GiB for 4 rollout processes" in found.sentence


def test_workers_that_may_join_later_are_told_and_not_needed() -> None:
    """Two of three rollout workers that may join find the memory that the run leaves."""
    elastic = replace(NEEDS, processes=(Process("trainer", 2, 4 * GB), Process("rollout", 1, 3 * GB, later=3)))
    found = by_name(memory_findings(elastic, [machine(memory=18 * GB)]))["memory"]
    assert found.status == OK and found.figures["planned"] == 11 * GB
    assert found.sentence.endswith("; 3 more rollout workers of 2.8 may join, 2 of them in what is left now")


def test_nodes_of_one_machine_share_its_memory() -> None:
    assert together([machine("a", boot="x"), machine("b", boot="x"), machine("c")]) == 64 * GB


def test_containers_of_one_machine_have_what_each_may_take() -> None:
    pods = [machine(name, boot="x", memory=12 * GB, machine_memory=32 * GB) for name in "abc"]
    assert together(pods[:2]) == 24 * GB and together(pods) == 32 * GB


@pytest.mark.parametrize(
    ("shm", "memory", "status"),
    [(16 * GB, 32 * GB, OK), (64_000_000, 32 * GB, WARNING), (16 * GB, 6 * GB, FAILED), (0, 32 * GB, OK)],
)
def test_the_object_store_is_as_large_as_ray_makes_it(shm: int, memory: int, status: str) -> None:
    """A container's /dev/shm of 64 MB makes it slow, not small."""
    from ray._private.utils import resolve_object_store_memory

    found = by_name(memory_findings(NEEDS, [machine(shm=shm, memory=memory)]))["object store"]
    assert found.status == status and ("--shm-size" in found.advice) == (status == WARNING)
    if shm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: shm)
            assert found.figures["room"] == resolve_object_store_memory(memory)


def test_the_object_store_of_a_cluster_is_what_ray_says() -> None:
    given = machine(shm=GB)
    assert by_name(memory_findings(NEEDS, [Machine("a", given.facts, store=3.0 * GB)]))["object store"].status == OK


def test_disks_of_the_run_and_of_the_models() -> None:
    config = Config()
    config.model.path = "Qwen/Qwen-Image"
    fine = machine()
    found = by_name(disk_findings(config, NEEDS, fine, [fine]))
    assert {finding.status for finding in found.values()} == {OK}
    disk = {"free": GB, "total": 200 * GB, "device": 1, "writable": True}
    folder = run_folder(config)
    full = machine(disks={**fine.facts["disks"], folder: disk, "/cache": disk})
    found = by_name(disk_findings(config, NEEDS, full, [fine, full]))
    assert found["run directory"].status == FAILED and "3.00 GB planned, 1.0 free" in found["run directory"].sentence
    assert found["model files"].status == WARNING and "a (1.0 free)" in found["model files"].sentence
    locked = machine(disks={**fine.facts["disks"], folder: {**disk, "writable": False}})
    found = by_name(disk_findings(config, NEEDS, locked, [locked]))
    assert found["run directory"].status == FAILED and "cannot be written" in found["run directory"].sentence


def test_a_run_directory_that_nobody_else_sees() -> None:
    seen, blind = machine("a"), machine("b", marked=False)
    shared = "shared run directory"
    config = Config()
    assert by_name(disk_findings(config, NEEDS, seen, [seen, seen]))[shared].status == OK
    assert by_name(disk_findings(config, NEEDS, seen, [seen, blind]))[shared].status == WARNING
    assert by_name(disk_findings(config, NEEDS, seen, [blind, blind]))[shared].status == FAILED
    assert shared not in by_name(disk_findings(config, NEEDS, seen, [seen]))


@pytest.mark.parametrize(("free", "status"), [(5.1, OK), (4.9, WARNING), (0.3, WARNING), (0.1, FAILED)])
def test_a_disk_to_which_ray_could_not_spill_is_a_warning_and_a_full_one_a_failure(free: float, status: str) -> None:
    disk = {"free": free * GB, "total": 100 * GB, "device": 1, "writable": True}
    assert machine_finding(machine(disks={"/tmp/ray": disk})).status == status


def test_clocks_and_broadcast_name_the_node_that_is_off() -> None:
    names = {"1": "a", "2": "b"}
    assert clock_finding(names, {"1": Offset(0.0, 0.1), "2": Offset(0.4, 0.1)}).status == OK
    skewed = clock_finding(names, {"1": Offset(0.0, 0.1), "2": Offset(-180.0, 0.1)})
    assert skewed.status == WARNING and skewed.sentence == "b is 180.0 s behind"
    uncertain = clock_finding(names, {"1": Offset(0.0, 0.1), "2": Offset(3.0, 2.5)})
    assert uncertain.status == OK
    fast = broadcast_finding(names, {"1": 0.001, "2": 0.1}, 32_000_000, 64_000_000)
    assert fast.status == OK and "a version of 64.0 MB takes 0.20 s" in fast.sentence
    slow = broadcast_finding(names, {"1": 0.001, "2": 3.2}, 32_000_000, 64_000_000)
    assert slow.status == WARNING and "b is slow" in slow.advice
    silent = broadcast_finding(names, {"1": 0.001, "2": TimeoutError("no answer within 9 s")}, 32_000_000, 1)
    assert silent.status == FAILED and "b: TimeoutError: no answer within 9 s" in silent.sentence


def test_a_cluster_that_is_smaller_than_it_should_be() -> None:
    nodes = [Node("1", "10.0.0.1", {"CPU": 8.0}, {})]
    assert reached(nodes, "x:6379", Wanted()).status == OK
    assert "has 1 nodes" in reached(nodes, "x:6379", Wanted(2, 5.0)).sentence
    assert reached(nodes, "x:6379", Wanted(2, 5.0)).status == FAILED


def test_modules_that_workers_import_are_those_that_the_configuration_names() -> None:
    config = Config()
    config.algorithm.name = "my_algorithms.grpo:build"
    assert modules_of(config) == ["my_algorithms.grpo"]
    facts = cast("dict[str, Any]", told.facts(Asked(modules=("json", "surely_missing.module"))))
    assert facts["lacking"] == ["surely_missing.module"] and facts["marked"]


def refuse() -> None:
    raise PermissionError("of the body")


def test_a_folder_that_takes_no_mark_and_what_fails_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(str(tmp_path / "run")) as (mark, _):
        assert Path(mark).parent == tmp_path
    with pytest.raises(PermissionError), marked(str(tmp_path / "run")):
        refuse()
    assert not list(tmp_path.iterdir())

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", read_only)
    with marked(str(tmp_path / "run")) as said:
        assert said == ("", "")


def test_gpus_that_are_hidden_from_a_run_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"gpus": [{"name": "T400", "memory": 2 * GB}]}
    monkeypatch.setattr(start, "facts", lambda asked: dict(shown))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert told_here(Asked()).facts["gpus"] == shown["gpus"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told_here(Asked()).facts["gpus"] == []
