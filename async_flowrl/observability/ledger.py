"""Time ledger of the worker pools: how many seconds the workers spent in each state.

A worker is in exactly one of STATES at any time. A *place* is a numbered seat in a pool, e.g. "rollout-0"; a
replacement of a dead worker ("rollout-0.1") takes over its place.
"""

from collections.abc import Callable, Iterable, Mapping

STATES = ("busy", "wait_data", "wait_weights", "sync", "idle")
# Further states that count as idle: no ticket to run, and no process in the place.
BOOKED_AS = {"wait_work": "idle", "gone": "idle"}


def pool_of(worker: str) -> str:
    """ "rollout" for "rollout-0" and for its replacement "rollout-0.1"."""
    return worker.rsplit("-", 1)[0]


def place_of(worker: str) -> str:
    """ "rollout-0" for "rollout-0" and for its replacement "rollout-0.1"."""
    pool, _, index = worker.rpartition("-")
    return f"{pool}-{index.split('.', 1)[0]}"


class PoolLedger:
    """Seconds per place and state, measured with `clock`.

    Every place is idle from the start of the ledger until its worker enters another state, so the seconds of a place
    always sum to the time since the ledger was made.
    """

    def __init__(self, clock: Callable[[], float], workers: Iterable[str] = ()) -> None:
        self._clock = clock
        self._start = clock()
        self._now: dict[str, tuple[str, float]] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._lap: dict[str, dict[str, float]] = {}
        for worker in workers:
            self._settle(place_of(worker))

    def enter(self, worker: str, state: str) -> str:
        """Notes that `worker` is in `state` from now on; returns the state it counts as. Raises ValueError."""
        booked = BOOKED_AS.get(state, state)
        if booked not in STATES:
            raise ValueError(f"a worker's state must be one of {', '.join(STATES)}, got {state!r} for {worker}")
        place = place_of(worker)
        self._settle(place)
        self._now[place] = booked, self._now[place][1]
        return booked

    def totals(self) -> dict[str, dict[str, float]]:
        """Pool → state → seconds since the start, averaged over the pool's places; a pool's sum is the wall clock."""
        return _by_pool(self._settled())

    def lap(self) -> dict[str, dict[str, float]]:
        """Like `totals`, but only since the last call of `lap`; a new place counts from the start of the ledger."""
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

    def _settle(self, place: str) -> None:
        state, since = self._now.get(place, ("idle", self._start))
        now = self._clock()
        self._seconds.setdefault(place, dict.fromkeys(STATES, 0.0))[state] += now - since
        self._now[place] = state, now


def _by_pool(places: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    pools: dict[str, list[Mapping[str, float]]] = {}
    for place, seconds in places.items():
        pools.setdefault(pool_of(place), []).append(seconds)
    return {
        pool: {state: sum(seconds[state] for seconds in members) / len(members) for state in STATES}
        for pool, members in pools.items()
    }
