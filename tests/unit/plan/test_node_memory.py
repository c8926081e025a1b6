"""Tests of the comparison of a run's planned host memory with its nodes, on made-up nodes and models."""

from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.memory.host_needs import PROCESS_BYTES
from async_flowrl.memory.node_memory import LESS, check_hosts
from async_flowrl.memory.node_needs import GIB, needs_on
from async_flowrl.memory.nodes import Hosts, NodeProcesses
from async_flowrl.memory.processes import MARGIN_SHARE
from async_flowrl.policies.stored import StoredElements
from tests.unit.plan.made_up_nodes import ELEMENTS, TEXT, VERSION, config, gpus, node, on, total


def parts(given: Config, of: NodeProcesses, *, on_gpus: bool = True) -> list[dict[str, int]]:
    return [dict(need.parts) for need in needs_on(given, on(of, gpus=on_gpus), of)]


def least(given: Config, hosts: Hosts) -> int:
    return sum(need.least for need in needs_on(given, hosts, hosts.nodes[0]))


def test_on_gpus_the_host_holds_versions_and_the_copy_for_a_checkpoint() -> None:
    """The first rank alone sends and copies whole weights; the controller writes them when that copy is gone."""
    first, second, *rollouts, reward, controller = parts(gpus(config()), node(1e12))
    assert first["versions to send"] == 4 * VERSION, "two that tickets may name, and two under way"
    assert first["copy for a checkpoint"] == 12 * ELEMENTS + 2 * VERSION
    assert second == reward == controller == {"process": PROCESS_BYTES}
    assert [rollout["versions that arrive"] for rollout in rollouts] == [4 * VERSION] * 2
    assert parts(gpus(config()), node(1e12, rollout=(0,))) == rollouts[:1]


def test_in_shares_every_rank_copies_its_own_and_the_first_one_sends() -> None:
    first, second = parts(gpus(config("trainer.shard=full")), node(1e12, trainer=(0, 1)))[:2]
    assert first["copy for a checkpoint"] == second["copy for a checkpoint"] == 6 * ELEMENTS + VERSION
    assert first["versions to send"] == 3 * VERSION, "the newest, one that is gathered, and one that is once more"
    assert "versions to send" not in second


@pytest.mark.parametrize(
    ("where", "aside"),
    [("resident", {}), ("offload", {"text encoders": 2 * TEXT}), ("cached", {"network, put aside": VERSION})],
)
def test_text_encoders_that_share_a_gpu_take_turns_from_host_memory(where: str, aside: dict[str, int]) -> None:
    (rollout,) = parts(gpus(config(f"rollout.text_encoder={where}")), node(1e12, rollout=(0,)))
    assert rollout == {"process": PROCESS_BYTES, "versions that arrive": 4 * VERSION, **aside}


def test_an_offloaded_base_is_a_share_of_each_rank() -> None:
    given = gpus(config("tune=lora", "trainer.cpu_offload=true", "trainer.shard=full"))
    first, second = parts(given, node(1e12, trainer=(0, 1)))[:2]
    assert first["offloaded base"] == second["offloaded base"] == VERSION // 2
    assert least(given, on(node(1e12, trainer=(0, 1)))) == VERSION


def test_a_process_that_samples_and_trains_is_counted_once() -> None:
    given = gpus(config("placement=shared", "max_staleness=0", "mode=stream"))
    here = node(1e12, trainer=(0, 1), rollout=(0, 1))
    first, second, _ = parts(given, here)
    assert (first["versions to send"], first["versions that arrive"]) == (3 * VERSION, 3 * VERSION)
    assert second == {"process": PROCESS_BYTES, "versions that arrive": 3 * VERSION}
    free = total(given, here) - 3 * PROCESS_BYTES
    assert check_hosts(given, on(node(1e12, free, **here.workers))) == []
    (warning,) = check_hosts(given, on(node(1e12, free - 1, **here.workers)))
    assert "process that samples and trains" in warning and "rollout.num_workers" not in warning
    base = parts(given, here, on_gpus=False)[1]["weights, optimizer and versions"]
    assert base == pytest.approx((8 + 8 + 16 + 8 + 2 + 2 + 3 * 2) * ELEMENTS * (1 + MARGIN_SHARE), rel=0.2)


def test_on_a_cpu_everything_is_in_host_memory() -> None:
    """Masters, gradient, moments, sums, the network, and versions of the weights, with the margin of the plan."""
    first, *_ = parts(config(), node(1e12), on_gpus=False)
    by_parameter = 2 + 4 + 4 + 8 + 2 * 8 + (2 + 2) * 2
    whole = by_parameter * ELEMENTS * (1 + MARGIN_SHARE)
    assert first["weights, optimizer and versions"] == pytest.approx(whole, rel=1e-6)


def test_a_gpu_of_a_reward_alone_puts_nothing_else_on_gpus() -> None:
    here = node(1e12)
    on_rewards = Hosts((here,), on(here).stored, {"reward/color": 80 * GIB})
    given = gpus(config())
    assert needs_on(given, on_rewards, here) == needs_on(given, on(here, gpus=False), here)


