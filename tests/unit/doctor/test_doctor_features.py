"""Tests of optional features: the pools that need one, and the nodes that lack it and have room for their workers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.run.features import feature_findings, needed
from async_flowrl.run.findings import FAILED, OK, WARNING, Finding
from async_flowrl.run.machines import Machine, seats
from separation.cluster_probe import Node
from separation.group import PoolSpec

POOLS = (
    PoolSpec("trainer", "pkg.module:factory", 2, gpus_per_worker=1, process_group=True),
    PoolSpec("rollout", "pkg.module:factory", 2, gpus_per_worker=1),
    PoolSpec("reward", "pkg.module:factory", 1),
)
OWN = "reward.terms.mine={name: 'my_http_logs.rewards:length'}"
OUR_SERVER = "{command: 'async-flowrl serve-rewards color --port {port}'}"


def config(*words: str) -> Config:
    made: Config = compose_config("one_step_off", words)
    return made


def node(name: str, **resources: float) -> Machine:
    return Machine(name, {"gpus": []}, resources={"CPU": 8.0, **resources})


def found(given: Config, machines: list[Machine], lacks: Mapping[str, Mapping[str, str]]) -> dict[str, Finding]:
    """Subject without its end → the finding; `lacks` holds the nodes that lack something."""
    told = [replace(machine, lacks=lacks.get(machine.name, {})) for machine in machines]
    findings = feature_findings(given, POOLS, told)
    return {finding.name.removesuffix(" on the nodes"): finding for finding in findings}


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ((), {}),
        (("rollout.engine=vllm_omni",), {"vllm-omni": ["rollout"]}),
        (("checkpoint_engine.transport=pynccl",), {"cupy": ["trainer", "rollout"]}),
        (("checkpoint_engine.transport=nccl", "placement=shared"), {"NCCL": ["shared"]}),
        (("+reward.terms.hps={name: hpsv2, workers: 1}",), {"reward hps": ["reward/hps"]}),
        (("+evaluate.reward.terms.hps={name: hpsv2.1}",), {"reward hps": ["reward"]}),
        ((f"+{OWN}",), {}),
        ((f"+reward.terms.far={{serve: {OUR_SERVER}}}",), {"serve-rewards": ["server/far"]}),
        (("+reward.terms.far={serve: {command: 'uv run serve-rewards --port {port}'}}",), {}),
    ],
    ids=str,
)
def test_a_feature_is_needed_by_the_pools_whose_workers_use_it(
    words: tuple[str, ...], features: dict[str, Any]
) -> None:
    assert needed(config(*words)) == features


def test_nodes_with_room_for_a_worker_must_have_what_it_needs() -> None:
    given = config("checkpoint_engine.transport=pynccl", "+reward.terms.hps={name: hpsv2}")
    head, first, second = node("head"), node("first", GPU=4), node("second", GPU=4)
    no_cupy = {"cupy": "no cupy: pip install"}
    fine = found(given, [head, first, second], {"head": no_cupy})
    assert fine["optional cupy"].status == OK
    assert fine["optional reward hps"].status == OK
    lacks = {"second": no_cupy, "head": {**no_cupy, "reward hps": "no ftfy: pip install"}}
    wrong = found(given, [head, first, second], lacks)
    assert {finding.status for finding in wrong.values()} == {FAILED}
    assert wrong["optional cupy"].sentence == "second (room for trainer, rollout): no cupy: pip install"
    assert wrong["optional reward hps"].sentence == "head (room for reward): no ftfy: pip install"
    assert "extra hps" in wrong["optional reward hps"].advice


def test_workers_find_a_place_now_or_later_or_never() -> None:
    """What others hold is not free; of an elastic pool the least count."""
    rollout = PoolSpec("rollout", "pkg.module:factory", 4, gpus_per_worker=1, min_workers=2, max_workers=6)
    wanted = (POOLS[0], rollout, POOLS[2])

    def status(exists: float, free: float) -> str:
        node = Node("1", "10.0.0.1", {"CPU": 16.0, "GPU": exists}, {"CPU": 16.0, "GPU": free})
        return seats(wanted, [node]).status

    assert (status(5, 5), status(5, 4), status(5, 3), status(3, 3)) == (OK, OK, WARNING, FAILED)
