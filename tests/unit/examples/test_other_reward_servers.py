"""Tests of the adapter for other projects' reward servers: asked by the http reward, against servers on loopback."""

import asyncio
import importlib.util
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from tests.support.lying_server import LyingServer, answer, lying
from tests.support.reward_server import served
from tests.unit.rewards.http_calls import ask

FILE = Path(__file__).parents[3] / "examples" / "other_reward_servers" / "adapter.py"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


def adapter() -> Any:
    spec = importlib.util.spec_from_file_location("adapter", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    with adapted("flow_grpo", *replies) as (url, other):
        found = ask(url)
        assert [each["score"] for each in found] == [0.25, 1.0] and found[1]["strict_rewards"] == 1.0
        assert ask(url) == [3.0, 4.0]
    sent = pickle.loads(other.asked[0].partition(b"\r\n\r\n")[2])
    assert sent["prompts"] == ["a red cup"] * 2 and sent["only_strict"]
    assert sent["meta_datas"] == [{"count": 2, "prompt": "a red cup"}] * 2
    assert all(image.startswith(b"\xff\xd8") for image in sent["images"])


def test_flow_factorys_server() -> None:
    with adapted("flow_factory", answer("200 OK", '{"rewards": [1, 2]}')) as (url, other):
        assert ask(url) == [1.0, 2.0]
    sent = json.loads(other.asked[0].partition(b"\r\n\r\n")[2])
    assert sent["prompt"] == ["a red cup"] * 2 and len(sent["image"]) == 2


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
