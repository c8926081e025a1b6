"""Tests of the weights that made a sample: they are kept, replayed, and a false claim of them shows."""

from dataclasses import replace

import pytest

from async_flowrl.training.messages import StepPlan
from tests.support import trainer_rig as rig


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


def test_a_version_no_longer_kept_is_named(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    for step, batch in enumerate(handed):
        rig.update(worker, step, batch)
    assert sorted(worker.versions.retained) == [2, 3]
    meta, tickets = handed[0][0]
    worker.update.begin(3, StepPlan(rows=12))
    with pytest.raises(KeyError, match="version 0 is not kept"):
        worker.update.accumulate([replace(meta, version=0, age=3)], *tickets)


def test_wrong_weights_show_in_the_behaviour_gap(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    """The falsifier of `behaviour_gap`: samples of version 0 that claim to be of version 1."""
    worker = rig.trainer(rig.tiny_config())
    rig.update(worker, 0, handed[0])
    honest = rig.update(worker, 1, [(replace(m, version=0, age=1), t) for m, t in handed[1]])
    assert honest.metrics["behaviour_gap"] < 1e-6
    false = rig.update(worker, 2, [(replace(m, version=1, age=1), t) for m, t in handed[2]])
    assert false.metrics["behaviour_gap"] > 1e-4


def test_a_step_without_a_replay_has_the_same_weights_and_no_gap(
    sampler: rig.Sampler, handed: list[list[rig.Handed]]
) -> None:
    """The pass under the sampling weights is left out; where the loss makes it, or none is needed, the gap stays."""
    aged = [(replace(meta, version=0, age=1), tickets) for meta, tickets in handed[1]]
    replayed, spared = (rig.trainer(rig.tiny_config()) for _ in range(2))
    for worker, replay in ((replayed, True), (spared, False)):
        first = rig.update(worker, 0, handed[0], plan=StepPlan(rows=rig.rows(handed[0]), replay=False))
        assert first.metrics["behaviour_gap"] < 1e-6, "at age 0 it costs nothing"
        second = rig.update(worker, 1, aged, plan=StepPlan(rows=rig.rows(aged), replay=replay))
        assert ("behaviour_gap" in second.metrics) == replay
        assert ("behaviour" in [span.name for span in second.spans]) == replay
    assert replayed.parameters.fingerprint() == spared.parameters.fingerprint()
    config = rig.tiny_config()
    config.algorithm.correction = "mask"
    masked = rig.trainer(config)
    rig.update(masked, 0, handed[0])
    plan = StepPlan(rows=rig.rows(aged), replay=False)
    assert rig.update(masked, 1, aged, plan=plan).metrics["behaviour_gap"] < 1e-6, "this loss needs the pass"


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
