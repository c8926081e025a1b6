"""The servers of `reward.terms.X.serve`: started beside the loading of the models, watched, started again, stopped.

Every term's servers are a pool, whose workers own a program and its GPUs each. Where the servers are is told to every
reward worker, and stands in the arguments that a worker which replaces another is built with.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.schema import Config, ServeConfig
from async_flowrl.controller.context import Observer, Signal
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards.served import Addresses, requirements_of, served_terms
from async_flowrl.rewards.server_worker import GRACE_SECONDS, new_token
from separation.group import PoolSpec, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import DeadlineExceeded, deadline, supervised, together

logger = logging.getLogger(__name__)

SERVERS = "servers"
"""Argument of reward workers: term → Addresses. One dictionary per pool, which is changed in place."""
LOST = (WorkerDied, WorkerFailed, DeadlineExceeded)
MARGIN_SECONDS = 30.0
"""What calls may take beside what they wait for."""
TOLD_TIMES, TOLD_PAUSE_SECONDS = 10, 1.0
"""A reward worker that is just being replaced is told where the servers are until it hears it."""


class ServerLost(RuntimeError):
    """A reward server did not come up, or died more often than `serve.restarts` allows."""


def pool_name(term: str) -> str:
    """Of the servers of one term."""
    return f"server/{term}"


def server_pools(config: Config) -> list[PoolSpec]:
    """One pool per term with `serve`; none of their workers starts its server by itself."""
    own_machine = config.runtime.backend == "local" or config.runtime.address is None
    logs = RunDirectory(Path(config.output_dir)).logs.absolute()
    return [
        PoolSpec(
            pool_name(term),
            "async_flowrl.rewards.server_worker:ServerWorker",
            serve.replicas,
            arguments={
                "serve": serve,
                "requirements": requirements_of(term, serve),
                "token": new_token(),
                "reachable": "127.0.0.1" if own_machine else None,
                "log": logs,
            },
            gpus_per_worker=serve.gpus,
            lanes=("wait", "stop"),
        )
        for term, serve in served_terms(config)
    ]


@dataclass
class Replicas:
    """The servers of one term."""

    term: str
    serve: ServeConfig
    group: WorkerGroup
    urls: dict[int, str] = field(default_factory=dict)
    """Of the replicas that are up."""
    deaths: dict[int, int] = field(default_factory=dict)
    started: bool = False
    """Whether all of them have been up."""

    @property
    def addresses(self) -> Addresses:
        return Addresses(tuple(self.urls[index] for index in sorted(self.urls)), self.group.spec.arguments["token"])


@dataclass
class RewardServers:
    """All servers of a run. `clients` are the pools of reward workers."""

    terms: Sequence[Replicas] = ()
    clients: Sequence[WorkerGroup] = ()
    download_seconds: float = 0.0
    observer: Observer | None = None
    _changed: Signal = field(default_factory=Signal)

    async def all_up(self, observer: Observer) -> None:
        """Waits until every server has been up: a run begins with all of them. Deaths are events of `observer`'s."""
        self.observer = observer
        await self._changed.until(lambda: all(replicas.started for replicas in self.terms))

    async def up(self) -> None:
        """Waits until every term has a server again: a call without any would only fail."""
        await self._changed.until(lambda: all(replicas.urls for replicas in self.terms))

    async def keep(self, replicas: Replicas, index: int) -> None:
        """Starts a replica, and starts it again whenever it has died. Raises ServerLost."""
        worker = replicas.group.workers[index]
        async with deadline(self.download_seconds, f"making the environment of the servers of {replicas.term}"):
            await worker.call("prepare")
        try:
            await self._start(replicas, index, worker)
        except LOST as error:
            raise ServerLost(f"the server of reward.terms.{replicas.term} did not come up: {_said(error)}") from error
        while True:
            try:
                reason = str(await worker.call("wait", lane="wait"))
            except WorkerDied as death:
                reason = str(death)
            worker = await self._again(replicas, index, reason)

    async def _again(self, replicas: Replicas, index: int, reason: str) -> Worker:
        """A new server in the place of one that has died; returns its worker."""
        while True:
            worker = replicas.group.workers[index]
            self._died(replicas, index, worker.name, reason)
            try:
                if not await _lives(worker):
                    worker = await replicas.group.replace(index)
                await self._start(replicas, index, worker)
                return worker
            except LOST as error:
                reason = _said(error)

    def _died(self, replicas: Replicas, index: int, name: str, reason: str) -> None:
        replicas.urls.pop(index, None)
        deaths = replicas.deaths[index] = replicas.deaths.get(index, 0) + 1
        logger.warning("%s, a server of reward.terms.%s, died: %s", name, replicas.term, reason)
        if self.observer is not None:
            self.observer.event("fault", worker=name, kind="ServerDied", message=reason)
        if deaths > replicas.serve.restarts:
            raise ServerLost(
                f"the server {name} of reward.terms.{replicas.term} died {deaths} times, which is more than "
                f"serve.restarts={replicas.serve.restarts} allows: {reason}"
            )

    async def _start(self, replicas: Replicas, index: int, worker: Worker) -> None:
        seconds = self.download_seconds + replicas.serve.start_seconds + MARGIN_SECONDS
        async with deadline(seconds, f"starting {worker.name}"):
            replicas.urls[index] = str(await worker.call("start"))
        logger.info("%s is up at %s", worker.name, replicas.urls[index])
        await self._tell(replicas)
        replicas.started = replicas.started or len(replicas.urls) == replicas.serve.replicas
        self._changed.notify()

    async def _tell(self, replicas: Replicas) -> None:
        """Says to all reward workers, and to those that will replace them, where the term's servers are."""
        told = {replicas.term: replicas.addresses}
        for group in self.clients:
            cast("dict[str, Addresses]", group.spec.arguments[SERVERS]).update(told)
        await together(*(_told(group, index, told) for group in self.clients for index in range(len(group.workers))))

    async def stop(self) -> None:
        """Ends every server; one whose worker is gone has ended with it."""

        async def stop(worker: Worker) -> None:
            with suppress(*LOST):
                async with deadline(GRACE_SECONDS + MARGIN_SECONDS, f"stopping {worker.name}"):
                    await worker.call("stop", lane="stop")

        await together(*(stop(worker) for replicas in self.terms for worker in replicas.group.workers))


