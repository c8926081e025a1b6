"""Tests of what a trainer rank makes of the groups that it is handed: their rows, those it trains on, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_flowrl.algorithms import sde
from async_flowrl.training.messages import PartStats, StepPlan, TrainRequest, UpdateStats, merged
from async_flowrl.training.parts import Group
from async_flowrl.training.update import NonFiniteError
from async_flowrl.types import Trajectory
from tests.support import trainer_rig as rig


def test_groups_that_do_not_fit_are_refused(handed: list[list[rig.Handed]]) -> None:
    (meta, (trajectory,)), (_, (other,)) = handed[0]
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="4 images in 1 of 1 tickets, 3 advantages"):
        Group(replace(meta, advantages=(1.0, 2.0, 3.0)), [trajectory], device=device)
    with pytest.raises(ValueError, match="group 0 differ in schedule, window or conditioning"):
        Group(replace(meta, tickets=2), [half(trajectory, 0), half(other, 1)], device=device)
    worker = rig.trainer(rig.tiny_config())
    with pytest.raises(ValueError, match="1 groups have 1 tickets, got 2"):
        rig.update(worker, 0, [(meta, [trajectory, trajectory])], plan=StepPlan(rows=12))
    group = Group(meta, [trajectory], device=device)
    with pytest.raises(ValueError, match="trains 3 steps, which micro-batches of 2 do not divide"):
        list(group.micro_batches("transitions", 0, samples=1, steps=2))
    with pytest.raises(ValueError, match=r"group 0 has 1 parts of 4 samples for 1 ranks, its owners are \[1\]"):
        rig.update(worker, 0, [(replace(meta, owners=(1,)), [trajectory])])


def half(trajectory: Trajectory, index: int) -> Trajectory:
    part = slice(2 * index, 2 * index + 2)
    return replace(trajectory, latents=trajectory.latents[part], log_probs=trajectory.log_probs[part])


def test_a_plan_without_rows_takes_no_groups(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    with pytest.raises(ValueError, match="its plan counts 0 rows"):
        rig.update(worker, 3, handed[0], plan=StepPlan(rows=0))
    with pytest.raises(RuntimeError, match="before begin"):
        rig.finish(rig.trainer(rig.tiny_config()))
    with pytest.raises(ValueError, match="step 0 has no update 1"):
        worker.update.begin(0, StepPlan(rows=1, update=1))


def test_a_step_without_groups_makes_a_version_and_moves_nothing(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    rig.update(worker, 0, handed[0])
    before = worker.parameters.fingerprint()
    worker.update.begin(1, StepPlan(rows=24))
    stats = rig.finish(worker)
    assert stats.skipped and worker.parameters.fingerprint() == before and worker.versions.newest == 2
    zero = [rig.with_advantages(group, [0.0] * 4) for group in handed[1]]
    rig.update(worker, 2, zero)
    assert worker.parameters.fingerprint() != before, (
        "Adam's momentum moves weights on a zero gradient: that is why it is skipped"
    )


def test_a_skipped_group_keeps_its_place_in_the_denominator(handed: list[list[rig.Handed]]) -> None:
    first, second = handed[0]
    gradients = []
    for batch in ([first], [first, rig.with_advantages(second, [0.0] * 4)]):
        worker = rig.trainer(rig.tiny_config())
        worker.update.begin(0, StepPlan(rows=24))
        for meta, tickets in batch:
            worker.update.accumulate([meta], *tickets)
        gradients.append(rig.gradient(worker))
    assert torch.equal(gradients[0], gradients[1])


def test_the_rows_of_the_last_call_divide_the_sum(handed: list[list[rig.Handed]]) -> None:
    """Groups that are dropped do not count, and how many there are is known only at the end."""
    (meta, tickets), digests = handed[0][0], []
    for planned, rows in ((12, None), (24, 12), (24, None)):
        worker = rig.trainer(rig.tiny_config())
        request = TrainRequest(0, (meta,), begins=StepPlan(rows=planned), finishes=True, rows=rows)
        stats = worker.train(request, *tickets)
        assert isinstance(stats, UpdateStats) and stats.rows == (rows or planned)
        digests.append((worker.parameters.fingerprint(), merged([stats]).metrics["grad_norm"]))
    assert digests[0] == digests[1] and digests[0][1] == pytest.approx(2 * digests[2][1])


def test_a_non_finite_group_stops_the_step_by_name(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    before = worker.parameters.fingerprint()
    bad = handed[0][1][1][0]
    latents = bad.latents.copy()
    latents[2, 1] = np.nan
    worker.update.begin(7, StepPlan(rows=24))
    worker.update.accumulate([handed[0][0][0]], *handed[0][0][1])
    with pytest.raises(NonFiniteError, match="step 7, group 1: the loss is nan"):
        worker.update.accumulate([handed[0][1][0]], replace(bad, latents=latents))
    assert worker.parameters.fingerprint() == before


def test_only_the_lowest_group_counts_as_probed() -> None:
    """Each that came before a lower one was probed, too."""
    parts = [PartStats(g, 0, 0, 0, 0, 2, {"loss": 0.0, "behaviour_gap": gap}, 1.0) for g, gap in ((4, 9.0), (1, 0.5))]
    stats = UpdateStats(0, 0, False, {"grad_norm": 1.0}, rows=4, parts=tuple(parts))
    found = merged([stats])
    assert found.metrics["behaviour_gap"] == 0.25
    assert merged([replace(stats, parts=tuple(parts[::-1]))]) == found


def test_rows_carry_their_own_step_and_seed(handed: list[list[rig.Handed]]) -> None:
    meta, (trajectory,) = handed[0][1]
    group = Group(meta, [trajectory], device=torch.device("cpu"))
    batches = [batch for part in (2, 3) for batch in group.micro_batches("transitions", part, samples=1, steps=3)]
    assert len(batches) == 2
    for batch, image in zip(batches, (2, 3), strict=True):
        assert batch.advantages.tolist() == [np.float32(meta.advantages[image])] * 3
    batch = batches[0]
    assert batch.steps.tolist() == [0, 1, 2]
    for row, step in enumerate((0, 1, 2)):
        assert torch.equal(batch.latents[row], torch.tensor(trajectory.latents[2, step]))
        assert torch.equal(batch.next_latents[row], torch.tensor(trajectory.latents[2, step + 1]))
        assert float(batch.sigma[row]) == trajectory.sigmas[step]
    seeds = [seed for b in batches for seed in b.seeds]
    assert len(set(seeds)) == len(seeds) == 6


def test_final_images_are_trained_at_every_row() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "diffusion_nft"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    group = sampler.group(0, 0)
    stats = rig.update(worker, 0, [group])
    assert stats.metrics["loss"] > 0 and stats.metrics["old_deviation"] == 0.0
    again = rig.update(worker, 1, [(replace(group[0], version=0, age=1), group[1])])
    assert again.metrics["old_deviation"] > 0
    assert sde.latent_elements(torch.tensor(group[1][0].latents[:, 0])) > 1


def test_a_pair_trains_on_its_best_and_worst_image() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "dpo"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    meta, tickets = sampler.group(0, 0)
    chosen = tuple(worker.algorithm.select(np.asarray(meta.advantages)))
    pair = replace(meta, selected=chosen), tickets
    stats = [rig.update(worker, step, [pair]) for step in range(4)]
    assert stats[0].metrics["loss"] == pytest.approx(np.log(2.0), abs=1e-6)
    assert stats[-1].metrics["loss"] < stats[0].metrics["loss"]
