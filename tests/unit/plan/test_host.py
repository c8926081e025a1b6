"""Tests of the host memory of a run's processes and its comparison with made-up nodes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import host_bytes, ring_bytes
from async_flowrl.memory.host import (
    KEPT_BY_RANK,
    NodeProcesses,
    check_disk,
    check_hosts,
    copied_bytes,
    host_needs,
    rank_bytes,
)
from async_flowrl.memory.model_sizes import Sizes, stored_sizes
from async_flowrl.policies.stored import StoredElements
from checkpoint_engine.side_stream import pinned_bytes
from separation.node import NodeMemory

ELEMENTS, TEXT = 2_048_000_000, 1_000_000_000
"""Of the network, of which 40 % are in each of two blocks, and of the text encoders. A version fills whole pages."""
STORED = StoredElements({"layers.0.weight": 819_200_000, "layers.1.weight": 819_200_000, "proj": 409_600_000}, TEXT, 0)
VERSION = 2 * ELEMENTS
"""Bytes of a version in bfloat16."""


def config(*overrides: str) -> Config:
    """Two trainer ranks and two rollout workers on GPUs that train whole weights, one step off."""
    given = ["tune=full", "trainer.num_workers=2", "rollout.num_workers=2", "max_staleness=1", "evaluate.every=0"]
    gpus = ["trainer.gpus_per_worker=1", "rollout.gpus_per_worker=1"]
    return compose_config("one_step_off", [*given, *gpus, "model.dtype=bfloat16", "trainer.shard=none", *overrides])


def sizes(given: Config) -> Sizes:
    return stored_sizes(given, STORED, 2)


def node(total: float, **workers: list[int]) -> NodeProcesses:
    """A node with so many bytes; without `workers` all of them are on it, and one for rewards."""
    there = workers or {"trainer": [0, 1], "rollout": [0, 1], "reward/color": [0]}
    memory = NodeMemory("a", round(total), round(total))
    return NodeProcesses("10.0.0.1", memory, there)


def warnings(given: Config, *nodes: NodeProcesses) -> list[str]:
    return [*check_hosts(given, sizes(given), nodes, ("trainer", "rollout"))]


def needed(given: Config, of: NodeProcesses, *, gpus: bool = True) -> list[int]:
    return [size for _, size in host_needs(given, sizes(given), of.workers, ("trainer", "rollout") if gpus else ())]


@pytest.mark.extended
def test_on_gpus_the_host_holds_versions_and_the_copy_for_a_checkpoint() -> None:
    """The first rank alone sends and copies whole weights: two versions, the masters and both moments."""
    copy = 12 * ELEMENTS + 2 * VERSION
    assert needed(config(), node(1e12)) == [2 * VERSION + copy, 0, 2 * VERSION, 2 * VERSION]
    assert needed(config("total_steps=1"), node(1e12)) == [VERSION + copy, 0, VERSION, VERSION]
    aside = (8 + 8) * ELEMENTS + 2 * VERSION  # The rank's own sum and that of all ranks; versions.
    given = config("trainer.sum_on=host", "trainer.versions_on=host")
    assert needed(given, node(1e12, trainer=[0, 1])) == [aside + 2 * VERSION + copy, aside]
    planned = config()
    assert host_bytes(planned, sizes(planned)) == 4 * VERSION, "with two under way"
    assert ring_bytes(planned, sizes(planned)) == 4 * VERSION


def test_in_shares_every_rank_copies_its_own_and_the_first_one_sends() -> None:
    copy = (12 * ELEMENTS + 2 * VERSION) // 2
    assert needed(config("trainer.shard=full"), node(1e12, trainer=[0, 1])) == [VERSION + copy, copy]
    planned = config("trainer.shard=full")
    assert host_bytes(planned, sizes(planned)) == 3 * VERSION, "newest, gathered, gathered once more"
    assert rank_bytes(planned, sizes(planned), on_gpu=True, sends=False) == 0


@pytest.mark.extended
@pytest.mark.parametrize(("where", "aside"), [("resident", 0), ("offload", 2 * TEXT), ("cached", VERSION)])
def test_text_encoders_that_share_a_gpu_take_turns_from_host_memory(where: str, aside: int) -> None:
    given = config(f"rollout.text_encoder={where}")
    assert needed(given, node(1e12, rollout=[0])) == [2 * VERSION + aside]


def test_a_process_that_samples_and_trains_is_counted_once() -> None:
    given = config("placement=shared", "max_staleness=0", "mode=stream")
    both = needed(given, node(1e12, trainer=[0, 1], rollout=[0, 1]))
    assert both == [VERSION + 12 * ELEMENTS + VERSION + VERSION, VERSION]


@pytest.mark.extended
def test_on_a_cpu_everything_is_in_host_memory() -> None:
    """Masters, gradient, moments, sums, the network, and versions of the weights."""
    by_parameter = 2 + 4 + 4 + 8 + 2 * 8 + (2 + 2) * 2
    assert needed(config(), node(1e12, trainer=[1]), gpus=False) == [by_parameter * ELEMENTS]
    given, small = config(), replace(STORED, transformer={"blocks.0.a": 300_000_000})
    model = stored_sizes(given, small, 2)
    assert ring_bytes(given, model) == 4 * pinned_bytes(model.version_bytes)


def test_the_first_rank_of_a_lora_counts_the_states_that_are_retained_and_written() -> None:
    given = config("tune=lora")
    model = replace(sizes(given), adapter_parameters=1000)
    assert copied_bytes(given, model) == KEPT_BY_RANK * (3 * 4 + 2 * 2) * 1000


def test_a_node_that_cannot_hold_its_processes_is_refused() -> None:
    given, need = config(), sum(needed(config(), node(1e12)))
    with pytest.raises(ConfigError, match="allow_oom=true tries anyway"):
        warnings(given, node(1e12), node(need - 1))
    short = node(need - 10)
    assert len(warnings(given, replace(short, memory=replace(short.memory, swap=10)))) == 1
    given.allow_oom = True
    assert len(warnings(given, node(need - 1))) == 1


def test_a_disk_without_room_for_the_checkpoints_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints and one more being written, and the weights."""
    given = config("save.keep=2")
    need = 3 * (12 * ELEMENTS + 2 * VERSION) + VERSION
    for free, expected in ((need, 1), (2 * need, 0)):
        monkeypatch.setattr("async_flowrl.memory.host.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert len([*check_disk(given, sizes(given), tmp_path)]) == expected
