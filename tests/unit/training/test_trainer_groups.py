"""Tests of what a trainer rank makes of the groups that it is handed: their rows, those it trains on, and refusals."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from async_flowrl.config.schema import TrainerConfig
from async_flowrl.tickets.arithmetic import check_batching
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.messages import StepPlan, TrainRequest, with_means
from async_flowrl.training.optimizer import Optimizer, learning_rate
from async_flowrl.training.update import NonFiniteError
from tests.support import trainer_rig as rig


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
    batches = [first], [first, rig.with_advantages(second, [0.0] * 4)]
    alone, both = (rig.gradient_of(rig.tiny_config(), batch, over=24) for batch in batches)
    assert torch.equal(alone, both)


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


def test_tickets_that_differ_in_their_negative_prompt_are_no_group() -> None:
    config = rig.tiny_config()
    worker, (meta, tickets) = rig.trainer(config), rig.Sampler(config).group(0, 0, tickets=2)
    first = replace(tickets[0], negative=dict(tickets[0].conditioning))
    other = replace(tickets[1], negative={name: array + 1 for name, array in tickets[1].conditioning.items()})
    worker.update.begin(0, StepPlan(rows=24))
    with pytest.raises(ValueError, match="differ in schedule, window or conditioning"):
        worker.update.accumulate([meta], first, other, *tickets[2:])


def test_final_images_are_trained_at_every_row() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "diffusion_nft"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    group = sampler.group(0, 0)
    stats = rig.update(worker, 0, [group])
    assert stats.metrics["loss"] > 0 and stats.metrics["old_deviation"] == 0.0
    again = rig.update(worker, 1, [(replace(group[0], version=0, age=1), group[1])])
    assert again.metrics["old_deviation"] > 0


def test_a_pair_trains_on_its_best_and_worst_image() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "dpo"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    meta, tickets = sampler.group(0, 0)
    chosen = tuple(worker.algorithm.select(np.asarray(meta.advantages)))
    pair = replace(meta, parts=(chosen,)), tickets
    stats = [rig.update(worker, step, [pair]) for step in range(4)]
    assert stats[0].metrics["loss"] == pytest.approx(np.log(2.0), abs=1e-6)
    assert stats[-1].metrics["loss"] < stats[0].metrics["loss"]


@pytest.mark.parametrize("name", ["dgpo", "crd"])
def test_a_group_that_is_cut_has_the_gradient_of_the_whole_group(name: str) -> None:
    """Its loss needs means over the whole group, which each part's rank adds to; parts of their own would differ."""
    config = rig.tiny_config(micro_batch_size=2)
    config.algorithm.name, config.algorithm.sde_type, config.algorithm.beta = name, "ode", 50.0
    (meta, tickets), worker = rig.Sampler(config).group(0, 0), rig.trainer(config)
    worker.parameters.values.data.add_(
        0.05 * torch.randn(worker.parameters.values.shape, generator=torch.Generator().manual_seed(1))
    )
    worker.parameters.changed()
    sums = worker.update.group_sums(TrainRequest(0, (meta,)), *tickets)
    whole = replace(meta, parts=(meta.selected,))
    apart = [replace(meta, parts=(part,)) for part in meta.parts]
    gradients = []
    for metas in ([whole], [with_means(meta, sums)], apart):
        worker.update.begin(0, StepPlan(rows=rig.rows([(meta, tickets)])))
        for index, one in enumerate(metas):
            worker.update.accumulate([replace(one, group=index)], *tickets)
        gradients.append(rig.gradient(worker))
    scale = float(gradients[0].abs().max())
    assert torch.allclose(gradients[1], gradients[0], rtol=0, atol=1e-4 * scale)
    assert not torch.allclose(gradients[2], gradients[0], rtol=0, atol=1e-2 * scale)


