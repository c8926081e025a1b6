"""Tests of the example reward servers with a small scorer instead of a model, called by the http reward."""

import asyncio
import json
import math
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.types import Prompt
from tests.support.documents import script
from tests.support.lying_server import LyingServer, answer, lying
from tests.support.reward_server import served
from tests.unit.rewards.http_calls import ask

IMAGES = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)


def example(name: str) -> Any:
    return script(f"examples/reward_servers/{name}.py")


CHECKOUT = """
MY_CONFIG_PATH = MY_CKPT_PATH = None

def load_geneval():
    assert MY_CONFIG_PATH.endswith("/config.py") and MY_CKPT_PATH.endswith("/weights")
    assert open("reward_server/object_names.txt").read() == "cup\\n"

    def compute(images, rows, only_strict):
        assert not only_strict and all(image.size == (4, 4) for image in images)
        assert all(row["prompt"] == "two cups" and row["include"][0]["class"] == "cup" for row in rows)
        return [0.5] * len(rows), [1.0] * len(rows), [0.0] * len(rows), {}, {}

    return compute
"""


async def scores_of(url: str) -> list[Any]:
    return await HTTP(url)(IMAGES, Prompt(0, "a cup"))


def test_hpsv3() -> None:
    calls: list[int] = []

    def reward(pictures: list[Any], prompts: list[str]) -> Any:
        assert prompts == ["a cup"] * len(pictures)
        calls.append(len(pictures))
        return np.stack([[np.asarray(picture).mean(), math.log(0.5)] for picture in pictures])

    with served(example("hpsv3_server").scorer(reward, batch_size=2)) as url:
        found = asyncio.run(scores_of(url))
    assert found == [{"score": float(image.mean()), "sigma": 0.5} for image in IMAGES]
    assert calls == [2, 2, 1]


def test_image_reward() -> None:
    with served(example("image_reward_server").scorer(lambda prompt, picture: len(prompt) + picture.width)) as url:
        assert asyncio.run(scores_of(url)) == [9.0] * 5


def test_geneval_gets_the_rows_of_the_prompt_file_and_the_checkout_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the server's own loader: a checkout whose `load_geneval` stands in for the detector's."""
    (tmp_path / "reward_server").mkdir()
    (tmp_path / "reward_server" / "__init__.py").touch()
    (tmp_path / "reward_server" / "object_names.txt").write_text("cup\n")
    (tmp_path / "reward_server" / "gen_eval.py").write_text(CHECKOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = example("geneval_server")
    row = {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    with served(module.scorer(module.loaded(tmp_path, tmp_path / "config.py", tmp_path / "weights"))) as url:
        reply = asyncio.run(HTTP(url)(IMAGES[:2], Prompt(0, "two cups", metadata=row)))
        with pytest.raises(ServerError, match=r"422 .*a cup.* is no row of GenEval: it has no tag and no include"):
            asyncio.run(scores_of(url))
    assert reply == [{"score": 0.5, "correct": 1.0, "strict": 0.0}, {"score": 0.5, "correct": 1.0, "strict": 0.0}]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


def adapter() -> Any:
    return script("examples/other_reward_servers/adapter.py")


@contextmanager
def adapted(protocol: str, *replies: bytes) -> Iterator[tuple[str, LyingServer]]:
    with (
        lying(*replies) as other,
        httpx.Client(trust_env=False, timeout=30) as client,
        served(adapter().PROTOCOLS[protocol](other.url, client)) as url,
    ):
        yield url, other


def test_flow_grpos_servers() -> None:
    geneval = {"scores": np.array([0.25, 1.0]), "rewards": [0.0, 1.0], "strict_rewards": [0.0, 1.0], "group": {}}
    replies = [answer("200 OK", pickle.dumps(each, protocol=4)) for each in (geneval, {"outputs": [3, 4]})]
    replies.append(answer("500 INTERNAL SERVER ERROR", "Traceback\nKeyError: tag\n"))
    with adapted("flow_grpo", *replies) as (url, other):
        found = ask(url)
        assert [each["score"] for each in found] == [0.25, 1.0] and found[1]["strict_rewards"] == 1.0
        assert ask(url) == [3.0, 4.0]
        with pytest.raises(ServerError, match="answered 500: KeyError: tag"):
            ask(url, retries=0)
    sent = pickle.loads(other.asked[0].partition(b"\r\n\r\n")[2])
    assert sent["prompts"] == ["a red cup"] * 2 and sent["only_strict"]
    assert sent["meta_datas"] == [{"count": 2, "prompt": "a red cup"}] * 2
    assert all(image.startswith(b"\xff\xd8") for image in sent["images"])


def test_flow_factorys_server() -> None:
    with adapted("flow_factory", answer("200 OK", '{"rewards": [1, 2]}')) as (url, other):
        assert ask(url) == [1.0, 2.0]
    sent = json.loads(other.asked[0].partition(b"\r\n\r\n")[2])
    assert sent["prompt"] == ["a red cup"] * 2 and len(sent["image"]) == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("flow_grpo", pickle.dumps({"scores": [Evil()]})),
        ("flow_grpo", pickle.dumps({"scores": [1.0]})),
        ("flow_grpo", pickle.dumps({"error": "no GPU"})),
        ("flow_grpo", pickle.dumps([1.0, 2.0])),
        ("flow_grpo", b"rubbish"),
        ("flow_factory", b'{"error": "no", "rewards": []}'),
        ("flow_factory", b'{"rewards": [1, NaN]}'),
        ("flow_factory", b"<html>"),
    ],
)
def test_a_wrong_reply_is_a_failure_and_no_score(protocol: str, reply: bytes) -> None:
    with adapted(protocol, answer("200 OK", reply)) as (url, _), pytest.raises(ServerError, match=" 500 "):
        ask(url, retries=0)


@pytest.mark.parametrize("protocol", range(2, 5))
def test_pickles_hold_numbers_texts_and_arrays_alone(protocol: int) -> None:
    read = adapter().unpickled
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = {"a": array, "b": np.float64(0.5), "c": np.array([{"tag": "x"}, None], dtype=object), "d": b"\xff"}
    found = read(pickle.dumps(value, protocol=protocol))
    assert (found["a"] == array).all() and found["b"] == 0.5 and found["c"][0] == {"tag": "x"} and found["d"] == b"\xff"
    for bad in ({"a": Evil()}, {"a": print}, {"a": asyncio.Queue}):
        with pytest.raises(ValueError, match="which is refused"):
            read(pickle.dumps(bad, protocol=protocol))
    good = pickle.dumps({"scores": np.zeros(4)}, protocol=protocol)
    for end in range(0, len(good), 7):
        with pytest.raises(ValueError, match="no pickle"):
            read(good[:end])
