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
