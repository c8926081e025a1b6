"""Tests of the reward worker: the weighted sum, a user's own rewards, and refusals."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.registry import build_reward, check_rewards, is_deterministic
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import Prompt, Scores
from tests.unit.rewards.own_rewards import own, scored

PROMPT = Prompt(3, 'red "abc"', target="abc")
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.ones((4, 8, 8, 3), dtype=np.uint8)


def terms(**names: str | RewardTerm) -> RewardConfig:
    return RewardConfig(terms={key: own(term) if isinstance(term, str) else term for key, term in names.items()})


def score(config: RewardConfig, *images: np.ndarray[Any, Any]) -> Scores:
    return scored(config, PROMPT, *(images or (IMAGES,)))


def test_the_total_is_the_weighted_sum_and_parts_are_unweighted() -> None:
    """Of a group whose images come in several tickets."""
    config = terms(pixel=own("first_pixel", 2.0), level=own("constant", -4.0, value=0.5))
    scores = score(config, IMAGES[:1], IMAGES[1:3], IMAGES[3:])
    assert scores.by_term == {"pixel": (0.0, 1.0, 2.0, 3.0), "level": (0.5,) * 4}
    assert scores.total == (-2.0, 0.0, 2.0, 4.0)


def test_async_and_plain_terms_run_side_by_side() -> None:
    scores = score(terms(plain="meets_another", asynchronous="meets_another_async"))
    assert scores.total == (3.0,) * 4


@pytest.mark.parametrize(
    ("reward", "came_back"),
    [
        ("too_few", r"must return 4 finite numbers, got shape \[1\]"),
        ("breaks", "ConnectionError: the judge is away"),
        ("breaks_in_a_group", r"failed on prompt .*: ConnectionError: the judge is away$"),
        ("leaves", "SystemExit: 3"),
        ("leaves_async", "SystemExit: 3"),
        ("runs_out", "StopIteration left the reward"),
    ],
)
def test_bad_results_are_refused_by_name(reward: str, came_back: str) -> None:
    scores = score(terms(good="constant", bad=reward))
    failure = scores.failed["bad"]
    assert re.search(came_back, failure.reason) and not failure.final
    assert "reward 'bad'" in failure.reason and PROMPT.text in failure.reason
    # The other term is not lost with it.
    assert (scores.by_term, scores.total) == ({"good": (0.25,) * 4}, (0.25,) * 4)


@pytest.mark.parametrize("reward", ["refuses", "refuses_in_a_group", "RefusesOne"])
def test_a_prompt_that_a_reward_refuses_is_not_asked_of_it_again(reward: str) -> None:
    (failure,) = score(terms(picky=reward)).failed.values()
    assert failure.final and failure.refused and failure.reason == "reward 'picky': such prompts are not scored"


@pytest.mark.parametrize(("required", "kept"), [(True, False), (False, True)])
def test_a_sum_without_a_required_term_is_an_error(required: bool, kept: bool) -> None:
    bad = replace(own("too_few"), required=required)
    reward = build_reward(terms(good="constant", bad=bad))
    with ThreadPoolExecutor(2) as executor, nullcontext() if kept else pytest.raises(RewardError, match="'bad'"):
        assert asyncio.run(reward.score(PROMPT, IMAGES, executor)).total == (0.25,) * 4


def test_flags_of_the_sum() -> None:
    plain, judged = terms(a="constant"), terms(a="constant", b="Judge")
    assert (is_deterministic(plain), build_reward(plain).needs_target) == (True, False)
    assert (is_deterministic(judged), build_reward(judged).needs_target) == (False, True)
    assert check_rewards(judged)
    assert check_rewards(RewardConfig(terms={"ocr": RewardTerm()}))
    assert not check_rewards(terms(a="constant"))


class Halves:
    """Scores nothing, names the largest value, and knows an image by the means of its upper and its lower half."""

    def __call__(self, images: Any, prompt: Prompt) -> list[dict[str, Any]]:
        return [{"score": 0.0, "largest": int(image.max()), "said": f"of {prompt.text}"} for image in images]

    def features(self, images: Any) -> Any:
        half = images.shape[1] // 2
        return np.stack([images[:, :half].mean((1, 2, 3)), images[:, half:].mean((1, 2, 3))], axis=1)


def test_held_out_terms_stand_for_themselves_and_measure_distances_in_their_features() -> None:
    held_out = {"halves": RewardTerm(name=f"{__name__}:Halves"), "broken": own("breaks")}
    worker = RewardWorker(RewardConfig(terms={"color": RewardTerm()}), index=0, name="reward-0", held_out=held_out)
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[0, :2] = images[1, :2] = images[2, 2:] = 200
    try:
        found = worker.score(("halves", "broken"), Prompt(0, "red"), images[:1], images[1:])
        again = worker.score(("broken",), Prompt(0, "red"), images)
    finally:
        worker.close()
    assert found.by_term == {"halves": (0.0, 0.0, 0.0)} and "the judge is away" in found.failed["broken"].reason
    assert found.distances == {"halves": pytest.approx(2 / 3)}, "two of three pairs have nothing in common"
    assert found.extras == {"halves": {"largest": (200.0,) * 3, "said": ("of red",) * 3}}
    assert again.by_term == again.extras == {} and set(again.failed) == {"broken"}
