"""RewardServers starts, watches, restarts and stops the servers of reward terms with `serve`.

`serving` is the entry point. Each worker of a term's pool runs one server process (rewards/served.py) on its own GPUs.
Addresses go to all reward workers and to the arguments from which replaced ones are built.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.schema import Config, ServeConfig
from async_flowrl.config.scoring_pools import served_terms, server_pool
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards.served import GRACE_SECONDS, Addresses, is_needed, term_key
from separation.group import PoolSpec, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import DeadlineExceeded, Signal, deadline, supervised, together


class ServerLost(RuntimeError):
    """Raised if a reward server does not come up, or dies or hangs more often than `serve.restarts` allows."""


@dataclass
class Replicas:
    """The servers of one term. The dictionaries have the index of the replica as key."""

    term: str
    serve: ServeConfig
    group: WorkerGroup
    key: str  # Key of the term's section in the configuration, for messages.
    needed: bool = True  # True: losing one replica for good ends the run.
    urls: dict[int, str] = field(default_factory=dict)  # URLs of the replicas that are up.
    deaths: dict[int, int] = field(default_factory=dict)  # Number of times that a replica has died or hung.
    gone: dict[int, str] = field(default_factory=dict)  # Replicas that are lost for good, with the reason in words.

    @property
    def addresses(self) -> Addresses:
        return Addresses(tuple(self.urls[index] for index in sorted(self.urls)), self.group.spec.arguments["token"])

    @property
    def lost(self) -> str | None:
        return self.gone[max(self.gone)] if len(self.gone) == self.serve.replicas else None

    @property
    def complete(self) -> bool:
        return len(self.urls) + len(self.gone) == self.serve.replicas


logger = logging.getLogger(__name__)

# Name of the argument of reward workers with term → Addresses; each pool's dictionary is changed in place.
SERVERS = "servers"
# Errors of a server's worker after which its server counts as dead.
LOST = (WorkerDied, WorkerFailed, DeadlineExceeded)
MARGIN_SECONDS = 30.0  # Seconds that a call may take in addition to the time limit of the work that it waits for.
# Function that gets term → addresses of its servers whenever they change.
Listener = Callable[[Mapping[str, Addresses]], None]
# Attempts to send addresses to a reward worker, which may just be replaced, and the seconds between them.
TOLD_TIMES, TOLD_PAUSE_SECONDS = 10, 1.0


def server_pools(config: Config) -> list[PoolSpec]:
    """Returns one pool per term with `serve`. Its workers start no server until `RewardServers` asks them to."""
    own_machine = config.runtime.on_this_machine
    logs = RunDirectory(Path(config.output_dir)).logs.absolute()
    return [
        PoolSpec(
            server_pool(term),
            "async_flowrl.rewards.served:ServerWorker",
            serve.replicas,
            arguments={
                "serve": serve,
                "token": secrets.token_urlsafe(32),  # of the operating system, without influence on the results
                "reachable": "127.0.0.1" if own_machine else None,
                "log": logs,
            },
            gpus_per_worker=serve.gpus,
            lanes=("wait", "stop"),
        )
        for term, serve in served_terms(config)
    ]


@dataclass
class RewardServers:
    """All reward servers of a run, maybe none."""

    terms: Sequence[Replicas] = ()
    clients: Sequence[WorkerGroup] = ()  # The pools of reward workers, which get the addresses of the servers.
    listeners: Sequence[Listener] = ()  # Functions that get the addresses of the servers, too.
    observer: EventLog | None = None
    # A sentence for each term whose servers are all lost, without which the run goes on.
    failures: list[str] = field(default_factory=list)
    _changed: Signal = field(default_factory=Signal)

    async def all_up(self, observer: EventLog, failures: list[str]) -> None:
        """Waits until every server is up or lost. From now on, deaths of servers are events of `observer`."""
        self.observer, self.failures = observer, failures
        await self._changed.until(lambda: all(replicas.complete for replicas in self.terms))

    async def up(self, terms: Collection[str]) -> None:
        """Waits until each of the terms has a running server, or has lost all of its servers for good."""
        waited = [replicas for replicas in self.terms if replicas.term in terms]
        await self._changed.until(lambda: all(replicas.urls or replicas.lost for replicas in waited))

    def lost(self) -> Mapping[str, str]:
        return {replicas.term: replicas.lost for replicas in self.terms if replicas.lost is not None}

    async def keep(self, replicas: Replicas, index: int) -> None:
        """Starts a replica, and again when it dies or hangs. Raises ServerLost if it never comes up, or is needed."""
        try:
            await self._start(replicas, index)
        except LOST as error:
            raise ServerLost(f"the server of {replicas.key} did not come up: {_said(error)}") from error
        while index not in replicas.gone:
            try:
                reason = str(await replicas.group.workers[index].call("wait", lane="wait"))
            except WorkerDied as death:
                reason = str(death)
            await self._again(replicas, index, reason)

    async def _again(self, replicas: Replicas, index: int, reason: str) -> None:
        """Restarts a dead replica, unless it has died more than `restarts` times; then it is lost for good."""
        while True:
            worker = replicas.group.workers[index]
            replicas.urls.pop(index, None)
            replicas.deaths[index] = replicas.deaths.get(index, 0) + 1
            logger.warning("%s, a server of %s, died: %s", worker.name, replicas.key, reason)
            if self.observer is not None:
                self.observer.event("fault", worker=worker.name, kind="ServerDied", message=reason)
            if replicas.deaths[index] > replicas.serve.restarts:
                self._lost(replicas, index, reason)
                return
            try:
                try:
                    await worker.call("stop", lane="stop")
                except WorkerDied:
                    await replicas.group.replace(index)
                await self._start(replicas, index)
                return
            except LOST as error:
                reason = _said(error)

    def _lost(self, replicas: Replicas, index: int, reason: str) -> None:
        name, restarts = replicas.group.workers[index].name, replicas.serve.restarts
        sentence = (
            f"the server {name} of {replicas.key} died {replicas.deaths[index]} times, which is more "
            f"than serve.restarts={restarts} allows: {reason}"
        )
        if replicas.needed:
            raise ServerLost(sentence)
        replicas.gone[index] = sentence
        left = replicas.serve.replicas - len(replicas.gone)
        how = f"with {left} of its {replicas.serve.replicas} servers" if left else "without any scores of this term"
        logger.warning("%s; the run goes on %s", sentence, how)
        if self.observer is not None:
            self.observer.event("fault", worker=name, kind="ServerLost", message=sentence)
        if replicas.lost is not None:
            self.failures.append(f"{replicas.term} has no scores from here on: {sentence}")
        self._changed.notify()

    async def _start(self, replicas: Replicas, index: int) -> None:
        worker = replicas.group.workers[index]
        seconds = replicas.serve.start_seconds + MARGIN_SECONDS
        async with deadline(seconds, f"starting {worker.name}"):
            url = str(await worker.call("start"))
        replicas.urls[index] = url
        logger.info("%s is up at %s", worker.name, url)
        await self._tell(replicas)
        self._changed.notify()

    async def _tell(self, replicas: Replicas) -> None:
        addresses = {replicas.term: replicas.addresses}
        for group in self.clients:
            cast("dict[str, Addresses]", group.spec.arguments[SERVERS]).update(addresses)
        for listener in self.listeners:
            listener(addresses)
        await together(
            *(_told(group, index, addresses) for group in self.clients for index in range(len(group.workers)))
        )

    async def stop(self) -> None:
        """Stops every server. Failures are ignored, because a server ends with its worker at the latest."""
        await together(*(_stop(worker) for replicas in self.terms for worker in replicas.group.workers))


async def _stop(worker: Worker) -> None:
    with suppress(*LOST):
        async with deadline(GRACE_SECONDS + MARGIN_SECONDS, f"stopping {worker.name}"):
            await worker.call("stop", lane="stop")


async def _told(group: WorkerGroup, index: int, addresses: Mapping[str, Addresses]) -> None:
    for _ in range(TOLD_TIMES):
        try:
            await group.workers[index].call("connect", addresses)
            return
        except (WorkerDied, WorkerFailed) as error:
            logger.info("%s does not hear where the servers are: %s", group.workers[index].name, error)
        await asyncio.sleep(TOLD_PAUSE_SECONDS)


def _said(error: Exception) -> str:
    return error.message if isinstance(error, WorkerFailed) else str(error)


@asynccontextmanager
async def serving(
    config: Config, groups: Mapping[str, WorkerGroup], *, listeners: Sequence[Listener] = ()
) -> AsyncIterator[RewardServers]:
    """Context manager with the servers of a run; cancels the body and raises ServerLost if one is lost and needed."""
    terms = [
        Replicas(term, serve, groups[server_pool(term)], term_key(config, term), needed=is_needed(config, term))
        for term, serve in served_terms(config)
    ]
    clients = [group for group in groups.values() if SERVERS in group.spec.arguments]
    servers = RewardServers(terms, clients, listeners)
    keeping: list[Coroutine[Any, Any, None]] = [
        servers.keep(replicas, index) for replicas in terms for index in range(replicas.serve.replicas)
    ]
    try:
        async with supervised(*keeping):
            yield servers
    finally:
        await servers.stop()
