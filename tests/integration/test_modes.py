"""Tests of all modes on the real engine: staleness stays within the bound, and timing does not change the weights."""

from pathlib import Path

import pytest

from tests.integration.runs import Run, overtaking, train

STALENESS = {"sync": 0, "stream": 0, "one_step_off": 1, "fully_async": 2}
DELAYS = ["disturb.generate=0.3", *(f"disturb.{stage}=0.1" for stage in ("score", "update", "publish"))]


SHORT = "total_steps=3"
"""Of which the last is made with weights that are one version old and no longer those of the start."""
STEPS = 4
"""Steps of `plain`: in the last two the staleness of every mode is at its bound."""


def overrides(mode: str) -> list[str]:
    return [f"total_steps={STEPS}", *(["max_staleness=2"] if mode == "fully_async" else [])]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One undisturbed run of every mode."""
    folder = tmp_path_factory.mktemp("plain")
    return {mode: train(folder / mode, mode, *overrides(mode)) for mode in STALENESS}


@pytest.mark.parametrize("mode", STALENESS)
def test_staleness_at_the_trainers_door(plain: dict[str, Run], mode: str) -> None:
    run, bound = plain[mode], STALENESS[mode]
    expected = [min(step, bound) for step in range(STEPS)]
    assert run.column("staleness/max") == expected
    assert run.column("staleness/mean") == expected
    assert run.summary["staleness_max"] == bound
    handed = run.tickets("HANDED")
    assert [event["ordinal"] for event in handed] == list(range(2 * STEPS))
    assert all(event["step"] - event["version"] == min(event["step"], bound) for event in handed)
    assert all(event["digest"] == run.digests[event["version"]] for event in handed)
    assert len(run.digests) == len(set(run.digests)) == STEPS + 1, "else equal digests would mean nothing"


def test_the_same_weights_with_two_workers_and_delays_everywhere(plain: dict[str, Run], tmp_path: Path) -> None:
    """Of `one_step_off`, `full_run` says the same on Ray (test_modes_on_ray.py)."""
    mode = "fully_async"
    run = overtaking(tmp_path, mode, *overrides(mode), "reward.num_workers=2", *DELAYS)
    ordinals = [event["ordinal"] for event in plain[mode].tickets("SCORING")]
    assert ordinals == sorted(ordinals)
    assert run.digests == plain[mode].digests
    assert run.sample_log == plain[mode].sample_log
    assert run.column("staleness/max") == plain[mode].column("staleness/max")


@pytest.mark.extended
def test_the_same_weights_with_smaller_tickets_made_out_of_order(plain: dict[str, Run], tmp_path: Path) -> None:
    """Batches of another size round differently: the reference cuts its tickets into chunks of the same size."""
    whole = train(tmp_path / "whole", "one_step_off", SHORT, "rollout.batch_size=2")
    parts = overtaking(tmp_path / "parts", "one_step_off", SHORT, "ticket_size=2", *DELAYS)
    assert len(parts.tickets("TRAINED")) == 2 * len(whole.tickets("TRAINED"))
    assert parts.digests == whole.digests


def test_stream_is_sync_with_the_same_micro_batches(plain: dict[str, Run]) -> None:
    assert plain["stream"].digests == plain["sync"].digests
    assert plain["stream"].sample_log == plain["sync"].sample_log


def test_the_closed_loop_on_policy(tmp_path: Path) -> None:
    """Trained on what it sampled itself, the trainer's own log-probs are the rollout's."""
    run = train(tmp_path, "sync", "rollout.true_cfg_scale=4", "total_steps=4")
    for line in run.metrics[2:]:
        assert abs(line["ratio/mean"] - 1.0) < 1e-6
        assert line["log_prob_gap"] < 1e-6
        assert line["behaviour_gap"] < 1e-6


@pytest.mark.extended
def test_two_updates_per_batch(plain: dict[str, Run], tmp_path: Path) -> None:
    once, again = (
        train(tmp_path / name, "one_step_off", SHORT, "hand_over=batch", "trainer.updates_per_batch=2", *extra)
        for name, extra in (("once", []), ("again", ["rollout.num_workers=2", *DELAYS]))
    )
    assert once.digests == again.digests
    assert len(set(once.digests)) == 4 and not set(once.digests[1:]) & set(plain["one_step_off"].digests)
    assert once.summary["staleness_max"] == 1
    assert once.summary["staleness_updates_max"] == 3
