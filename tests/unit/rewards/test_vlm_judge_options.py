"""Tests of a judge's options and prompts that cannot work: refused before anything is asked."""

from typing import Any

import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.registry import build_reward, check_prompts
from async_flowrl.types import Prompt
from tests.unit.rewards.asked_judge import FAST, PROMPT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"base_url": None},
            "needs options.base_url, for example http://127.0.0.1:8000/v1, or .*judge.serve for a server",
        ),
        ({"model": ""}, "needs model, the name that the server has for it"),
        ({"base_url": "localhost:8000"}, "must be like http://127.0.0.1:8000/v1, .*got 'localhost:8000'"),
        ({"base_url": "http://127.0.0.1:65536/v1"}, "with a port from 1 to 65535, got 'http://127.0.0.1:65536/v1'"),
        ({"base_url": "http://me:word@host/v1"}, "must hold no password"),
        ({"base_url": "http://host/v1/chat/completions"}, "ends before /chat/completions"),
        ({"mode": "scores"}, "mode must be one of .*'scores'; did you mean 'score'"),
        ({"images": "groups"}, "images must be one of .*; did you mean 'group'"),
        ({"images": "group", "mode": "transcribe"}, "images=group needs mode=score, got mode=transcribe"),
        ({"prompt_template": "How good?"}, r"must contain \{prompt\} or \{target\}, got 'How good\?'"),
        ({"prompt_template": "{prmpt}"}, "'prmpt'; did you mean 'prompt'"),
        ({"range": [1]}, "range must be two rising numbers"),
        ({"range": [10, 1]}, "range must be two rising numbers"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 2, got 'hot'"),
        ({"retries": 1.5}, "retries must be a whole number of at least 0"),
        ({"top_logprobs": 50}, "top_logprobs must be a whole number from 1 to 20"),
        ({"timeout": 300.0}, "deadline=60 is shorter than one attempt, timeout=300"),
        ({"answers": {True: 1, False: 0}}, "put yes and no in quotes"),
        ({"answers": {"yes": 1}}, "must be two or more"),
        ({"answers": {"1": 1, "10": 10, "5": 5}}, "'1' and '10' begin alike"),
        ({"answers": {"yes": "1", "no": 0}}, "must have finite numbers"),
        ({"temperatures": 1}, "'temperatures'; did you mean 'temperature'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    term = RewardTerm(name="vlm_judge", options={"base_url": "http://127.0.0.1:9/v1", **FAST, **options})
    with pytest.raises(ValueError, match=message) as error:
        build_reward(RewardConfig(terms={"judge": term}))
    assert "reward.terms.judge" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"mode": "transcribe"}, {"prompt_template": "Is {target} written in it?"}])
def test_a_prompt_without_a_target_is_refused_at_the_start(options: dict[str, str]) -> None:
    term = RewardTerm(name="vlm_judge", options={"base_url": "http://127.0.0.1:9/v1", **FAST, **options})
    with pytest.raises(ValueError, match="needs a target, and prompt 'a house' has none"):
        check_prompts(RewardConfig(terms={"judge": term}), [PROMPT, Prompt(1, "a house")])
