"""Tests of the comparison of a run's planned host memory with its nodes, on made-up nodes and models."""

import re
from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan.host_needs import PROCESS_BYTES
from async_flowrl.plan.memory import MARGIN_SHARE
from async_flowrl.plan.meta_model import build_meta_model
from async_flowrl.plan.node_memory import GIB, advice, check_hosts, needs_on, smaller
from async_flowrl.plan.sizes import Sizes, StoredSizes
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.stored import StoredElements, stored_elements
from async_flowrl.run.hosts import Hosts, NodeProcesses
from separation.node_memory import NodeMemory

ELEMENTS = 2_000_000_000
"""Of the model of these tests, of which 800 M are in each of two blocks."""
STORED = StoredElements({"layers.0.weight": 800_000_000, "layers.1.weight": 800_000_000, "proj": 400_000_000}, 0, 0)
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


def on(*nodes: NodeProcesses, gpus: bool = True) -> Hosts:
    return Hosts(nodes, STORED, gpus)


def total(given: Config, of: NodeProcesses, *, gpus: bool = True) -> int:
    return sum(need.total for need in needs_on(given, on(of, gpus=gpus), of))


def gpus(given: Config) -> Config:
    given.trainer.gpus_per_worker = given.rollout.gpus_per_worker = 1.0
    return given


def parts(given: Config, of: NodeProcesses, *, on_gpus: bool = True) -> list[dict[str, int]]:
    return [dict(need.parts) for need in needs_on(given, on(of, gpus=on_gpus), of)]


def about(size: int) -> Any:
    """Pinned memory is rounded up to whole pages."""
    return pytest.approx(size, rel=1e-5)


def test_on_gpus_the_host_holds_versions_and_the_copy_for_a_checkpoint() -> None:
    """The first rank alone sends and copies whole weights; the controller writes them when that copy is gone."""
    first, second, *rollouts, reward, controller = parts(gpus(config()), node(1e12))
    assert first["weights, optimizer and versions"] == about(4 * VERSION), "two that may be named, and two under way"
    assert first["copy for a checkpoint"] == 12 * ELEMENTS + 2 * VERSION
    assert second == reward == controller == {"process": PROCESS_BYTES}
    assert [rollout["versions that arrive"] for rollout in rollouts] == [about(4 * VERSION)] * 2
    assert parts(gpus(config()), node(1e12, rollout=(0,))) == rollouts[:1]