def test_small_versions_take_their_own_size_on_a_cpu_and_a_power_of_two_where_they_are_pinned() -> None:
    here = node(1e12, rollout=(0,))
    arrive = []
    for hosts in (on(here), on(here, gpus=False)):
        small = replace(hosts, stored=replace(hosts.stored, transformer={"blocks.0.a": 300_000_000}))
        arrive.append(dict(needs_on(gpus(config()), small, here)[0].parts)["versions that arrive"])
    assert arrive == [4 * 2**30, 4 * 600_000_000]


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
    workers: dict[str, Any] = {**node(1.0).workers, "server/judge": (0,)}
    needed = total(given, node(1e12, **workers))
    (warning,) = check_hosts(given, on(node(2 * needed), node(2 * needed, needed - 7 * PROCESS_BYTES - 1, **workers)))
    shown = f"{(needed - 7 * PROCESS_BYTES) / GIB:.3g}"
    assert warning.startswith(f"node 10.0.0.1 has {shown} GiB of memory free, and the processes of this run on it may ")
    assert "; trainer rank 0.652; " in warning
    assert "trainer rank 46.4 (process 0.652, versions to send 15.3, copy for a checkpoint 30.5)" not in warning
    assert "trainer rank 46.4 (versions to send 15.3, copy for a checkpoint 30.5)" in warning
    assert "2 × rollout worker 15.9 (process 0.652, versions that arrive 15.3)" in warning
    assert "; reward worker 0.652; reward server 0.652; controller 0.652; " in warning
    assert warning.endswith(LESS)


def test_a_part_that_is_nearly_all_of_a_process_is_named() -> None:
    given = gpus(config("max_staleness=20", "mode=fully_async"))
    here = node(1.0, rollout=(0,))
    (need,) = needs_on(given, on(here), here)
    assert str(need) == "rollout worker 88.4 (versions that arrive 87.7)"


def test_a_node_that_cannot_hold_its_processes_is_refused() -> None:
    given = gpus(config())
    needed = least(given, on(node(1e12)))
    assert needed == 2 * VERSION + 12 * ELEMENTS + 2 * VERSION + 2 * 2 * VERSION, "sent, copied, and arrived twice"
    assert all("allow_oom" not in said for said in check_hosts(given, on(node(needed))))
    with pytest.raises(ConfigError, match=r"^node 10.0.0.1 has .* GiB of memory, and the processes of") as said:
        check_hosts(given, on(node(1e12), node(needed - 1)))
    assert "need at least 53.4, by plan 80.2 GiB: " in str(said.value)
    assert str(said.value).endswith("; allow_oom=true tries anyway")
    given.allow_oom = True
    assert check_hosts(given, on(node(needed - 1))) == [str(said.value).removesuffix("; allow_oom=true tries anyway")]


def test_what_swap_space_may_hold_is_not_refused() -> None:
    given = gpus(config())
    needed = least(given, on(node(1e12)))
    short = node(needed - 10)
    swapping = replace(short, memory=replace(short.memory, swap=10))
    assert "GiB of memory free" in check_hosts(given, on(swapping))[0]
    with pytest.raises(ConfigError, match=r" GiB of memory and 8.38e-09 of swap space, and"):
        check_hosts(given, on(replace(short, memory=replace(short.memory, swap=9))))


def test_many_small_processes_on_a_small_machine_are_not_refused() -> None:
    """13 processes on 8 GB: by plan 700 MB each, in fact they run."""
    given = config("runtime.backend=ray", "tune=lora", "model.dtype=float32")
    here = node(8e9, trainer=(0, 1), rollout=tuple(range(8)), reward=(0, 1))
    small = Hosts((here,), StoredElements({"blocks.0.a": 100_000}, 0, 0), {})
    assert total(given, here, gpus=False) > here.memory.total
    assert check_hosts(given, small) == []
    assert check_hosts(replace(given, tune="full"), small) == []


def test_a_run_of_one_step_is_refused_for_one_version_only() -> None:
    here = on(node(1e12))
    assert least(gpus(config("total_steps=1")), here) == least(gpus(config()), here) - 4 * VERSION


def test_on_a_cpu_what_is_certain_is_the_trained_state() -> None:
    """Frozen weights may be pages of the model's file, and buffers for versions may never be used."""
    here = on(node(1e12, rollout=(0,)), gpus=False)
    assert least(config(), here) == 3 * VERSION, "the live one, and two that tickets may name"
    rank = on(node(1e12, trainer=(1,)), gpus=False)
    assert least(config(), rank) == (16 + 8) * ELEMENTS + 2 * VERSION
    planned = parts(config(), rank.nodes[0], on_gpus=False)[0]["weights, optimizer and versions"]
    assert least(config(), rank) < planned / (1 + MARGIN_SHARE)


def test_a_model_that_cannot_be_planned_is_a_warning() -> None:
    (warning,) = check_hosts(config("full.freeze=[nothing.*]"), on(node(1e12)))
    assert warning.startswith("the nodes' memory was not compared with a plan: full.freeze: 'nothing.*' matches no")
