"""The assignment of the parts of groups to trainer ranks.

The schedulable unit is the replica: the ranks that hold one copy of the base between them. Nothing here changes a bit
of the weights; it decides only how evenly the work is spread.
"""


def idle_ranks(ranks: int, groups: int, parts: int) -> str | None:
    """A sentence where an optimizer step of so many groups has fewer parts than there are ranks."""
    if groups * parts >= ranks:
        return None
    return (
        f"{ranks - groups * parts} of {ranks} trainer ranks have nothing to train: an optimizer step has {groups} "
        f"groups of {parts} parts; a smaller trainer.micro_batch_size makes more"
    )


class Owners:
    """Spreads the groups of one optimizer step, in the order they come, over replicas and the ranks in them."""

    def __init__(self, ranks: int, per_replica: int = 1) -> None:
        """Raises ValueError where ranks cannot be cut into replicas of that size."""
        if ranks % per_replica:
            raise ValueError(f"{ranks} trainer ranks cannot form replicas of {per_replica}")
        self._per_replica = per_replica
        self._load = [0] * ranks
        self._whole = True

    def begin(self, groups: int) -> None:
        """A new optimizer step of so many groups. With at least two for each replica, no group is split over them."""
        replicas = len(self._load) // self._per_replica
        self._load = [0] * len(self._load)
        self._whole = groups >= 2 * replicas

    def of(self, parts: int) -> tuple[int, ...]:
        """The owners of the next group's parts: the ranks that have fewest until now, the first of equals."""
        replica = self._lightest_replica() if self._whole else None
        owners = []
        for _ in range(parts):
            where = self._lightest_replica() if replica is None else replica
            owner = min(self._ranks(where), key=lambda rank: self._load[rank])
            self._load[owner] += 1
            owners.append(owner)
        return tuple(owners)

    def _lightest_replica(self) -> int:
        replicas = range(len(self._load) // self._per_replica)
        return min(replicas, key=lambda replica: sum(self._load[rank] for rank in self._ranks(replica)))

    def _ranks(self, replica: int) -> range:
        return range(replica * self._per_replica, (replica + 1) * self._per_replica)
