"""Search for smaller tickets, which balance uneven generation times as more staleness does, but with fresher images."""

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
    """Plan with smaller tickets."""

    ticket_size: int
    """Images per ticket."""
    before: int
    """Images per ticket without this plan."""
    prediction: Prediction

    def sentence(self, instead_of: Prediction) -> str:
        layout, plain = self.prediction.layout, instead_of.layout
        deeper = plain.max_staleness > layout.max_staleness
        return (
            f"Smaller tickets {'before older samples' if deeper else 'help'}: ticket_size={self.ticket_size} in place "
            f"of {self.before} at max_staleness={layout.max_staleness} takes {self.prediction.step_seconds:.3g} s per "
            f"step, max_staleness={plain.max_staleness} without it {instead_of.step_seconds:.3g} s, if a part of a "
            "ticket's images takes that part of its time."
        )


def finer_tickets(work: Work, chosen: Prediction, simulated: Callable[[Work, Layout], Prediction]) -> Finer | None:
    """Returns the plan with the least staleness, and then the largest tickets, that gains over `chosen`.

    A gain is equal speed with less staleness, or more speed with equal staleness. A part of a ticket is assumed to take
    its share of the ticket's time. Returns None if no smaller ticket gains. `simulated` simulates a layout.
    """
    depth = chosen.layout.max_staleness
    for k in range(min(1, depth), depth + 1):
        wanted = chosen.step_seconds / SAME_SPEED if k < depth else chosen.step_seconds * SAME_SPEED
        for parts in parts_of(work):
            smaller = divided(work, parts)
            plan = simulated(smaller, chosen.layout.with_staleness(k, "stream"))
            if plan.step_seconds <= wanted:
                before = work.group_size // work.tickets_per_group
                return Finer(before // parts, before, plan)
    return None


def parts_of(work: Work) -> Iterator[int]:
    """Yields the numbers of equal tickets into which one ticket can be divided, fewest first."""
    images = work.group_size // work.tickets_per_group
    for parts in range(2, images + 1):
        if images % parts == 0 and work.tickets_per_group * parts <= MAX_TICKETS_PER_GROUP:
            yield parts


def divided(work: Work, parts: int) -> Work:
    """Returns the work with every ticket divided into `parts` tickets."""
    return replace(
        work,
        tickets_per_group=work.tickets_per_group * parts,
        generate=work.generate.scaled(1 / parts),
        ticket_bytes=work.ticket_bytes // parts,
    )