async def _told(group: WorkerGroup, index: int, addresses: Mapping[str, Addresses]) -> None:
    for _ in range(TOLD_TIMES):
        try:
            await group.workers[index].call("connect", addresses)
            return
        except (WorkerDied, WorkerFailed) as error:
            logger.info("%s does not hear where the servers are: %s", group.workers[index].name, error)
        await asyncio.sleep(TOLD_PAUSE_SECONDS)


async def _lives(worker: Worker) -> bool:
    """Whether the worker itself is still there, when its server has died."""
    try:
        await worker.call("stop", lane="stop")
    except WorkerDied:
        return False
    return True


def _said(error: Exception) -> str:
    return error.message if isinstance(error, WorkerFailed) else str(error)


@asynccontextmanager
async def serving(config: Config, groups: Mapping[str, WorkerGroup]) -> AsyncIterator[RewardServers]:
    """The servers of a run, which start beside the body and are gone when it ends, whatever ends it.

    A server that is lost for good ends the body with ServerLost.
    """
    terms = [Replicas(term, serve, groups[pool_name(term)]) for term, serve in served_terms(config)]
    clients = [group for group in groups.values() if SERVERS in group.spec.arguments]
    servers = RewardServers(terms, clients, config.deadlines.download)
    keeping: list[Coroutine[Any, Any, None]] = [
        servers.keep(replicas, index) for replicas in terms for index in range(replicas.serve.replicas)
    ]
    try:
        async with supervised(*keeping):
            yield servers
    finally:
        await servers.stop()
