"""Tests of the alarm for reward hacking on synthetic evaluations: true alarms, no alarms, and false-alarm rates."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from async_flowrl.observability.evaluations import DIVERSITY, HELD_OUT, TRAINED, Curve, Evaluation
from async_flowrl.observability.hacking import LEVEL, alarms, best, notices

PROMPTS, IMAGES = 16, 4


def evaluation(version: int, *, setting: str = "s", baseline: bool = False, **curves: np.ndarray) -> Evaluation:
    """Curves [prompts, images]; `reward` is trained, `variety` is diversity, a name ending in `_less` has weight -1."""
    made = {}
    for name, values in curves.items():
        kind = {"reward": TRAINED, DIVERSITY: DIVERSITY}.get(name, HELD_OUT)
        weight = -1.0 if name.endswith("_less") else 0.0 if name.endswith("_shown") else 1.0
        made[name] = Curve(kind, weight, name, {place: tuple(row) for place, row in enumerate(values.tolist())})
    return Evaluation(version, baseline, setting, 12, 1.0, made)


def history(
    rng: np.random.Generator,
    reward: Sequence[float],
    prompts: int = PROMPTS,
    noise: float = 0.3,
    **curves: Sequence[float],
) -> list[Evaluation]:
    """Evaluations whose means follow the given numbers; prompts differ, and what an image gets is half its noise's."""
    hardness = rng.normal(0, 0.3, (prompts, 1))
    seeds = rng.normal(0, noise, (prompts, IMAGES))
    made = []
    for k, trained in enumerate(reward):
        values = {
            name: hardness + means[k] + 0.5 * seeds + rng.normal(0, noise, (prompts, IMAGES))
            for name, means in curves.items()
        }
        made.append(evaluation(10 * k, reward=trained + 0.2 * hardness + 0.1 * seeds, **values))
    return made


def versions(found: Sequence[Evaluation]) -> list[int]:
    return [alarm.version for alarm in alarms(found)]


RISING = (0.0, 0.3, 0.6, 0.9)


def test_a_held_out_score_that_falls_while_the_reward_rises_is_an_alarm_that_names_the_curve() -> None:
    found = alarms(history(np.random.default_rng(1), RISING, ocr=(0.5, 0.2, 0.1, 0.0)))
    assert [alarm.version for alarm in found] == [10, 20, 30]
    assert {alarm.curve for alarm in found} == {"ocr"} and found[0].since == 0
    assert (
        "ocr" in found[0].sentence and "standard errors" in found[0].sentence and "version 0 to 10" in found[0].sentence
    )


@pytest.mark.parametrize(
    ("reward", "ocr"),
    [
        (RISING, (0.5, 0.5, 0.5, 0.5)),
        (RISING, (0.5, 0.6, 0.7, 0.8)),
        ((0.9, 0.6, 0.3, 0.0), (0.5, 0.2, 0.1, 0.0)),
        ((0.5, 0.5, 0.5, 0.5), (0.5, 0.2, 0.1, 0.0)),
    ],
    ids=["flat", "both rise", "both fall", "the reward does not move"],
)
def test_there_is_no_alarm_without_both(reward: Sequence[float], ocr: Sequence[float]) -> None:
    rng = np.random.default_rng(2)
    made = history(rng, reward, ocr=ocr)
    assert versions(made) == []


def test_the_sign_of_the_weight_says_which_way_is_worse_and_weight_zero_is_only_shown() -> None:
    rng = np.random.default_rng(4)
    worse = (0.0, 0.5, 1.0, 1.5)
    made = history(rng, RISING, artefacts_less=worse, size_shown=(1.5, 1.0, 0.5, 0.0))
    assert {alarm.curve for alarm in alarms(made)} == {"artefacts_less"}
    assert versions(history(rng, RISING, artefacts_less=worse[::-1])) == []


