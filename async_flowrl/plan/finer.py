"""Search for calls of fewer images, which balance uneven generation times as more staleness does, with fresher images.

A call has fewer images with smaller batches of tickets, or with smaller tickets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import Layout, Work

SAME_SPEED = 0.98
"""A plan counts as fast as another one if that one's step takes at least this share of its own step."""
MAX_TICKETS_PER_GROUP = 64
"""Most tickets per group that are tried."""


@dataclass(frozen=True)
class Finer:
    """Plan with fewer images per call."""

    work: Work
    """Its work."""
    before: Work
    """The work without this plan."""
    prediction: Prediction

    def sentence(self, instead_of: Prediction) -> str:
        layout, plain = self.prediction.layout, instead_of.layout
        deeper = plain.max_staleness > layout.max_staleness
        fewer, divided = (ours < theirs for ours, theirs in zip(_sizes(self.work), _sizes(self.before), strict=True))
        what = "Smaller tickets" if divided else "Smaller batches of tickets"
        named = zip(("rollout.tickets_per_batch", "ticket_size"), _sizes(self.work), _sizes(self.before), strict=True)
        changes = [f"{name}={ours} in place of {theirs}" for name, ours, theirs in named if ours != theirs]
        unit = "batch" if fewer else "ticket"
        return (
            f"{what} {'before older samples' if deeper else 'help'}: {' and '.join(changes)} at "
            f"max_staleness={layout.max_staleness} takes {self.prediction.step_seconds:.3g} s per step, "
            f"max_staleness={plain.max_staleness} without it {instead_of.step_seconds:.3g} s, if a part of a {unit}'s "
            f"images takes that part of its time."
        )


def finer_tickets(work: Work, chosen: Prediction, simulated: Callable[[Work, Layout], Prediction]) -> Finer | None:
    """Returns the plan with the least staleness, and then the most images per call, that gains over `chosen`.

    A gain is equal speed with less staleness, or more speed with equal staleness. A part of a call is assumed to take
    its share of the call's time. Returns None if no smaller call gains. `simulated` simulates a layout.
    """
    depth = chosen.layout.max_staleness
    for k in range(min(1, depth), depth + 1):
        wanted = chosen.step_seconds / SAME_SPEED if k < depth else chosen.step_seconds * SAME_SPEED
        for smaller in finer_works(work):
            plan = simulated(smaller, chosen.layout.with_staleness(k, "stream"))
            if plan.step_seconds <= wanted:
                return Finer(smaller, work, plan)
    return None


def finer_works(work: Work) -> Iterator[Work]:
    """Yields the work with fewer images per call, most images first: fewer tickets per batch, then divided tickets.

    Tickets are divided only where none shares a batch: with batches of as many smaller tickets, both would change.
    """
    together = work.tickets_per_batch
    for size in sorted({together // parts for parts in range(2, together + 1)}, reverse=True):
        yield replace(work, tickets_per_batch=size)
    images = _sizes(work)[1]
    for parts in range(2, images + 1):
        if images % parts == 0 and work.tickets_per_group * parts <= MAX_TICKETS_PER_GROUP:
            yield divided(work, parts)


def divided(work: Work, parts: int) -> Work:
    """Returns the work with every ticket divided into `parts` tickets, each of which is made alone."""
    return replace(
        work,
        tickets_per_group=work.tickets_per_group * parts,
        tickets_per_batch=1,
        generate=work.generate.scaled(1 / parts),
        ticket_bytes=work.ticket_bytes // parts,
    )


def _sizes(work: Work) -> tuple[int, int]:
    """Returns the tickets per batch and the images per ticket."""
    return work.tickets_per_batch, work.group_size // work.tickets_per_group
