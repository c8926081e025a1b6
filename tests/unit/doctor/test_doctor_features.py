"""Tests of optional features: which a configuration needs, and the nodes that lack it."""

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.run.features import feature_findings, needed
from async_flowrl.run.findings import FAILED, OK, WARNING
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


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ((), []),
        (("rollout.engine=vllm_omni",), ["vllm-omni"]),
        (("checkpoint_engine.transport=pynccl",), ["cupy"]),
        (("checkpoint_engine.transport=nccl",), ["NCCL"]),
        (("+reward.terms.hps={name: hpsv2, workers: 1}",), ["reward hps"]),
        (("+evaluate.reward.terms.hps={name: hpsv2.1}",), ["reward hps"]),
        ((f"+{OWN}",), []),
        ((f"+reward.terms.far={{serve: {OUR_SERVER}}}",), ["serve-rewards"]),
        (("+reward.terms.far={serve: {command: 'uv run serve-rewards --port {port}'}}",), []),
    ],
    ids=str,
)
def test_what_a_configuration_needs(words: tuple[str, ...], features: list[str]) -> None:
    assert needed(config(*words)) == features


def test_nodes_that_lack_what_is_needed_are_named() -> None:
    given = config("checkpoint_engine.transport=pynccl", "+reward.terms.hps={name: hpsv2}")
    lacks = {"head": {"cupy": "no cupy: pip install"}, "first": {"cupy": "no cupy: pip install"}}

    def statuses(*names: str) -> list[str]:
        machines = [Machine(name, {}, lacks=lacks.get(name, {})) for name in names]
        return [finding.status for finding in feature_findings(given, machines)]

    assert statuses("second", "third") == [OK, OK]
    assert statuses("head", "second") == [WARNING, OK]
    assert statuses("head", "first") == [FAILED, OK]
    machines = [Machine(name, {}, lacks=lacks.get(name, {})) for name in ("head", "second")]
    assert next(feature_findings(given, machines)).sentence.startswith("head: ")


def test_workers_find_a_place_now_or_later_or_never() -> None:
    """What others hold is not free; of an elastic pool the least count."""
    rollout = PoolSpec("rollout", "pkg.module:factory", 4, gpus_per_worker=1, min_workers=2, max_workers=6)
    wanted = (POOLS[0], rollout, POOLS[2])

    def status(exists: float, free: float) -> str:
        node = Node("1", "10.0.0.1", {"CPU": 16.0, "GPU": exists}, {"CPU": 16.0, "GPU": free})
        return seats(wanted, [node]).status

    assert (status(5, 5), status(5, 4), status(5, 3), status(3, 3)) == (OK, OK, WARNING, FAILED)
