"""Tests of `serve-rewards`: its scores and extras."""

import asyncio

import httpx
import numpy as np
import pytest

from async_flowrl.cli import serve_rewards as command
from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import body, png, post, results


def test_scores_extras_and_health(url: str) -> None:
    reply = post(f"{url}/v1/score", body(images=[png(1), png(2)]))
    extras = [{"group": 2.0, "prompt": "a cup"}] * 2
    assert reply.json() == {"version": 1, "scores": [1.0, 2.0], "extras": extras}
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "version": 1}


def test_the_client_gets_the_bits_that_the_reward_gave(url: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    expected = [float(image.mean()) for image in noise]
    for options in ({}, {"encoding": "multipart"}, {"batch": "one_by_one"}):
        found = asyncio.run(results(HTTP(url, **options), noise))
        assert [each["score"] for each in found] == expected
    assert [each["score"] for each in asyncio.run(results(HTTP(url, encoding="jpeg"), noise))] != expected


def test_any_reward_of_ours_is_served_with_its_terms() -> None:
    terms = "{color: {weight: 2.0}, jpeg_compressibility: {weight: 0.5}}"
    config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
    with served(command.scorer(config)) as url:
        noise = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
        for each in asyncio.run(results(HTTP(url), noise, "red")):
            assert each["score"] == 2.0 * each["color"] + 0.5 * each["jpeg_compressibility"]
        with pytest.raises(ServerError, match=r"422 .*must be one of blue, green, red"):
            asyncio.run(results(HTTP(url), noise, "purple"))
    for name in ("refuses", "refuses_in_a_group", "RefusesOne"):
        terms = f"{{mine: {{name: 'tests.unit.rewards.own_rewards:{name}'}}}}"
        config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
        with served(command.scorer(config)) as url:
            reply = post(f"{url}/v1/score")
        told = {"version": 1, "error": "reward 'mine': such prompts are not scored"}
        assert (reply.status_code, reply.json()) == (422, told)
    config = compose_config("one_step_off", ["reward=ocr"]).reward
    with served(command.scorer(config)) as url, pytest.raises(ServerError, match="the reward needs a target"):
        asyncio.run(results(HTTP(url), noise, "no quotes"))
