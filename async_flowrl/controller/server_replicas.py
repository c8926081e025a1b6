"""The servers of one term of the reward: which are up, which have died or hung, and which are lost for good."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from async_flowrl.config.schema import ServeConfig
from async_flowrl.rewards.served import Addresses
from separation.group import WorkerGroup


class ServerLost(RuntimeError):
    """A reward server did not come up, or died or hung more often than `serve.restarts` allows."""


@dataclass
class Replicas:
    """The servers of one term. `needed`: whether losing one of them ends the run."""

    term: str
    serve: ServeConfig
    group: WorkerGroup
    needed: bool = True
    urls: dict[int, str] = field(default_factory=dict)
    """Of the replicas that are up."""
    deaths: dict[int, int] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    """Calls in a row that a replica let time out, without one answer."""
    hung: dict[int, str] = field(default_factory=dict)
    """Replicas that are being ended because they hang, and how that was seen."""
    gone: dict[int, str] = field(default_factory=dict)
    """Replicas that are lost for good, and why."""
    started: bool = False
    """Whether all of them have been up."""

    @property
    def addresses(self) -> Addresses:
        return Addresses(tuple(self.urls[index] for index in sorted(self.urls)), self.group.spec.arguments["token"])

    @property
    def lost(self) -> str | None:
        """Why the term has no server any more and will have none; None while it may have one."""
        return self.gone[max(self.gone)] if len(self.gone) == self.serve.replicas else None

    def up(self, index: int, url: str) -> None:
        """The replica has come up."""
        self.urls[index] = url
        self.silent.pop(index, None)
        self._note()

    def down(self, index: int) -> int:
        """The replica is gone for now; how often that has happened to it."""
        self.urls.pop(index, None)
        deaths = self.deaths[index] = self.deaths.get(index, 0) + 1
        return deaths

    def lose(self, index: int, why: str) -> None:
        """The replica is gone for good."""
        self.gone[index] = why
        self._note()

    def heard(self, calls: Mapping[str, bool]) -> list[int]:
        """Takes note of what a call of a reward worker saw (URL → whether it answered); the replicas that now hang."""
        hanging = []
        for index, base in self.urls.items():
            answers = [answered for url, answered in calls.items() if url.startswith(f"{base}/")]
            if not answers:
                continue
            self.silent[index] = 0 if any(answers) else self.silent.get(index, 0) + 1
            if 0 < self.serve.hung_calls <= self.silent[index]:
                hanging.append(index)
        return hanging

    def _note(self) -> None:
        self.started = self.started or len(self.urls) + len(self.gone) == self.serve.replicas
