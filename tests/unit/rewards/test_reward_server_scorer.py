"""Tests of a reward server's queue: its places, its memory, and requests whose clients have gone."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fastapi import Request

from async_flowrl.cli import reward_server as app
from async_flowrl.cli.scorer import Asked, Refused, Scorer, Settings, Share
from async_flowrl.rewards.http_contract import ScoreRequest, encode_image
from async_flowrl.types import ByteArray, Prompt

BYTES = 100
"""What each request of these tests reserves."""


@dataclass
class Slow:
    """A reward that waits until it may go on; it counts the images of each call."""

    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    called: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        self.called.append((prompt.text, len(images)))
        self.began.set()
        assert self.go.wait(60)
        return [1.0] * len(images)


@dataclass
class Client:
    """Whether a client has hung up; `looked` is called while the server finds that out."""

    hung_up: bool = False
    looked: Callable[[], None] = lambda: None

    async def gone(self) -> bool:
        self.looked()
        await asyncio.sleep(0)
        return self.hung_up


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def request(*prompts: Prompt | str) -> ScoreRequest:
    image = encode_image(np.zeros((4, 4, 3), dtype=np.uint8), "png")
    read = [Prompt(0, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return ScoreRequest([image] * len(read), read)


def asked(scorer: Scorer, wanted: ScoreRequest, client: Client | None = None) -> Asked:
    share = Share(scorer.room)
    share.grow(BYTES)
    return Asked(wanted, (client or Client()).gone, share)


async def begun(scorer: Scorer, reward: Slow, wanted: ScoreRequest, client: Client | None = None) -> asyncio.Task[Any]:
    """A request whose first group is being scored."""
    task = asyncio.create_task(scorer.reply(asked(scorer, wanted, client)))
    assert await asyncio.to_thread(reward.began.wait, 60)
    return task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def refusal(task: asyncio.Task[Any]) -> Refused:
    with pytest.raises(Refused) as error:
        await task
    return error.value


def test_429_counts_those_that_wait_and_a_cancelled_request_frees_its_place_at_once() -> None:
    async def test() -> None:
        reward = Slow()
        scorer = Scorer(reward, Settings(waiting=2))
        first = await begun(scorer, reward, request("first"))
        second, third = (asyncio.create_task(scorer.reply(asked(scorer, request(name)))) for name in ("2", "3"))
        await settled()
        with pytest.raises(Refused, match="a request is being scored and 2 are waiting already; ask again later"):
            await scorer.reply(asked(scorer, request("4")))
        assert scorer.room.taken == 3 * BYTES
        second.cancel()
        await settled()
        assert scorer.room.taken == 2 * BYTES
        fifth = asyncio.create_task(scorer.reply(asked(scorer, request("5"))))
        await settled()
        reward.go.set()
        await asyncio.gather(first, third, fifth)
        assert [name for name, _ in reward.called] == ["first", "3", "5"] and scorer.room.taken == 0

    run(test())


def test_a_full_queue_looks_for_clients_that_have_gone_before_it_refuses() -> None:
    async def test() -> None:
        reward, client = Slow(), Client()
        scorer = Scorer(reward, Settings(waiting=1))
        first = await begun(scorer, reward, request("first"))
        second = asyncio.create_task(scorer.reply(asked(scorer, request("second"), client)))
        await settled()
        client.hung_up = True
        third = asyncio.create_task(scorer.reply(asked(scorer, request("third"))))
        await settled()
        reward.go.set()
        await asyncio.gather(first, third)
        assert (await refusal(second)).status == 499
        assert [name for name, _ in reward.called] == ["first", "third"]

    run(test())


def test_bytes_are_given_back_only_with_the_images() -> None:
    """The task of a forgotten request still waits for its turn, and must not keep what the budget calls free."""

    async def test() -> None:
        reward, client = Slow(), Client()
        scorer = Scorer(reward, Settings())
        first = await begun(scorer, reward, request("first"))
        wanted = request("second")
        images = weakref.ref(wanted)
        second = asyncio.create_task(scorer.reply(asked(scorer, wanted, client)))
        del wanted
        await settled()
        assert images() is not None and scorer.room.taken == 2 * BYTES
        client.hung_up = True
        await scorer.forget_gone()
        assert images() is None and scorer.room.taken == BYTES
        reward.go.set()
        await asyncio.gather(first)
        assert (await refusal(second)).status == 499

    run(test())


class Body(bytes):
    """The body of a request, which says when it is freed."""

    freed = 0

    def __del__(self) -> None:
        type(self).freed += 1


def test_a_waiting_request_does_not_keep_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Body, "freed", 0)

    async def body(*_: object) -> Body:
        return Body(b"x")

    async def read(*_: object) -> ScoreRequest:
        return request("a")

    monkeypatch.setattr(app, "_body", body)
    monkeypatch.setattr(app, "_read", read)

    async def test() -> None:
        reward = Slow()
        settings = Settings()
        scorer = Scorer(reward, settings)
        scope = {"type": "http", "headers": [], "method": "POST", "path": "/v1/score", "client": None}

        async def silent() -> Any:
            await asyncio.Event().wait()

        answer = app._answer(Request(scope, silent), scorer, settings)
        task = asyncio.create_task(answer)
        assert await asyncio.to_thread(reward.began.wait, 60)
        assert Body.freed == 1
        reward.go.set()
        assert (await task).status_code == 200

    run(test())


def test_the_other_groups_of_a_client_that_has_gone_are_not_scored() -> None:
    async def test() -> None:
        reward, client = Slow(), Client()
        scorer = Scorer(reward, Settings())
        first = await begun(scorer, reward, request("a", "a", "b", "c"), client)
        second = asyncio.create_task(scorer.reply(asked(scorer, request("d"))))
        await settled()
        client.hung_up = True
        reward.go.set()
        assert str(await refusal(first)) == "the client hung up after 2 of its images"
        await second
        assert reward.called == [("a", 2), ("d", 1)] and scorer.room.taken == 0

    run(test())


def test_the_other_groups_of_a_cancelled_request_are_not_scored() -> None:
    async def test() -> None:
        reward = Slow()
        scorer = Scorer(reward, Settings())
        first = await begun(scorer, reward, request("a", "b"))
        first.cancel()
        await asyncio.wait([first])
        assert scorer.room.taken == BYTES
        reward.go.set()
        await scorer.reply(asked(scorer, request("c")))
        assert reward.called == [("a", 1), ("c", 1)] and scorer.room.taken == 0

    run(test())


def test_a_request_that_is_cancelled_while_its_client_is_looked_for_is_not_scored() -> None:
    async def test() -> None:
        reward = Slow()
        reward.go.set()
        scorer = Scorer(reward, Settings())
        client = Client()
        first = asyncio.create_task(scorer.reply(asked(scorer, request("first"), client)))
        client.looked = first.cancel
        await asyncio.wait([first])
        await settled()
        assert first.cancelled() and scorer.room.taken == 0
        await scorer.reply(asked(scorer, request("second")))
        assert [name for name, _ in reward.called] == ["second"]

    run(test())


def test_a_task_that_is_cancelled_before_it_begins_gives_its_bytes_back() -> None:
    async def test() -> None:
        scorer = Scorer(Slow(), Settings())
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(scorer.reply(asked(scorer, request("first"))))

        def cancel() -> None:
            (task,) = asyncio.all_tasks() - before - {waiting}
            task.cancel()

        asyncio.get_running_loop().call_soon(cancel)  # after the handler's first step, before its task's
        await asyncio.wait([waiting])
        await settled()
        assert waiting.cancelled() and scorer.room.taken == 0

    run(test())


def test_metadata_are_compared_as_a_whole() -> None:
    """Equal mappings are one group in whatever order their keys are."""

    def prompt(**metadata: Any) -> Prompt:
        return Prompt(0, "a", metadata=metadata)

    pairs = [
        (prompt(x=1, y=["a"]), prompt(y=["a"], x=1), True),
        (prompt(x=1), prompt(x=True), False),
        (prompt(x=1), prompt(x=1.0), False),
        (prompt(x="1"), prompt(x=1), False),
    ]

    async def test() -> None:
        for one, two, together in pairs:
            reward = Slow()
            reward.go.set()
            scorer = Scorer(reward, Settings())
            await scorer.reply(asked(scorer, request(one, two)))
            assert [count for _, count in reward.called] == ([2] if together else [1, 1]), (one, two)

    run(test())
