"""Tests of the http reward against real servers on loopback that are slow, wrong, busy or gone."""

import asyncio
import json
import socket
from typing import Any

import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from tests.support.lying_server import JSON, answer, lying
from tests.unit.rewards.http_calls import ask, call, scores


def test_scores_and_extras() -> None:
    with lying(scores(0.1, 1 / 3), scores(1, 2, extras=[{"a": 1.5, "why": "x"}, {"a": 2, "why": "y"}])) as server:
        assert ask(server) == [0.1, 1 / 3]
        assert ask(server) == [{"a": 1.5, "why": "x", "score": 1.0}, {"a": 2, "why": "y", "score": 2.0}]
    head, _, body = server.asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/score HTTP/1.1")
    request = json.loads(body)
    assert request["version"] == 1 and len(request["images"]) == 2
    assert request["prompts"] == [{"text": "a red cup", "target": "cup", "metadata": {"count": 2}}]


LIES = {
    "too few": (scores(1), "must hold a list of 2 scores, got 1 of them"),
    "nan": (answer("200 OK", '{"version": 1, "scores": [1, NaN]}'), "NaN is not a JSON number"),
    "html": (answer("200 OK", "<html>Please log in</html>", "Content-Type: text/html\r\n"), "Please log in"),
    "other version": (answer("200 OK", '{"version": 2, "scores": [1, 2]}'), "version must be 1, got 2"),
    "wrong token": (answer("401 Unauthorized", '{"error": "token"}'), "answered 401 Unauthorized"),
    "redirect": (answer("302 Found", "", "Location: http://169.254.169.254/\r\n"), "redirects are not followed"),
    "compressed": (answer("200 OK", b"x", JSON + "Content-Encoding: gzip\r\n"), "the encoding 'gzip'"),
    "long": (answer("200 OK", b"x" * 300_000), "more than 200000 bytes"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_errors_at_once(name: str) -> None:
    said, message = LIES[name]
    with lying(said) as server, pytest.raises(ServerError) as raised:
        ask(server, max_reply_bytes=200_000)
    assert message in str(raised.value) and server.url in str(raised.value)
    assert len(server.asked) == 1


PASSING = {
    "408": answer("408 Request Timeout"),
    "429": answer("429 Too Many Requests", "busy"),
    "500": answer("500 Internal Server Error"),
    "503": answer("503 Service Unavailable"),
    "hangs up": None,
    "half a reply": answer("200 OK", '{"version": 1, "sco', length=60).replace(b"Content-Length", b"content-length"),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_tried_again(name: str) -> None:
    with lying(PASSING[name], scores(1, 2)) as server:
        assert ask(server) == [1.0, 2.0]
        assert len(server.asked) == 2
    with lying(PASSING[name]) as server, pytest.raises(ServerError, match=r"attempt 3, the last"):
        ask(server, retries=2)
    assert len(server.asked) == 3


def test_a_server_that_is_not_there_is_tried_again_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(ServerError, match=rf"{url}/v1/score: ConnectError: .* \(attempt 2, the last\)"):
        ask(url)


def test_retry_after_is_honoured() -> None:
    busy = answer("429 Too Many Requests", "", "Retry-After: 1\r\n")
    with lying(busy, scores(1, 2)) as server:
        assert ask(server) == [1.0, 2.0]
        assert server.times[1] - server.times[0] >= 1.0
    with (
        lying(answer("503 Service Unavailable", "", "Retry-After: 3600\r\n")) as server,
        pytest.raises(ServerError, match="it asks to wait 3600 s, longer than the deadline of 9 s"),
    ):
        ask(server, deadline=9.0)


def test_a_stall_ends_at_the_timeout_and_the_next_server_is_asked() -> None:
    stalling = answer("200 OK", '{"version": 1STALL', length=1000)
    with lying(stalling) as hung, lying(scores(1, 2)) as other:
        # The prompt's index is 3: it begins at server 1.
        assert ask([other.url, hung.url], timeout=3.0, retries=1) == [1.0, 2.0]
        assert (hung.connections, other.connections) == (1, 1)
        with pytest.raises(ServerError, match=rf"{hung.url}.* gave no answer within 0\.3 s \(attempt 1, the last\)"):
            ask(hung, timeout=0.3, retries=0)


def test_the_deadline_bounds_all_attempts_and_says_what_went_wrong() -> None:
    with (
        lying(answer("500 Internal Server Error", "broken")) as server,
        pytest.raises(ServerError, match=r"within the deadline of 3 s; the last attempt .*500 .*broken"),
    ):
        ask(server, retries=50, timeout=3.0, deadline=3.0)


def test_several_servers_by_number_and_the_next_one_where_one_fails() -> None:
    with lying(scores(0)) as first, lying(scores(1), None, scores(1)) as second:
        reward = HTTP([first.url, second.url], batch="one_by_one", retries=1, concurrency=1)

        async def twice() -> tuple[list[Any], list[Any]]:
            return await call(reward), await call(reward)

        # The prompt's index is 3: image 0 begins at server 1, image 1 at server 0. Then server 1 hangs up once.
        assert asyncio.run(twice()) == ([1.0, 0.0], [0.0, 0.0])
    assert (len(first.asked), len(second.asked)) == (3, 2)


def test_the_cap_on_requests_under_way() -> None:
    async def capped() -> int:
        reward = HTTP(server.url, batch="one_by_one", concurrency=3)
        task = asyncio.create_task(call(reward, 10))
        while len(server.asked) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(server.asked)

    with lying(answer("200 OK", "STALL", length=99)) as server:
        assert asyncio.run(capped()) == 3


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REWARD_TOKEN", "s3cret")
    with lying(scores(1, 2)) as server:
        ask(server, token_env="TEST_REWARD_TOKEN")
        assert b"Authorization: Bearer s3cret" in server.asked[0]
        monkeypatch.delenv("TEST_REWARD_TOKEN")
        for value in (None, "", " \n", "s3\ncret", "s3\x07cret", "s3crét"):
            if value is not None:
                monkeypatch.setenv("TEST_REWARD_TOKEN", value)
            wrong = "is no printable ASCII on one line" if (value or "").strip() else "is not set or empty"
            with pytest.raises(ServerError, match=f"token_env=TEST_REWARD_TOKEN: this variable {wrong}") as raised:
                ask(server, token_env="TEST_REWARD_TOKEN")
            assert "s3" not in str(raised.value)
        monkeypatch.setenv("TEST_REWARD_TOKEN", "s3cret\n")
        ask(server, token_env="TEST_REWARD_TOKEN")
        ask(server)
        assert b"Authorization: Bearer s3cret\r\n" in server.asked[1] and b"Authorization" not in server.asked[2]
