"""Tests of means, standard errors and paired differences of evaluations, against scipy, and of their records."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.observability.evaluations import HELD_OUT, TRAINED, Curve, Evaluation, EvaluationLog, metric_keys
from async_flowrl.observability.statistics import change, diversity, estimate

RNG = np.random.default_rng(20261122)
NOW, BEFORE = (RNG.normal(level, 1.0, (7, 4)) for level in (0.3, 0.0))


@pytest.fixture(scope="module")
def stats() -> Any:
    """scipy.stats, whose import takes half a second: only the process that runs these tests pays for it."""
    return importlib.import_module("scipy.stats")


def by_prompt(values: np.ndarray) -> dict[int, tuple[float, ...]]:
    return {place: tuple(row) for place, row in enumerate(values.tolist())}


def test_errors_are_clustered_by_prompt(stats: Any) -> None:
    found, means = estimate(by_prompt(NOW)), NOW.mean(axis=1)
    assert found.mean == pytest.approx(NOW.mean()) and found.std == pytest.approx(NOW.std())
    assert found.stderr == pytest.approx(stats.sem(means))
    low, high = stats.t.interval(0.95, len(means) - 1, loc=means.mean(), scale=stats.sem(means))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    # Four copies of every image are no more evidence than one.
    assert estimate(by_prompt(np.repeat(NOW, 4, axis=1))).stderr == pytest.approx(found.stderr)


def test_a_single_prompt_counts_its_images_and_a_single_image_has_no_error(stats: Any) -> None:
    assert estimate({3: (1.0, 2.0, 3.0)}).stderr == pytest.approx(stats.sem([1.0, 2.0, 3.0]))
    alone = estimate({3: (1.0,)})
    assert (alone.mean, alone.stderr, alone.low) == (1.0, None, None)


def test_a_change_is_paired_by_prompt(stats: Any) -> None:
    moved = change(by_prompt(NOW), by_prompt(BEFORE))
    assert moved is not None
    differences = (NOW - BEFORE).mean(axis=1)
    assert moved.mean == pytest.approx(differences.mean()) and moved.stderr == pytest.approx(stats.sem(differences))
    for side, p in (("greater", moved.p_above()), ("less", moved.p_below())):
        assert p == pytest.approx(stats.ttest_1samp(differences, 0.0, alternative=side).pvalue)
    # What makes a prompt hard is in both and falls out.
    hardness = np.arange(7.0)[:, None] * 100
    again = change(by_prompt(NOW + hardness), by_prompt(BEFORE + hardness))
    assert again is not None and again.stderr == pytest.approx(moved.stderr)


def test_only_prompts_that_both_have_are_compared() -> None:
    moved = change({0: (1.0, 1.0), 1: (2.0, 2.0), 2: (3.0, 3.0)}, {1: (1.0, 1.0), 2: (1.0, 1.0), 9: (0.0, 0.0)})
    assert moved is not None and moved.mean == pytest.approx(1.5) and moved.freedom == 1
    assert change({0: (1.0,)}, {1: (1.0,)}) is None
    with pytest.raises(ValueError, match="numbers of images"):
        change({0: (1.0, 2.0)}, {0: (1.0,)})


def test_a_change_that_is_the_same_everywhere_is_certain_and_none_is_nothing() -> None:
    down = change({0: (0.0,), 1: (0.0,)}, {0: (1.0,), 1: (1.0,)})
    same = change({0: (1.0,), 1: (1.0,)}, {0: (1.0,), 1: (1.0,)})
    assert down is not None and (down.p_below(), down.p_above()) == (0.0, 1.0)
    assert same is not None and (same.p_below(), same.p_above()) == (1.0, 1.0)


def test_diversity_is_the_mean_distance_of_two_images() -> None:
    black, white = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    assert diversity(np.stack([black, white])) == pytest.approx(1.0)
    assert diversity(np.stack([black, black, white])) == pytest.approx(2 / 3)
    assert diversity(np.stack([black, black])) == 0.0
    assert diversity(black[None]) is None


def record(version: int, level: float, *, baseline: bool = False) -> Evaluation:
    curves = {
        "reward": Curve(TRAINED, 1.0, "a", by_prompt(BEFORE + level)),
        "other": Curve(HELD_OUT, -1.0, "b", by_prompt(BEFORE - level)),
    }
    return Evaluation(version, baseline, "same", 12, 1.0, curves)


def test_the_log_survives_a_restart_a_broken_last_line_and_a_return_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    log = EvaluationLog(path)
    for each in (record(0, 0.0, baseline=True), record(0, 0.0), record(10, 0.5), record(20, 1.0)):
        log.add(each)
    with path.open("a") as file:
        file.write('{"version": 30, "curv')
    again = EvaluationLog(path)
    assert again.records == log.records
    again.truncate(10)
    assert [(e.version, e.baseline) for e in EvaluationLog(path).records] == [(0, True), (0, False), (10, False)]
    again.add(record(10, 0.7))
    assert [e.version for e in again.records] == [0, 0, 10] and again.policy(10) == record(10, 0.7)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_metrics_tell_held_out_curves_apart_and_compare_with_the_first_evaluation() -> None:
    history = [record(0, 9.0, baseline=True), record(0, 0.0), record(10, 0.5)]
    keys = metric_keys(history[2], history[:2])
    assert keys["reward/change"] == pytest.approx(0.5) and keys["held_out/other/change"] == pytest.approx(-0.5)
    assert keys["reward/low"] < keys["reward/mean"] < keys["reward/high"]
    assert "reward/change" not in metric_keys(history[1], history[:1]), "the baseline is no earlier version"
