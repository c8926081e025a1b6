"""Owners assigns the parts of groups to trainer ranks.

A replica is the ranks that hold one copy of the base together; work is first given to a replica, then to its ranks. The
weights do not depend on the assignment: it only balances the work.
"""

from collections.abc import Sequence


def idle_ranks(ranks: int, groups: int, parts: int) -> str | None:
    """Returns a sentence if an optimizer step of `groups` groups has fewer parts than there are ranks, else None.

    `parts` is the number of parts of each group.
    """
    if groups * parts >= ranks:
        return None
    return (
        f"{ranks - groups * parts} of {ranks} trainer ranks have nothing to train: an optimizer step has {groups} "
        f"groups of {parts} parts; a smaller trainer.micro_batch_size makes more"
    )


def repeating_ranks(per_replica: int, groups: int, parts: int, *, by_group: bool = False) -> str | None:
    """Returns a sentence if a call of `groups` groups has fewer parts than a replica has ranks, else None.

    All ranks of a replica compute at the same time, so some of them then repeat parts that another rank has. With
    `by_group` they do so within each group (see `RankPosition.by_group`).
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
    """Assigns the groups of one optimizer step, in the order in which they come, to replicas and their ranks.

    A whole group, or a part if there are few groups, goes to the replica that has the fewest images left to compute.
    """

    def __init__(self, ranks: int, per_replica: int = 1, *, by_group: bool = False) -> None:
        """`per_replica` is the number of ranks per replica; raises ValueError if it does not divide `ranks`.

        With `by_group`, the ranks of a replica take the parts of each group in turn, whatever other work they have.
        """
        if ranks % per_replica:
            raise ValueError(f"{ranks} trainer ranks cannot form replicas of {per_replica}")
        self._per_replica, self._replicas, self._by_group = per_replica, ranks // per_replica, by_group
        self._load = [0] * ranks
        """Rank → number of images that it has got in this optimizer step."""
        self._left = [0] * self._replicas
        """Replica → number of images that it has got and not computed yet."""
        self._whole = True
        """True: groups are not split over replicas."""

    def begin(self, groups: int) -> None:
        """Begins an optimizer step of `groups` groups.

        Groups are split over replicas only if there are fewer than two groups for each replica.
        """
        self._load, self._left = [0] * len(self._load), [0] * self._replicas
        self._whole = groups >= 2 * self._replicas

    def assign(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Returns the rank for each part of the next group; `samples` is the number of images of each part.

        Of equally good replicas the one with the fewest images in this optimizer step is taken, then the lowest.
        """
        whole = self._next(sum(samples)) if self._whole else None
        owners = []
        for part, size in enumerate(samples):
            ranks = self._ranks(self._next(size) if whole is None else whole)
            owner = ranks[part % len(ranks)] if self._by_group else min(ranks, key=lambda rank: self._load[rank])
            self._load[owner] += size
            owners.append(owner)
        return tuple(owners)

    def computed(self, replica: int, samples: int) -> None:
        """Records that a replica has computed so many images."""
        self._left[replica] = max(0, self._left[replica] - samples)

    def _next(self, samples: int) -> int:
        """Returns the replica with the least work left, and adds so many images to its work."""
        done = [sum(self._load[rank] for rank in self._ranks(replica)) for replica in range(self._replicas)]
        chosen = min(range(self._replicas), key=lambda replica: (self._left[replica], done[replica]))
        self._left[chosen] += samples
        return chosen

    def _ranks(self, replica: int) -> range:
        return range(replica * self._per_replica, (replica + 1) * self._per_replica)
