"""The ledger of every pool's time: each worker is in exactly one named state at every instant, idle too."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

STATES = ("busy", "wait_data", "wait_weights", "sync", "idle")
BOOKED_AS = {"wait_work": "idle", "gone": "idle"}
"""The controller's names for causes of idle time: nothing to run, and no process in the place."""


def pool_of(worker: str) -> str:
    """ "rollout" for "rollout-0" and for its replacement "rollout-0.1"."""
    return worker.rsplit("-", 1)[0]


def place_of(worker: str) -> str:
    """ "rollout-0" for "rollout-0" and for its replacement "rollout-0.1"."""
    pool, _, index = worker.rpartition("-")
    return f"{pool}-{index.split('.', 1)[0]}"


class PoolLedger:
    """Seconds per place and state, from one clock.

    A place is idle until its worker enters another state. A replacement takes over the place of the worker it replaces,
    so the seconds of a place always sum to the time since the ledger was opened.
    """

    def __init__(self, clock: Callable[[], float], workers: Iterable[str] = ()) -> None:
        self._clock = clock
        self._start = clock()
        self._now: dict[str, tuple[str, float]] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._lap: dict[str, dict[str, float]] = {}
        for worker in workers:
            self._open(place_of(worker))

    def enter(self, worker: str, state: str) -> str:
        """`worker` is in `state` from now on; returns the name it is booked under. Raises ValueError if unknown."""
        booked = BOOKED_AS.get(state, state)
        if booked not in STATES:
            raise ValueError(f"a worker's state must be one of {', '.join(STATES)}, got {state!r} for {worker}")
        place = place_of(worker)
        self._open(place)
        self._settle(place)
        self._now[place] = booked, self._now[place][1]
        return booked

    def now(self) -> dict[str, Counter[str]]:
        """Per pool: how many of its places are in which state at this moment. Other threads may ask, too."""
        pools: dict[str, Counter[str]] = {}
        for place, (state, _) in list(self._now.items()):
            pools.setdefault(pool_of(place), Counter())[state] += 1
        return pools

    def totals(self) -> dict[str, dict[str, float]]:
        """Per pool: seconds per state since the start, averaged over its places; together the wall clock."""
        return _by_pool(self._settled())

    def lap(self) -> dict[str, dict[str, float]]:
        """The same for the time since the last lap; a place that is new since then counts from the start."""
        before, self._lap = self._lap, {place: dict(seconds) for place, seconds in self._settled().items()}
        return _by_pool(
            {
                place: {state: seconds[state] - before.get(place, {}).get(state, 0.0) for state in STATES}
                for place, seconds in self._lap.items()
            }
        )

    @property
    def wall_seconds(self) -> float:
        return self._clock() - self._start

    def _settled(self) -> Mapping[str, Mapping[str, float]]:
        for place in self._now:
            self._settle(place)
        return self._seconds

    def _open(self, place: str) -> None:
        if place not in self._now:
            self._now[place] = "idle", self._start
            self._seconds[place] = dict.fromkeys(STATES, 0.0)

    def _settle(self, place: str) -> None:
        state, since = self._now[place]
        now = self._clock()
        self._seconds[place][state] += now - since
        self._now[place] = state, now


def _by_pool(places: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    pools: dict[str, list[Mapping[str, float]]] = {}
    for place, seconds in places.items():
        pools.setdefault(pool_of(place), []).append(seconds)
    return {
        pool: {state: sum(seconds[state] for seconds in members) / len(members) for state in STATES}
        for pool, members in pools.items()
    }
