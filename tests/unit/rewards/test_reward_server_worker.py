"""Tests of a run's reward servers: their ports, deaths of their workers, and the terms that wait for them."""

import asyncio
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from async_flowrl.config.schema import RewardTerm, ServeConfig
from async_flowrl.controller.context import NoServers
from async_flowrl.controller.reward_servers import SERVERS, Replicas, RewardServers, ServerLost
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards import served
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.served import ServerFailed, ServerWorker
from async_flowrl.run.job import last_resort
from async_flowrl.run.stopping import StopRequest
from separation.group import PoolSpec, WorkerDied, WorkerGroup
from separation.supervise import supervised
from tests.support.toy import toy_config, virtual


def test_a_fixed_port_at_which_somebody_else_listens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their health path would answer for ours, and their scores would be trained on."""
    monkeypatch.setattr(served, "PORT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve = ServeConfig(command="sleep 600", port=taken.getsockname()[1])
        worker = ServerWorker(serve, 0, "server/x-0", token="t", reachable="127.0.0.1", log=tmp_path)
        with pytest.raises(ServerFailed, match=r"port \d+ is taken .*choose another port"):
            worker.start()
    assert not list(tmp_path.iterdir())


SERVER = """
import importlib.util, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import own_number

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        shared = importlib.util.find_spec("torch") is not None
        self.send_response(200 if own_number.VALUE == 7 and not shared else 500)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def wheel(folder: Path) -> Path:
    """A package that only the server has."""
    path, info = folder / "own_number-1.0-py3-none-any.whl", "own_number-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("own_number.py", "VALUE = 7\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: own_number\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.skipif(not shutil.which("uv", path=Path(sys.executable).parent), reason="uv is not installed")
def test_a_server_with_packages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv makes its environment, without this one's packages; all its processes end with it."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    options = f"--isolated --no-project --offline --with {wheel(tmp_path)}"
    serve = ServeConfig(command=f"uv run {options} python {script} {{port}}", start_seconds=120.0)
    worker = ServerWorker(serve, 0, "server/x-0", token="t", reachable="127.0.0.1", log=tmp_path)
    worker.start()
    started = [each for each in psutil.process_iter(["cmdline"]) if str(script) in (each.info["cmdline"] or [])]
    assert started
    worker.stop()
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c 'sleep 600' {port}", r"did not answer 200 within start_seconds=0\.5; its output is in"),
        ("no-such-program {port}", "exit code 127; .*'no-such-program cannot be started: No such file"),
        ("sh -c 'echo no memory; exit 3' {port}", "it ended with exit code 3; its output is in .* 'no memory'"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(tmp_path: Path, command: str, message: str) -> None:
    serve = ServeConfig(command=command, start_seconds=0.5 if "sleep" in command else 60.0)
    worker = ServerWorker(serve, 0, "server/x-0", token="t", reachable="127.0.0.1", log=tmp_path)
    with pytest.raises(ServerFailed, match=message):
        worker.start()
    worker.stop()
    assert [path.name for path in (tmp_path / "server").iterdir()] == ["x-0.log"]


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


def test_held_out_terms_wait_for_a_server_that_is_started_again() -> None:
    asked: list[str] = []

    class Waiting(NoServers):
        async def up(self, terms: Collection[str]) -> None:
            asked.append("up")

    async def disturb(ctx: Any, pools: Any) -> None:
        ctx.servers = Waiting()

    def seen(worker: str, method: str, count: int) -> None:
        if method.startswith("score"):
            asked.append(method)

    config = toy_config(steps=2, evaluate__every=1)
    config.evaluate.reward.terms = {"other": RewardTerm(name="sharpness")}
    virtual(config, fault=seen, disturb=disturb)
    held_out = asked.count("score_held_out")
    assert held_out > 0 and asked.count("up") == asked.count("score") + held_out


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


def test_a_run_that_was_asked_to_stop_and_lost_its_servers_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's SIGTERM may go to every process of the job, servers included."""
    monkeypatch.setattr("async_flowrl.run.job.find_checkpoint", lambda folder, *, shares: folder / "step_3")
    directory, stop = RunDirectory(tmp_path), StopRequest()
    assert last_resort(ServerLost("died 4 times"), stop, directory) is None
    stop.ask("SIGTERM", 75)
    assert last_resort(ServerLost("died 4 times"), stop, directory) == 3


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