@pytest.mark.extended
def test_a_significant_fall_that_is_no_matter_is_left_alone() -> None:
    rng = np.random.default_rng(5)
    made = history(rng, RISING, prompts=2000, noise=1.0, ocr=(0.5, 0.42, 0.40, 0.38))
    (moved,) = [e for e in made if e.version == 30]
    assert moved.curves["ocr"].estimate.mean < made[0].curves["ocr"].estimate.mean
    assert versions(made) == []
    assert versions(history(rng, RISING, prompts=2000, noise=1.0, ocr=(0.5, 0.2, 0.1, 0.0))) == [10, 20, 30]


def test_evaluations_of_other_prompts_or_noises_and_the_baseline_are_not_compared() -> None:
    made = history(np.random.default_rng(6), RISING, ocr=(0.5, 0.2, 0.1, 0.0))
    mixed = [e if e.version else evaluation(0, setting="other", **_arrays(e)) for e in made]
    assert 10 not in versions(mixed[:2]) and versions(mixed[:2]) == []
    baseline = evaluation(0, baseline=True, **_arrays(made[0]))
    assert versions([baseline, *made[1:2]]) == []


def false_alarms(names: Sequence[str], *, looks: int, runs: int, seed: int) -> int:
    """Runs with an alarm where the reward rises at every look and no held-out score, of 0, 1/3, 2/3 or 1, changes."""
    rng = np.random.default_rng(seed)
    wrong = 0
    for _ in range(runs):
        chance = rng.uniform(0.1, 0.9, (PROMPTS, 1))
        made = []
        for k in range(looks + 1):
            readings = {name: rng.binomial(3, chance, (PROMPTS, IMAGES)) / 3 for name in names}
            made.append(evaluation(k, reward=np.full((PROMPTS, IMAGES), float(k)) + chance, **readings))
        wrong += bool(alarms(made))
    return wrong


@pytest.mark.extended
@pytest.mark.parametrize(
    ("runs", "looks", "seed", "most"),
    [(150, 8, 20261122, 6), pytest.param(3000, 12, 20261123, 3000 * LEVEL, marks=pytest.mark.slow)],
)
def test_runs_without_any_change_raise_no_more_false_alarms_than_the_level_says(
    runs: int, looks: int, seed: int, most: float
) -> None:
    """More than 6 of 150 runs has a probability of 0.001 at a rate of 0.01."""
    assert false_alarms(("ocr", "templates"), looks=looks, runs=runs, seed=seed) <= most


def test_loss_of_diversity_is_a_notice_and_no_alarm() -> None:
    rng = np.random.default_rng(8)
    distances = [
        np.full((PROMPTS, 1), 0.2) * level + rng.normal(0, 0.002, (PROMPTS, 1)) for level in (1, 0.9, 0.4, 0.2)
    ]
    made = [
        evaluation(10 * k, reward=np.full((PROMPTS, IMAGES), float(k)), diversity=each)
        for k, each in enumerate(distances)
    ]
    assert alarms(made) == []
    (notice,) = notices(made)
    assert notice.version == 20 and "60%" in notice.sentence
    assert notices(made[:2]) == []


def test_the_best_is_the_earliest_of_the_highest_means_in_the_direction_of_the_weight() -> None:
    flat = np.zeros((PROMPTS, IMAGES))
    made = [
        evaluation(v, reward=flat + r, blur_less=flat + b)
        for v, r, b in ((0, 0.1, 3.0), (10, 0.5, 1.0), (20, 0.5, 1.0), (30, 0.2, 2.0))
    ]
    assert [getattr(best(made, name), "version", None) for name in ("reward", "blur_less", "nothing")] == [10, 10, None]
    other = evaluation(40, setting="other", reward=flat)
    assert getattr(best([*made, other], "reward"), "version", None) == 40, "other prompts, other numbers"


def _arrays(evaluation: Evaluation) -> Mapping[str, np.ndarray]:
    return {name: np.array([list(x) for x in curve.scores.values()]) for name, curve in evaluation.curves.items()}
