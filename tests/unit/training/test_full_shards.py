"""Tests of tune=full with trainer.shard=full on two and three ranks over gloo, against one process with all weights."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.config.schema import Config
from tests.support import trainer_rig as rig
from tests.unit.training.trainer_ranks import Job, Outcome, run_alone, run_ranks

pytestmark = pytest.mark.serial("runs")

CLOSE = 2e-5
"""Largest distance of the float32 masters, relative to their change, that the order of float additions may explain."""


def full_config(dtype: str = "float32", **trainer: Any) -> Config:
    config = rig.tiny_config(**{"micro_batch_size": 2, "learning_rate": 1e-3, "shard": "full", **trainer})
    config.tune, config.model.dtype = "full", dtype
    config.model.tiny.heads, config.model.tiny.layers = 2, 1
    return config


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    # Steps that depend on the gradient's length: Adam with its usual eps would hide a mean in place of a sum.
    config = full_config(max_grad_norm=0.02, eps=1e-3)
    sampler = rig.Sampler(config)
    fresh = [[sampler.group(step, group) for group in (0, 1)] for step in range(2)]
    batches = [fresh[0], [(replace(meta, version=0, age=1), tickets) for meta, tickets in fresh[1]]]
    every = full_config(gradient_checkpointing="full", updates_per_batch=2, ema_decay=0.9, ema_every=1, eps=1e-3)
    every.algorithm.kl_coef, every.algorithm.max_kl_per_update = 0.04, 1e-4
    every.full.freeze = ["*.norm*", "proj_out.*"]
    return {
        "clipped": (config, batches),
        "every pass": (every, batches),
        "bfloat16": (full_config("bfloat16", eps=1e-3), batches),
    }


@pytest.fixture(scope="module")
def two(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    found = run_ranks(2, list(jobs.values()), tmp_path_factory.mktemp("two"))
    return dict(zip(jobs, found, strict=True))


def whole(ranks: list[Outcome], what: str = "tensors") -> dict[str, Any]:
    return {name: np.concatenate([rank[what][name] for rank in ranks]) for name in ranks[0][what]}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in one))


def like_one_process(job: Job, ranks: list[Outcome], *, close: float = CLOSE) -> Outcome:
    """The outcome of one process with all of the weights, to which the ranks' are equal up to rounding.

    So is the average of the weights (EMA); where there is none, it is the weights.
    """
    alone = run_alone(job)
    before = run_alone((job[0], []))["tensors"]
    for what in ("tensors", "average"):
        ours, theirs = whole(ranks, what), alone[what]
        assert {name: array.shape for name, array in ours.items()} == {n: array.shape for n, array in theirs.items()}
        moved, apart = distance(theirs, before), distance(ours, theirs)
        assert moved > 1e-3 and apart < close * moved, (what, apart, moved)
    for mine, its in zip(ranks[0]["metrics"], alone["metrics"], strict=True):
        for name in ("grad_norm", "optimizer/step_over_lr", "loss"):
            assert mine[name] == pytest.approx(its[name], rel=100 * close, abs=1e-9), name
        assert mine.keys() == its.keys() - {"gradient_snr"}
    return alone


def test_each_rank_has_half_and_both_train_what_one_process_trains(
    jobs: dict[str, Job], two: dict[str, list[Outcome]]
) -> None:
    ranks = two["clipped"]
    info = ranks[0]["info"]
    assert info["layout"] == "fsdp2 over 2, trained weights and optimizer with it"
    assert info["trainable_parameters"] == info["base_parameters"]
    sizes = [sum(array.size for array in rank["tensors"].values()) for rank in ranks]
    assert sum(sizes) == info["base_parameters"] and max(sizes) < 0.55 * sum(sizes)
    assert ranks[0]["digest"] != ranks[1]["digest"], "of the share of each"
    assert [rank["parts"] for rank in ranks] == [[2, 2], [2, 2]]
    assert [sorted(rank["retained"]) for rank in ranks] == [[1, 2]] * 2, "what tickets of the next step may name"
    assert all(max(rank["retained"].values()) < 0.55 * sum(sizes) for rank in ranks), "its share of them"
    assert ranks[0]["metrics"][0]["grad_norm"] > 0.02, "it was clipped"
    like_one_process(jobs["clipped"], ranks)


def test_every_pass_with_frozen_parts(jobs: dict[str, Job], two: dict[str, list[Outcome]]) -> None:
    """Checkpointed blocks, versions, reference and proximal passes, a bounded step, an EMA, parameters left out."""
    job, _ = jobs["every pass"]
    alone = like_one_process(jobs["every pass"], two["every pass"], close=1e-3)
    averages = whole(two["every pass"], "average")
    assert distance(averages, whole(two["every pass"])) > 0.1 * distance(averages, run_alone((job, []))["tensors"])
    info = two["every pass"][0]["info"]
    assert 0 < info["trainable_parameters"] < info["base_parameters"]
    assert two["every pass"][0]["metrics"][-1]["kl"] == pytest.approx(alone["metrics"][-1]["kl"], rel=1e-2)
    assert min(found["trust_region/scale"] for found in two["every pass"][0]["metrics"]) < 1.0


def test_bfloat16_is_computed_with_and_float32_is_kept(jobs: dict[str, Job], two: dict[str, list[Outcome]]) -> None:
    ranks = two["bfloat16"]
    assert all(array.dtype == np.float32 for array in ranks[0]["tensors"].values())
    alone = run_alone(jobs["bfloat16"])
    ours = whole(ranks)
    apart = max(float(np.abs(ours[name] - array).max()) for name, array in alone["tensors"].items())
    assert apart < 1e-4
    assert ranks[0]["metrics"][0]["grad_norm"] == pytest.approx(alone["metrics"][0]["grad_norm"], rel=1e-3)
    wide, _ = copy.deepcopy(jobs["bfloat16"])
    wide.model.dtype = "float32"
    assert rig.distance(run_alone((wide, jobs["bfloat16"][1]))["tensors"], alone["tensors"]) > 0


def test_three_ranks_with_uneven_rows_and_a_tensor_of_which_the_last_has_none(tmp_path: Path) -> None:
    config = full_config(micro_batch_size=1, eps=1e-3)
    config.model.tiny.family = "sana"
    sampler = rig.Sampler(config)
    job = config, [[sampler.group(step, 0)] for step in range(2)]
    (ranks,) = run_ranks(3, [job], tmp_path)
    rows = {name: [len(rank["tensors"][name]) for rank in ranks] for name in ranks[0]["tensors"]}
    assert rows["scale_shift_table"] == [1, 1, 0] and any(0 < last < first for first, _, last in rows.values())
    assert [rank["parts"] for rank in ranks] == [[2, 2], [1, 1], [1, 1]]
    like_one_process(job, ranks)
