"""Tests of the dialects of the http reward: JSON, and the pickles of flow_grpo's servers."""

import os
import pickle
from typing import Any

import numpy as np
import pytest

from async_flowrl.rewards import http_pickle
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_post import ServerError
from tests.support.lying_server import answer, lying
from tests.unit.rewards.http_calls import ask


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_flow_grpos_pickles_hold_numbers_and_arrays_only(protocol: int) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    texts, rows = np.array(["ab", "c"]), np.array([{"tag": "x"}, None], dtype=object)
    value = {"a": array, "b": np.asfortranarray(array), "c": np.float64(0.5), "d": texts, "e": rows, "f": b"\xff"}
    plain = {
        "a": array.tolist(),
        "b": array.tolist(),
        "c": 0.5,
        "d": ["ab", "c"],
        "e": [{"tag": "x"}, None],
        "f": b"\xff",
    }
    assert http_pickle.loads(pickle.dumps(value, protocol=protocol)) == plain
    for bad in (Evil(), {"scores": [Evil()]}, np.zeros(1, "f4,f4"), {1}, 1j, np.array([1j]), print, HTTP):
        with pytest.raises(http_pickle.PickleRefused):
            http_pickle.loads(pickle.dumps(bad, protocol=protocol))


def test_flow_grpos_pickles_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pickle, "MAX_VALUES", 10_000)  # it is a million, which takes seconds to count
    bomb: list[Any] = []
    for _ in range(8):
        bomb = [bomb] * 1000
    with pytest.raises(http_pickle.PickleRefused, match="more than 10000 values"):
        http_pickle.loads(pickle.dumps(bomb))
    with pytest.raises(http_pickle.PickleRefused, match="announces more bytes than it has"):
        http_pickle.loads(b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.")
    good = pickle.dumps(np.zeros(4), protocol=4)
    for end in range(0, len(good), 7):
        with pytest.raises(http_pickle.PickleRefused):
            http_pickle.loads(good[:end])


def test_flow_grpos_pickles_change_nothing_in_this_process() -> None:
    """BUILD sets attributes of whatever is on the stack: of a function, its defaults."""
    state = b"N}X\x0c\x00\x00\x00__defaults__Ns\x86b0K\x01."
    with pytest.raises(http_pickle.PickleRefused, match="sets the state of something else than an array"):
        http_pickle.loads(b"\x80\x02cnumpy._core.numeric\n_frombuffer\n" + state)
    assert http_pickle.loads(pickle.dumps(np.float64(3.0), protocol=2)) == 3.0


def test_dialects() -> None:
    grpo = {"scores": np.array([0.25, 1.0]), "rewards": [0.0, 1.0], "strict_rewards": [0.0, 1.0], "group_rewards": {}}
    pickled = [answer("200 OK", pickle.dumps(each)) for each in (grpo, {"outputs": [3, 4]}, {"scores": [Evil()]})]
    with lying(*pickled, answer("200 OK", pickle.dumps({"error": "no GPU"}))) as server:
        found = ask(server, dialect="flow_grpo")
        assert [each["score"] for each in found] == [0.25, 1.0] and found[0]["strict_rewards"] == 0.0
        assert ask(server, dialect="flow_grpo") == [3.0, 4.0]
        with pytest.raises(ServerError, match=r"the pickle asks for posix\.system, which is refused"):
            ask(server, dialect="flow_grpo")
        with pytest.raises(ServerError, match="the server says: 'no GPU'"):
            ask(server, dialect="flow_grpo")
    sent = pickle.loads(server.asked[0].partition(b"\r\n\r\n")[2])
    assert sent["prompts"] == ["a red cup"] * 2 and sent["meta_datas"] == [{"count": 2}] * 2 and sent["only_strict"]
    assert all(image.startswith(b"\xff\xd8") for image in sent["images"])
    with lying(answer("200 OK", '{"rewards": [1, 2]}'), answer("200 OK", '{"error": "no", "rewards": []}')) as server:
        assert ask(server, dialect="flow_factory") == [1.0, 2.0]
        with pytest.raises(ServerError, match="the server says: 'no'"):
            ask(server, dialect="flow_factory")
    assert server.asked[0].startswith(b"POST /compute ")