def test_the_average_that_a_loss_compares_with_follows_the_weights_at_its_pace() -> None:
    config = rig.tiny_config()
    config.algorithm.name, config.algorithm.sde_type = "awm", "ode"
    config.algorithm.average_decay, config.algorithm.average_coef = "rising", 1.0
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    expected, distances = worker.parameters.values.data.double(), []
    for step in (0, 1):
        distances.append(rig.update(worker, step, [sampler.group(step, 0)]).metrics["average_kl"])
        decay = 0.25 + 0.005 * (step + 1)
        expected = decay * expected + (1.0 - decay) * worker.parameters.values.data.double()
    assert worker.versions.average is not None
    assert torch.allclose(worker.versions.average.double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(worker.parameters.values.data.double(), expected, rtol=0, atol=1e-4)
    assert distances[0] == 0.0 < distances[1]


def test_a_reference_has_the_guidance_that_it_is_given() -> None:
    """An untrained LoRA is the reference, so only other guidance gives a distance."""
    distances = []
    for scale in (None, 3.0, 5.0):
        config = rig.tiny_config()
        config.algorithm.name, config.algorithm.sde_type, config.algorithm.kl_coef = "diffusion_nft", "ode", 0.1
        config.algorithm.reference_cfg_scale, config.rollout.true_cfg_scale = scale, 1.0
        worker, sampler = rig.trainer(config), rig.Sampler(config)
        worker.update.set_negatives(sampler.negatives())
        distances.append(rig.update(worker, 0, [sampler.group(0, 0)]).metrics["kl"])
    assert distances[0] == 0.0 < 3.0 * distances[1] < distances[2]


def test_streaming_makes_one_optimizer_step_per_batch() -> None:
    config = rig.tiny_config(updates_per_batch=2)
    check_batching(config)
    config.hand_over = "stream"
    with pytest.raises(ValueError, match="hand_over=stream"):
        check_batching(config)


@pytest.mark.parametrize(("size", "name"), [(1, "dpo"), (3, "flow_grpo")])
def test_parts_of_other_sizes_than_an_algorithm_can_train_are_refused(size: int, name: str) -> None:
    """A pair stays in one micro-batch; the last part may be smaller where not all images of a group train."""
    config = rig.tiny_config(micro_batch_size=size)
    config.algorithm.name = name
    with pytest.raises(ValueError, match=r"trainer\.micro_batch_size"):
        check_batching(config)
    if name != "dpo":
        config.algorithm.train_images_per_group = config.group_size
        check_batching(config)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = rig.tiny_config(lr_schedule=schedule, warmup_steps=2, learning_rate=1.0).trainer
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(expected)
    if schedule != "constant":
        assert learning_rate(config, 6, 6) == pytest.approx(0.0, abs=1e-12)


def test_behaviour_is_recomputed_under_the_version_that_sampled(sampler: rig.Sampler) -> None:
    config = rig.tiny_config()
    config.max_staleness = 2
    config.algorithm.correction = "mask"
    worker = rig.trainer(config)
    sampler.load(rig.weights(worker))
    old = [sampler.group(9, group, version=0, age=2) for group in (0, 1)]
    for step in range(2):
        fresh = rig.update(worker, step, [sampler.group(step, group) for group in (0, 1)])
    assert fresh.metrics["behaviour_divergence"] == 0.0, "at age 0 the behaviour policy is the live one"
    live = worker.parameters.fingerprint()
    worker.update.begin(2, StepPlan(rows=24))
    for meta, tickets in old:
        worker.update.accumulate([meta], *tickets)
    assert worker.parameters.fingerprint() == live, "the live weights are back after the behaviour pass"
    stats = rig.finish(worker)
    assert stats.metrics["behaviour_divergence"] > 0
    # float32 storage of the rollout's log-probs is all that is left between the two engines.
    assert stats.metrics["behaviour_gap"] < 1e-6 < 1e-4 < stats.metrics["log_prob_gap"]
    assert list(stats.kept) == [2]


def test_wrong_weights_show_in_the_behaviour_gap(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    """The falsifier of `behaviour_gap`: samples of version 0 that claim to be of version 1."""
    worker = rig.trainer(rig.tiny_config())
    rig.update(worker, 0, handed[0])
    honest = rig.update(worker, 1, [(replace(m, version=0, age=1), t) for m, t in handed[1]])
    assert honest.metrics["behaviour_gap"] < 1e-6
    false = rig.update(worker, 2, [(replace(m, version=1, age=1), t) for m, t in handed[2]])
    assert false.metrics["behaviour_gap"] > 1e-4


def test_guidance_replays_with_the_negative_prompt_of_the_rollout() -> None:
    config = rig.tiny_config()
    config.rollout.true_cfg_scale = 3.0
    guided = rig.Sampler(config)
    worker = rig.trainer(config)
    group = guided.group(0, 0)
    worker.update.begin(0, StepPlan(rows=12))
    with pytest.raises(ValueError, match="negative prompt ' ' was not set"):
        worker.update.accumulate([group[0]], *group[1])
    worker.update.set_negatives(guided.negatives())
    assert rig.update(worker, 0, [group]).metrics["log_prob_gap"] < 1e-6
    worker.update.set_negatives({" ": guided.engine.encode(["something else"])[0]})
    worker.parameters.load(worker.versions.of(0))
    assert rig.update(worker, 1, [group]).metrics["log_prob_gap"] > 1e-4


def three_steps(eps: float) -> None:
    """Optimizer steps whose gradients have an RMS of about 5e-9."""
    drawn = torch.Generator().manual_seed(3)
    vector = FlatParameters({"a": nn.Parameter(torch.randn(5, 7, generator=drawn))}, torch.device("cpu"))
    optimizer = Optimizer(TrainerConfig(eps=eps, learning_rate=1e-2), vector)
    for _ in range(3):
        vector.gradients.copy_(torch.randn(vector.gradients.shape, generator=drawn) * 5e-9)
        optimizer.step(1e-2, optimizer.gradient_norms())


def test_an_eps_that_rules_the_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        three_steps(1e-20)
        assert not caplog.records
        three_steps(1e-8)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "trainer.eps=1e-08" in caplog.text


@pytest.mark.parametrize("algorithm", ["flow_grpo", "dpo"])
def test_any_number_of_ranks_trains_any_group(algorithm: str) -> None:
    for ranks in (2, 3, 5, 64):
        config = rig.tiny_config(num_workers=ranks)
        config.algorithm.name = algorithm
        check_batching(config)
