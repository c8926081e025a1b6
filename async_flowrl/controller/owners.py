"""Owners assigns the parts of groups to trainer ranks.

A replica is the ranks that hold one copy of the base together; work is first given to a replica, then to its ranks. The
weights do not depend on the assignment, so it may depend on measured times: it only balances the work.
"""

from collections.abc import Mapping, Sequence

PACE_MEMORY = 0.5
"""Weight of the earlier estimate of a replica's pace beside a new measurement."""
PACE_TRUST = 0.8
"""Factor on the lag of a replica behind the fastest one for each optimizer step in which it had no work.

Without it, one slow call, e.g. one that waited for a payload to be made again, could leave a replica without work for
good.
"""

UNKNOWN: Mapping[int, float] = {}
"""Value of `busy` with `placement=separate`: no replica makes tickets, and the work that it has got is known here."""


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

    A whole group, or a part if there are few groups, goes to the replica that will probably be done with it first. The
    estimate uses each replica's measured seconds per image and the work that it has got already. `now` is the time in
    seconds, on a clock of the caller.
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
        self._done_at = [0.0] * self._replicas
        """Replica → time at which it will probably be done with its work."""
        self._pace: dict[int, float] = {}
        """Replica → seconds per image, as an average that forgets (PACE_MEMORY)."""
        self._given: set[int] = set()
        """Replicas that have got work in this optimizer step."""
        self._whole = True
        """True: groups are not split over replicas."""
        self._occupied: dict[int, float] = {}
        """Replica → time at which it will probably be done with other work than groups."""
        self.absent: set[int] = set()
        """Replicas that have died and get no work."""

    def begin(self, groups: int, now: float = 0.0) -> None:
        """Begins an optimizer step of `groups` groups.

        Groups are split over replicas only if there are fewer than two groups for each living replica.
        """
        fastest = min(self._pace.values(), default=0.0)
        for replica in self._pace.keys() - self._given:
            self._pace[replica] = fastest + PACE_TRUST * (self._pace[replica] - fastest)
        self._load, self._given = [0] * len(self._load), set()
        self._done_at = [max(now, self._occupied.get(replica, now)) for replica in range(self._replicas)]
        self._whole = groups >= 2 * (self._replicas - len(self.absent))

    def of(self, samples: Sequence[int], now: float = 0.0, *, busy: Mapping[int, float] = UNKNOWN) -> tuple[int, ...]:
        """Returns the rank for each part of the next group; `samples` is the number of images of each part.

        `busy` maps the replicas that are at work now to the seconds for which the ticket that they are making will
        probably still keep them (`placement=shared`), 0.0 if they train. Of equally good replicas the lowest that is
        not among them is taken, of equally good ranks the lowest.
        """
        free_at = {replica: now + seconds for replica, seconds in busy.items()}
        whole = self._next(sum(samples), now, free_at) if self._whole else None
        owners = []
        for part, size in enumerate(samples):
            replica = self._next(size, now, free_at) if whole is None else whole
            ranks = self._ranks(replica)
            owner = ranks[part % len(ranks)] if self._by_group else min(ranks, key=lambda rank: self._load[rank])
            self._load[owner] += size
            owners.append(owner)
        return tuple(owners)

    def took(self, replica: int, samples: int, seconds: float, *, idle_at: float | None = None) -> None:
        """Records that a replica has computed `samples` images in `seconds`, 0.0 if nobody knows in how many.

        `idle_at` is the present time if the replica has no work left, else None.
        """
        if samples:
            self._given.add(replica)
        if samples and seconds > 0:
            pace, before = seconds / samples, self._pace.get(replica)
            self._pace[replica] = pace if before is None else PACE_MEMORY * before + (1 - PACE_MEMORY) * pace
        if idle_at is not None:
            self._done_at[replica] = idle_at
            self._occupied.pop(replica, None)

    def occupied(self, replica: int, until: float) -> None:
        """Records that a replica has other work than groups, probably until the time `until`."""
        self._occupied[replica] = until
        self._done_at[replica] = max(self._done_at[replica], until)

    def _next(self, samples: int, now: float, free_at: Mapping[int, float]) -> int:
        """Returns the replica that will probably be done with the images first, and adds them to its work.

        `free_at` maps the replicas that are busy to the time at which they will probably have made their ticket.
        """
        usual = sum(self._pace.values()) / len(self._pace) if self._pace else 1.0

        def done(replica: int) -> float:
            begins = max(now, self._done_at[replica], free_at.get(replica, now))
            return begins + samples * self._pace.get(replica, usual)

        living = (replica for replica in range(self._replicas) if replica not in self.absent)
        chosen = min(living, key=lambda replica: (done(replica), replica in free_at))
        self._done_at[chosen] = done(chosen)
        self._given.add(chosen)
        return chosen

    def _ranks(self, replica: int) -> range:
        return range(replica * self._per_replica, (replica + 1) * self._per_replica)
