"""The assignment of the parts of groups to trainer ranks.

The schedulable unit is the replica: the ranks that hold one copy of the base between them. Nothing here changes a bit
of the weights; it decides only how evenly the work is spread. So it may look at the clock.
"""

from collections.abc import Sequence

PACE_MEMORY = 0.5
"""Weight of what was known of a replica's pace, beside that of a call that was just measured."""
PACE_TRUST = 0.8
"""Share that a replica without work in an optimizer step keeps of its lag behind the fastest: else one slow call, with
a payload that was made again in it, say, would leave it without work for good."""


def idle_ranks(ranks: int, groups: int, parts: int) -> str | None:
    """A sentence where an optimizer step of so many groups has fewer parts than there are ranks."""
    if groups * parts >= ranks:
        return None
    return (
        f"{ranks - groups * parts} of {ranks} trainer ranks have nothing to train: an optimizer step has {groups} "
        f"groups of {parts} parts; a smaller trainer.micro_batch_size makes more"
    )


def repeating_ranks(per_replica: int, groups: int, parts: int, *, by_group: bool = False) -> str | None:
    """A sentence where a call of so many groups has fewer parts than ranks that must compute side by side.

    `by_group`: they do so within each group (see `Place.by_group`).
    """
    if by_group and parts % per_replica:
        return (
            f"the {per_replica} trainer ranks that share the trained weights compute each group side by side, and its "
            f"{parts} parts leave {-parts % per_replica} of them without one of their own: a trainer.micro_batch_size "
            f"that cuts a group into a multiple of {per_replica} parts wastes nothing"
        )
    if by_group or groups * parts >= per_replica:
        return None
    return (
        f"{per_replica - groups * parts} of the {per_replica} trainer ranks that share one copy of the base compute "
        f"parts again that another has, because all gather its blocks together: as few as {groups} groups of {parts} "
        "parts come at a time; a smaller trainer.micro_batch_size, hand_over=batch, trainer.shard=none, or hybrid with "
        "a smaller trainer.shard_size wastes less"
    )


class Owners:
    """Spreads the groups of one optimizer step, in the order they come, over replicas and the ranks in them.

    A group, or a part where there are few groups, goes to the replica that is expected to be done with it first: by the
    seconds that each took for a sample until now, and by what it has been given.
    """

    def __init__(self, ranks: int, per_replica: int = 1, *, by_group: bool = False) -> None:
        """`by_group`: the ranks of a replica take the parts of each group in turn, whatever else they were given.

        Raises ValueError where ranks cannot be cut into replicas of that size.
        """
        if ranks % per_replica:
            raise ValueError(f"{ranks} trainer ranks cannot form replicas of {per_replica}")
        self._per_replica, self._replicas, self._by_group = per_replica, ranks // per_replica, by_group
        self._load = [0] * ranks
        self._done_at = [0.0] * self._replicas
        self._pace: dict[int, float] = {}
        self._given: set[int] = set()
        """Replicas that have work in this optimizer step."""
        self._whole = True
        self.absent: set[int] = set()
        """Replicas that died: they are given nothing."""

    def begin(self, groups: int, now: float = 0.0) -> None:
        """A new optimizer step of so many groups. With at least two for each replica, no group is split over them."""
        fastest = min(self._pace.values(), default=0.0)
        for replica in self._pace.keys() - self._given:
            self._pace[replica] = fastest + PACE_TRUST * (self._pace[replica] - fastest)
        self._load, self._given = [0] * len(self._load), set()
        self._done_at = [now] * self._replicas
        self._whole = groups >= 2 * (self._replicas - len(self.absent))

    def of(self, samples: Sequence[int], now: float = 0.0) -> tuple[int, ...]:
        """The owners of the next group's parts, given their samples; of equal replicas and ranks the first."""
        whole = self._next(sum(samples), now) if self._whole else None
        owners = []
        for part, size in enumerate(samples):
            replica = self._next(size, now) if whole is None else whole
            ranks = self._ranks(replica)
            owner = ranks[part % len(ranks)] if self._by_group else min(ranks, key=lambda rank: self._load[rank])
            self._load[owner] += size
            owners.append(owner)
        return tuple(owners)

    def took(self, replica: int, samples: int, seconds: float, *, idle_at: float | None = None) -> None:
        """A call to a replica is over; `idle_at`: the time, where it has nothing left to do."""
        if samples:
            self._given.add(replica)
            pace, before = seconds / samples, self._pace.get(replica)
            self._pace[replica] = pace if before is None else PACE_MEMORY * before + (1 - PACE_MEMORY) * pace
        if idle_at is not None:
            self._done_at[replica] = idle_at

    def _next(self, samples: int, now: float) -> int:
        """Books the samples on the replica that will be done with them first."""
        usual = sum(self._pace.values()) / len(self._pace) if self._pace else 1.0

        def done(replica: int) -> float:
            return max(now, self._done_at[replica]) + samples * self._pace.get(replica, usual)

        chosen = min((replica for replica in range(self._replicas) if replica not in self.absent), key=done)
        self._done_at[chosen] = done(chosen)
        self._given.add(chosen)
        return chosen

    def _ranks(self, replica: int) -> range:
        return range(replica * self._per_replica, (replica + 1) * self._per_replica)
