"""Tests of ranks in processes of their own, over gloo: FSDP2 for the base, one all-reduce, the bits of one rank."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as processes

from tests.support import trainer_rig as rig
from tests.support.forked import METHOD
from tests.support.ports import free_port
from tests.unit.training.trainer_ranks import Job, Outcome, lets_its_neighbour_wait, run_alone, run_ranks

pytestmark = pytest.mark.serial("runs")

STEPS = 2
"""Training steps of the jobs; in the first one lora_B is 0, so that lora_A has no gradient."""


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    config = rig.tiny_config(micro_batch_size=2, shard="full")
    sampler = rig.Sampler(config)
    batches = [[sampler.group(step, group) for group in (0, 1)] for step in range(STEPS)]
    every = rig.tiny_config(micro_batch_size=2, gradient_checkpointing="full", updates_per_batch=2, shard="full")
    every.algorithm.kl_coef, every.algorithm.correction, every.algorithm.clip_range = 0.04, "mask", 0.1
    full = rig.tiny_config(micro_batch_size=2, learning_rate=1e-3)
    full.tune, full.model.dtype = "full", "bfloat16"
    quantized = rig.tiny_config(micro_batch_size=2, gradient_checkpointing="full", shard="none")
    quantized.model.quantize = "nf4"
    stale = [batches[0], [(replace(meta, version=0, age=1), tickets) for meta, tickets in batches[1]]]
    return {
        "plain": (config, batches),
        "every pass": (every, stale),
        "whole": (rig.tiny_config(micro_batch_size=2, shard="none"), batches),
        "quantized": (quantized, batches),
        "four groups": (rig.tiny_config(micro_batch_size=2), [[sampler.group(0, group) for group in range(4)]]),
        "full weights": (full, batches),
        "offload": (rig.tiny_config(micro_batch_size=2, cpu_offload=True), batches),
    }


@pytest.fixture(scope="module")
def two(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    found = run_ranks(2, list(jobs.values()), tmp_path_factory.mktemp("two"))
    return dict(zip(jobs, found, strict=True))


def test_two_ranks_train_like_one(jobs: dict[str, Job], two: dict[str, list[Outcome]]) -> None:
    one, other = two["plain"]
    assert one["info"]["layout"] == "fsdp2 over 2" and one["sharded"] > 10
    assert one["parts"] == other["parts"] == [2] * STEPS, "each rank trained half of what was there"
    alone = run_alone(jobs["plain"])
    assert alone["parts"] == [4] * STEPS
    assert one["digest"] == other["digest"] == alone["digest"]
    assert one["metrics"] == alone["metrics"]
    assert one["kept"] == alone["kept"] == [{0: (24, 24)}] * STEPS


def test_two_ranks_train_full_weights_like_one(jobs: dict[str, Job], two: dict[str, list[Outcome]]) -> None:
    one, other = two["full weights"]
    assert one["info"]["layout"] == "whole on each of 2" and one["sharded"] == 0
    assert one["info"]["trainable_parameters"] == one["info"]["base_parameters"]
    assert one["parts"] == other["parts"] == [2] * STEPS
    assert one["digest"] == other["digest"] == run_alone(jobs["full weights"])["digest"]


def test_every_pass_runs_behind_fsdp(jobs: dict[str, Job], two: dict[str, list[Outcome]]) -> None:
    """Checkpointed blocks, proximal, behaviour and reference passes at once, against one process without sharding."""
    one, other = two["every pass"]
    alone = run_alone(jobs["every pass"])
    assert one["digest"] == other["digest"] == alone["digest"]
    assert one["metrics"] == alone["metrics"]
    assert one["metrics"][-1]["kl"] > 0 and one["metrics"][-1]["behaviour_divergence"] > 0
    config, batches = copy.deepcopy(jobs["every pass"])
    config.trainer.gradient_checkpointing = "none"
    assert rig.distance(one["tensors"], run_alone((config, batches))["tensors"]) < 1e-5


def test_the_base_can_be_offloaded(two: dict[str, list[Outcome]]) -> None:
    assert two["offload"][0]["info"]["layout"] == "fsdp2 over 2, base offloaded"
    assert two["offload"][0]["digest"] == two["plain"][0]["digest"]


def test_ranks_that_hold_the_whole_base_make_the_same_weights(two: dict[str, list[Outcome]]) -> None:
    one, other = two["whole"]
    assert one["info"]["layout"] == "whole on each of 2" and one["sharded"] == 0
    assert one["digest"] == other["digest"] == two["plain"][0]["digest"]
    assert one["metrics"] == two["plain"][0]["metrics"]


@pytest.mark.extended
def test_ranks_with_a_quantized_base_make_the_weights_of_one(
    jobs: dict[str, Job], two: dict[str, list[Outcome]]
) -> None:
    one, other = two["quantized"]
    alone = run_alone(jobs["quantized"])
    assert one["info"]["layout"] == "whole on each of 2"
    assert one["info"]["base_digest"] == alone["info"]["base_digest"] != two["whole"][0]["info"]["base_digest"]
    assert one["digest"] == other["digest"] == alone["digest"] != two["whole"][0]["digest"]
    assert one["metrics"] == alone["metrics"]


def test_a_rank_fetches_the_groups_that_it_trains_and_the_probe(
    jobs: dict[str, Job], two: dict[str, list[Outcome]]
) -> None:
    """Of four groups, one ticket each, a rank trains two. Both also get the ticket of the lowest one, the probe."""
    ((batch,),) = jobs["four groups"][1:]
    sizes = [sum(each.nbytes for each in tickets) for _, tickets in batch]
    one, other = (rank["fetched"][0] for rank in two["four groups"])
    assert len(one) == len(other) == 2 + 1
    assert sum(one) + sum(other) == sum(sizes) + 2 * sizes[0]


@pytest.mark.timeout(120)
def test_the_collectives_of_a_replica_have_the_limit_of_the_default_group(tmp_path: Path) -> None:
    """Torch's own would be 30 minutes."""
    processes.start_processes(
        lets_its_neighbour_wait, args=(free_port(), str(tmp_path), 8.0), nprocs=4, start_method=METHOD
    )
    assert "8000ms" in (tmp_path / "rank0").read_text()
