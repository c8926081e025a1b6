"""Tests of the warning at a run's start that a reward's calls may take longer than `deadlines.score`."""

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.time_limits import too_slow
from async_flowrl.rewards.vlm_judge import VLMJudge
from async_flowrl.rewards.waves import Waves
from async_flowrl.run.prepare import doubts_of, prepare


def said(*overrides: str) -> list[str]:
    return too_slow(compose_config("one_step_off", list(overrides)))


@pytest.mark.parametrize("overrides", [["reward=vlm_judge"], ["reward=http"], ["experiment=qwen_image_ocr_vlm"], []])
def test_what_is_shipped_fits(overrides: list[str]) -> None:
    assert said(*overrides) == []


def test_the_arithmetic_of_a_judge_is_in_the_sentence() -> None:
    """33 calls at 32 a time are two waves, whose last one may end 480 s after the first began."""
    (sentence,) = said("reward=vlm_judge", "group_size=33")
    assert sentence.startswith(
        "reward.terms.vlm_judge: 33 images are 33 calls, 32 at a time, each up to 240 s: up to 480 s in all, more than "
        "deadlines.score=300, at which the worker is killed"
    )
    assert "use deadlines.score=540" in sentence and "more concurrency" in sentence
    assert said("reward=vlm_judge", "group_size=33", "deadlines.score=540") == []
    assert said("reward=vlm_judge", "group_size=33", "++reward.terms.vlm_judge.options.images=group") == []
    assert said("reward=vlm_judge", "group_size=33", "++reward.terms.vlm_judge.options.deadline=150") == []
    assert said("reward=vlm_judge", "group_size=33", "++reward.terms.vlm_judge.options.concurrency=33") == []


def test_evaluations_and_held_out_terms_count() -> None:
    (sentence,) = said("reward=vlm_judge", "evaluate.images_per_prompt=40")
    assert "40 images are 40 calls" in sentence
    held_out = "+evaluate.reward.terms.far={name: http, options: {url: 'http://h:1', batch: one_by_one, deadline: 200}}"
    assert said(held_out, "evaluate.images_per_prompt=8") == []
    (sentence,) = said(held_out, "evaluate.images_per_prompt=9")
    assert sentence.startswith("evaluate.reward.terms.far: 9 images are 9 calls, 8 at a time")


def test_it_is_said_before_anything_starts() -> None:
    config = compose_config("one_step_off", ["reward=http", "deadlines.score=100", "runtime.backend=local"])
    (sentence,) = [each for each in doubts_of(prepare(config)) if "deadlines.score" in each]
    assert "24 images are one call, up to 240 s: up to 240 s in all, more than deadlines.score=100" in sentence


def test_the_defaults_are_those_of_the_options() -> None:
    url = "http://127.0.0.1:8000"
    http, judge = HTTP(url, batch="one_by_one"), VLMJudge(url, model="m")
    assert HTTP.waves(5, batch="one_by_one") == Waves(5, http.concurrency, http.deadline)
    assert HTTP.waves(5) == Waves(1, http.concurrency, http.deadline)
    assert VLMJudge.waves(5) == Waves(5, judge.concurrency, judge.deadline)