def test_in_shares_every_rank_sends_and_copies_its_own() -> None:
    both = parts(gpus(config("trainer.shard=full")), node(1e12, trainer=(0, 1)))[:2]
    assert both[0] == both[1]
    assert both[0]["weights, optimizer and versions"] == about(5 * VERSION // 2), "and its share of the canary"
    assert both[0]["copy for a checkpoint"] == 6 * ELEMENTS + VERSION


def test_on_a_cpu_everything_is_in_host_memory() -> None:
    """Masters, gradient, moments, sums, the network, and versions of the weights, with the margin of the plan."""
    first, *_ = parts(config(), node(1e12), on_gpus=False)
    by_parameter = 2 + 4 + 4 + 8 + 2 * 8 + (2 + 2) * 2
    whole = by_parameter * ELEMENTS * (1 + MARGIN_SHARE)
    assert first["weights, optimizer and versions"] == pytest.approx(whole, rel=1e-6)


def test_threads_are_one_process() -> None:
    given = config("runtime.backend=local")
    here = node(1e12, trainer=(0,), rollout=(0, 1))
    needs = parts(given, here, on_gpus=False)
    assert [need for need in needs if "process" in need] == [{"process": PROCESS_BYTES}]
    apart = parts(config("trainer.num_workers=1"), here, on_gpus=False)
    assert sum(sum(need.values()) for need in needs) == sum(sum(need.values()) for need in apart) - 3 * PROCESS_BYTES


def test_enough_memory_is_not_mentioned() -> None:
    given = gpus(config())
    needed = total(given, node(1e12))
    assert check_hosts(given, on(node(2 * needed), node(2 * needed, needed - 6 * PROCESS_BYTES))) == []


def test_a_node_with_too_little_free_memory_is_a_warning_with_each_process() -> None:
    given = gpus(config())
    needed = total(given, node(1e12))
    (warning,) = check_hosts(given, on(node(2 * needed), node(2 * needed, needed - 6 * PROCESS_BYTES - 1)))
    shown = f"{(needed - 6 * PROCESS_BYTES) / GIB:.3g}"
    assert warning.startswith(f"node 10.0.0.1 has {shown} GiB of memory free, and the processes of this run on it may ")
    assert "trainer rank 45.4 (weights, optimizer and versions 14.9, copy for a checkpoint 29.8)" in warning
    assert "2 × rollout worker 15.6 (process 0.652, versions that arrive 14.9)" in warning
    assert "it would fit with rollout.versions_on=device (" in warning


def test_a_node_that_cannot_hold_its_processes_is_refused_with_settings_that_help() -> None:
    given = gpus(config())
    needed = total(given, node(1e12))
    assert check_hosts(given, on(node(needed / (1 + MARGIN_SHARE) + 10, needed))) == []
    with pytest.raises(ConfigError, match=r"^node 10.0.0.1 has .* GiB of memory, and the processes of") as said:
        check_hosts(given, on(node(1e12), node(needed / 2)))
    assert str(said.value).endswith("; allow_oom=true tries anyway")
    given.allow_oom = True
    assert check_hosts(given, on(node(needed / 2))) == [str(said.value).removesuffix("; allow_oom=true tries anyway")]


@pytest.mark.parametrize("on_gpus", [True, False])
def test_what_is_advised_makes_it_so_much_less(on_gpus: bool) -> None:
    given = config("trainer.ema_decay=0.9", "model.dtype=float32")
    given = gpus(given) if on_gpus else given
    small = node(total(given, node(1e12), gpus=on_gpus) * 0.6)
    advised = list(smaller(given, on(small, gpus=on_gpus), small))
    keys = {change.key for change in advised}
    assert {"trainer.shard", "model.dtype", "max_staleness", "trainer.ema_decay", "rollout.num_workers"} <= keys
    assert ("rollout.versions_on" in keys) == on_gpus
    shown = re.findall(r"([\w.]+)=(\w+) \(([\d.,]+) GiB\)", advice(given, on(small, gpus=on_gpus), small))
    assert 1 <= len(shown) <= 3
    for key, value, size in shown:
        (change,) = (each for each in advised if each.key == key)
        fewer = {"trainer": (0, 1), "rollout": (0,), "reward/color": (0,)} if key == "rollout.num_workers" else {}
        needed = total(change.applied(given), node(1e12, **fewer), gpus=on_gpus)
        assert f"{needed / GIB:.3g}" == size and str(change) == f"{key}={value}"


def test_settings_that_are_not_enough_are_said_to_be_so() -> None:
    given = gpus(config("trainer.shard=full", "max_staleness=0", "rollout.versions_on=device"))
    one = node(10.0, trainer=(0,))
    assert advice(given, on(one), one) == "no single setting would make it less"
    larger = gpus(config())
    assert "it would be less, though not little enough, with " in advice(larger, on(node(10.0)), node(10.0))


def test_a_model_that_cannot_be_planned_is_a_warning() -> None:
    (warning,) = check_hosts(config("full.freeze=[nothing.*]"), on(node(1e12)))
    assert warning.startswith("the nodes' memory was not compared with a plan: full.freeze: 'nothing.*' matches no")


def sizes(of: Sizes) -> dict[str, Any]:
    names = ("block_bytes", "root_bytes", "base_bytes", "version_bytes", "text_parameters", "vae_parameters")
    return {name: getattr(of, name) for name in (*names, "adapter_parameters", "itemsize", "full")}


@pytest.mark.parametrize("freeze", ["[]", "[proj_out.*]"])
def test_the_headers_of_the_files_say_the_sizes_of_the_network(freeze: str) -> None:
    given = compose_config("one_step_off", ["tune=full", f"full.freeze={freeze}", "model.dtype=bfloat16"])
    model = resolve_model(given.model)
    stored = StoredSizes.of(given, stored_elements(model.path, model.revision), itemsize=2)
    real = build_meta_model(given)
    assert sizes(stored) == sizes(real) and stored.adapter_parameters > 0
    lora = replace(given, tune="lora")
    assert StoredSizes.of(lora, stored_elements(model.path), itemsize=2).adapter_parameters == 0
