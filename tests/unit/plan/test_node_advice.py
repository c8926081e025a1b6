"""Tests of the settings that messages on nodes without enough memory name."""

import re
from dataclasses import replace

import pytest

from async_flowrl.config.check import check
from async_flowrl.plan.host_needs import PROCESS_BYTES
from async_flowrl.plan.node_advice import advice, smaller
from async_flowrl.run.hosts import NodeProcesses
from tests.unit.plan.made_up_nodes import VERSION, config, gpus, node, on, total


def keys(given: object, hosts: object, of: NodeProcesses) -> list[str]:
    return [change.key for change in smaller(given, hosts, of)]  # type: ignore[arg-type]


@pytest.mark.parametrize("on_gpus", [True, False])
def test_what_is_advised_makes_it_so_much_less(on_gpus: bool) -> None:
    given = config("trainer.ema_decay=0.9", "model.dtype=float32")
    given = gpus(given) if on_gpus else given
    small = node(total(given, node(1e12), gpus=on_gpus) * 0.6)
    hosts = on(small, gpus=on_gpus)
    advised = list(smaller(given, hosts, small))
    assert all(change.accepted(given) for change in advised)
    always = ["trainer.shard", "model.dtype", "max_staleness", "trainer.ema_decay", "rollout.num_workers"]
    assert [change.key for change in advised] == always + ["rollout.versions_on"] * on_gpus
    shown = re.findall(r"(?:with |, )([\w.]+=[^,(]+) \(([\d.]+) GiB\)", advice(given, hosts, small))
    assert 1 <= len(shown) <= 3
    for named, size in shown:
        (change,) = (each for each in advised if str(each) == named)
        fewer = {"trainer": (0, 1), "rollout": (0,), "reward/color": (0,)} if "workers" in change.key else {}
        needed = total(change.applied(given), node(1e12, **fewer), gpus=on_gpus)
        assert f"{needed / 2**30:.3g}" == size


def test_settings_that_are_not_enough_are_said_to_be_so() -> None:
    given = gpus(config("trainer.shard=full", "mode=stream", "max_staleness=0", "rollout.versions_on=device"))
    check(given)
    one = node(10.0, trainer=(0,))
    assert advice(given, on(one), one) == "no single setting would make it less"
    given.max_staleness, given.mode = 1, "one_step_off"
    assert "though not little enough, with max_staleness=0 mode=stream (" in advice(given, on(one), one)


@pytest.mark.parametrize(("mode", "fresh"), [("one_step_off", "stream"), (None, None)])
def test_fresh_images_have_another_mode_if_one_is_given(mode: str | None, fresh: str | None) -> None:
    given = config()
    given.mode = mode
    (change,) = (each for each in smaller(given, on(node(1.0)), node(1.0)) if each.key == "max_staleness")
    assert change.accepted(given) and change.applied(given).mode == fresh


def test_what_moves_to_a_gpu_comes_last_and_only_where_it_has_room() -> None:
    """Five versions more beside the one in use and the text encoders: 20 + 2 GB."""
    given, here = gpus(config("rollout.text_encoder=offload")), node(1.0)
    roomy, tight = on(here, each=5 * VERSION), on(here, each=5 * VERSION - 1)
    assert keys(given, roomy, here)[-2:] == ["rollout.versions_on", "rollout.text_encoder"]
    assert keys(given, tight, here)[-1] == "rollout.text_encoder"
    assert keys(given, on(here, each=1.0), here)[-1] == "rollout.num_workers"
    halved = gpus(config("rollout.text_encoder=offload"))
    halved.rollout.gpus_per_worker = 0.5
    assert "rollout.versions_on" not in keys(halved, roomy, here)
    shared = gpus(config("placement=shared", "mode=stream", "max_staleness=0"))
    assert "rollout.versions_on" not in keys(shared, roomy, here), "the trainer is on that GPU as well"


def test_fewer_rollout_workers_on_every_node_that_is_short() -> None:
    given = gpus(config("rollout.num_workers=12", "trainer.num_workers=2"))
    short = node(1.0, rollout=(0, 1, 2, 3))
    other, enough = replace(short, address="10.0.0.2"), node(1e15, rollout=(8, 9, 10, 11))
    hosts = on(short, other, enough)
    (change,) = (each for each in smaller(given, hosts, short) if each.key == "rollout.num_workers")
    assert str(change) == "rollout.num_workers=8"
    assert f"rollout.num_workers=8 ({2 * (PROCESS_BYTES + 4 * VERSION) / 2**30:.3g} GiB)" in advice(given, hosts, short)


def test_fewer_rollout_workers_per_node_are_accepted() -> None:
    given = gpus(config("rollout.num_workers=12", "rollout.workers_per_node=4", "runtime.address=auto"))
    short = node(1.0, rollout=(0, 1, 2, 3))
    (change,) = (each for each in smaller(given, on(short), short) if each.key == "rollout.num_workers")
    assert str(change) == "rollout.num_workers=6 rollout.workers_per_node=2" and change.accepted(given)


@pytest.mark.parametrize("growing", ["rollout.max_workers=16", "rollout.min_workers=1"])
def test_the_number_of_workers_of_a_pool_that_grows_by_itself_is_no_advice(growing: str) -> None:
    given = gpus(config("rollout.num_workers=12", growing, "runtime.address=auto"))
    check(given)
    short = node(1.0, rollout=(0, 1, 2, 3))
    assert "rollout.num_workers" not in keys(given, on(short), short)
