"""Tests of docs/rewards/http.md: its request, reply, refusal and options are those of server and client."""

import base64
import io
import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from async_flowrl.cli.serve_rewards import scorer
from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.http_contract import read_reply
from async_flowrl.rewards.registry import check_rewards
from tests.support.reward_server import served

PAGE = (Path(__file__).parents[3] / "docs" / "rewards" / "http.md").read_text(encoding="utf-8")
BLOCKS = {name: json.loads(text) for name, text in re.findall(r"```json (\w+)\n(.*?)```", PAGE, re.DOTALL)}


def test_the_examples_are_what_is_said() -> None:
    """The page's picture is 2 x 2 pixels of pure red; the weight of the served term is 2."""
    file = base64.b64decode(BLOCKS["request"]["images"][0])
    assert (np.asarray(Image.open(io.BytesIO(file))) == [255, 0, 0]).all()
    config = compose_config("one_step_off", ["reward.terms.color.weight=2"]).reward
    with served(scorer(config)) as url, httpx.Client(trust_env=False) as client:
        reply = client.post(f"{url}/v1/score", json=BLOCKS["request"])
        assert reply.json() == BLOCKS["reply"]
        assert read_reply(reply.content, 1) == [{"score": 2.0, "color": 1.0}]
        wrong = BLOCKS["request"] | {"images": BLOCKS["request"]["images"] * 2, "prompts": ["red"] * 3}
        refused = client.post(f"{url}/v1/score", json=wrong)
        assert (refused.status_code, refused.json()) == (400, BLOCKS["refusal"])


@pytest.mark.parametrize("number", range(2))
def test_the_configurations_of_the_page_are_accepted(number: int, tmp_path: Path) -> None:
    terms = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[number]
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "page.yaml").write_text(terms)
    config = compose_config("one_step_off", ["reward=page"], tmp_path).reward
    assert not check_rewards(config)
