"""Tests of a run's reward servers: their ports, deaths of their workers, and the terms that wait for them."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from async_flowrl.config.schema import RewardTerm, ServeConfig
from async_flowrl.controller.context import NoServers
from async_flowrl.controller.reward_servers import SERVERS, Replicas, RewardServers, ServerLost
from async_flowrl.rewards import served
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.served import ServerWorker
from separation.group import PoolSpec, WorkerDied, WorkerGroup
from separation.supervise import supervised
from tests.support.toy import toy_config, virtual


@dataclass
class Place:
    """A worker whose server runs until its worker dies; `ended` is set then."""

    name: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[Any] = field(default_factory=list)

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        if method == "wait":
            await self.ended.wait()
        if self.ended.is_set():
            raise WorkerDied(self.name, "killed")
        self.told += args
        return f"http://127.0.0.1/{self.name}" if method == "start" else None


@dataclass
class Places:
    """A pool of one, whose worker can be replaced."""

    spec: PoolSpec
    workers: list[Place]

    async def replace(self, index: int) -> Place:
        self.workers[index] = Place(f"{self.workers[index].name}.1")
        return self.workers[index]


def test_a_server_whose_worker_dies_gets_another_worker_and_the_rewards_hear_of_it() -> None:
    async def dies(restarts: int) -> tuple[list[Any], str]:
        pool = Places(PoolSpec("server/x", "m:f", 1, arguments={"token": "t"}), [Place("server/x-0")])
        rewards = Places(PoolSpec("reward", "m:f", 1, arguments={SERVERS: {}}), [Place("reward-0")])
        replicas = Replicas("x", ServeConfig(restarts=restarts), cast("WorkerGroup", pool), "evaluate.reward.terms.x")
        servers = RewardServers([replicas], [cast("WorkerGroup", rewards)])
        async with asyncio.timeout(60), supervised(servers.keep(replicas, 0)):
            await servers._changed.until(lambda: replicas.started)
            pool.workers[0].ended.set()
            await servers._changed.until(lambda: len(rewards.workers[0].told) == 2)
            await servers.up(["x"])
        told = [each["x"].urls for each in rewards.workers[0].told]
        return told, rewards.spec.arguments[SERVERS]["x"].urls[0]

    told, kept = asyncio.run(dies(1))
    assert told == [("http://127.0.0.1/server/x-0",), ("http://127.0.0.1/server/x-0.1",)] and kept == told[1][0]
    with pytest.raises(ServerLost, match=r"of evaluate\.reward\.terms\.x died 1 times, .* serve\.restarts=0 allows"):
        asyncio.run(dies(0))


@pytest.mark.parametrize("workers", [None, 1])
def test_a_term_whose_servers_are_lost_fails_without_being_asked(workers: int | None) -> None:
    """In the shared pool and in one of its own, whose workers then have nothing to do."""

    class Lost(NoServers):
        def lost(self) -> Mapping[str, str]:
            return {"away": "died 4 times"}

    async def disturb(ctx: Any, pools: Any) -> None:
        ctx.servers = Lost()

    asked: list[tuple[str, str]] = []
    config = toy_config(steps=2)
    config.reward.terms = {"color": RewardTerm(), "away": RewardTerm(name="sharpness", required=False, workers=workers)}
    found = virtual(config, disturb=disturb, fault=lambda worker, method, count: asked.append((worker, method)))
    groups = 2 * config.prompts_per_step
    unscored = found.observer.of("unscored", term="away")
    assert len(unscored) == groups and {event["message"] for event in unscored} == {"died 4 times"}
    scored = [worker for worker, method in asked if method == "score"]
    assert len(scored) == groups and not [worker for worker in scored if worker.startswith("reward/away")]
    config.reward.terms = {"away": RewardTerm(name="sharpness", required=False, workers=workers)}
    with pytest.raises(RewardError, match="died 4 times"):
        virtual(config, disturb=disturb)


HEALTHY = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if not os.path.exists(sys.argv[2]) else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.mark.parametrize("how", ["stands still", "says 503"])
def test_a_server_whose_health_path_is_silent_has_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(served, "GRACE_SECONDS", 0.2)
    serve = ServeConfig(command=["python", "-c", HEALTHY, "{port}", str(tmp_path / "ill")], hung_seconds=0.4)
    worker = ServerWorker(serve, 0, "server/x-0", token="t", reachable="127.0.0.1", log=tmp_path)
    worker.start()
    assert worker._program is not None
    (program,) = psutil.Process(worker._program.pid).children()
    if how == "stands still":
        program.suspend()
    else:
        (tmp_path / "ill").touch()
    assert re.match(r"it hung: http://127.0.0.1:\d+/health did not answer 200 for hung_seconds=0.4; ", worker.wait())
    assert not psutil.pid_exists(program.pid)
