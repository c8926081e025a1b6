"""Replicas is the state of one reward term's servers: running, hung, dead or lost for good.

reward_servers.py updates it. A replica is one server; its index is that of its worker in the pool.
"""

from dataclasses import dataclass, field

from async_flowrl.config.schema import ServeConfig
from async_flowrl.rewards.served import Addresses
from separation.group import WorkerGroup


class ServerLost(RuntimeError):
    """Raised if a reward server does not come up, or dies or hangs more often than `serve.restarts` allows."""


@dataclass
class Replicas:
    """The servers of one term. The dictionaries have the index of the replica as key."""

    term: str
    serve: ServeConfig
    group: WorkerGroup
    key: str
    """Key of the term's section in the configuration, for messages."""
    needed: bool = True
    """True: losing one replica for good ends the run."""
    urls: dict[int, str] = field(default_factory=dict)
    """URLs of the replicas that are up."""
    deaths: dict[int, int] = field(default_factory=dict)
    """Number of times that a replica has died or hung."""
    gone: dict[int, str] = field(default_factory=dict)
    """Replicas that are lost for good, with the reason in words."""
    started: bool = False
    """True once all replicas have been up or are lost for good."""

    @property
    def addresses(self) -> Addresses:
        return Addresses(tuple(self.urls[index] for index in sorted(self.urls)), self.group.spec.arguments["token"])

    @property
    def lost(self) -> str | None:
        """The reason why the term has lost all replicas for good; None if it has not."""
        return self.gone[max(self.gone)] if len(self.gone) == self.serve.replicas else None

    def up(self, index: int, url: str) -> None:
        """Records that the replica is up at `url`."""
        self.urls[index] = url
        self._note()

    def down(self, index: int) -> int:
        """Records that the replica has died; returns the number of its deaths."""
        self.urls.pop(index, None)
        deaths = self.deaths[index] = self.deaths.get(index, 0) + 1
        return deaths

    def lose(self, index: int, why: str) -> None:
        """Records that the replica is lost for good."""
        self.gone[index] = why
        self._note()

    def _note(self) -> None:
        self.started = self.started or len(self.urls) + len(self.gone) == self.serve.replicas
