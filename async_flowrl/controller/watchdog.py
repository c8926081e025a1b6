"""The watchdog notices a run in which no ticket makes progress: it logs what each ticket waits for, then ends the run.

Calls of workers have deadlines of their own; this is for other stalls, e.g. a ticket that no worker may run.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from math import isfinite

from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import served_terms
from async_flowrl.controller.context import Context
from async_flowrl.controller.deadlines import SeparatePools
from async_flowrl.tickets.table import Ticket, describe
from separation.text_table import format_table

logger = logging.getLogger(__name__)

MOST_ROWS = 20


class Stalled(RuntimeError):
    """Raised if no ticket has changed its state for longer than the phases of a step may take together (`limit`)."""


@dataclass
class TicketAges:
    """Remembers since when each live ticket has been in its state, as far as repeated calls of `look` can tell."""

    # (kind, number) of a ticket → its state, its attempt, and the time of the first `look` that saw these.
    seen: dict[tuple[str, int], tuple[str, int, float]] = field(default_factory=dict)
    workers: tuple[str, ...] = ()  # Names of the rollout and reward workers at the last `look`.

    def look(self, ctx: Context, now: float) -> bool:
        """Records tickets and workers at `now` (loop's clock); returns True if any changed since the last call."""
        before, self.seen = self.seen, {}
        groups = (ctx.rollout, *ctx.rewards.values())
        known_workers, self.workers = self.workers, tuple(w.name for group in groups for w in group.workers)
        for ticket in ctx.table.live():
            key, state = (ticket.kind, ticket.ordinal), (str(ticket.state), ticket.attempt)
            earlier = before.get(key)
            since = earlier[2] if earlier is not None and earlier[:2] == state else now
            self.seen[key] = (*state, since)
        moved = {k: v[:2] for k, v in before.items()} != {k: v[:2] for k, v in self.seen.items()}
        return moved or known_workers != self.workers

    def report(self, ctx: Context, now: float) -> str:
        """Returns a table of at most MOST_ROWS waiting tickets; the one that has waited longest comes first."""
        rows = []
        tickets = sorted(ctx.table.live(), key=lambda ticket: (self._since(ticket), describe(ticket)))
        if not tickets:
            return "nothing is under way"
        for ticket in tickets[:MOST_ROWS]:
            held = ctx.table.held.get(ticket.worker or "")
            event = (
                f"{ticket.worker} holds versions {sorted(held.policy)}" if held else f"needs version {ticket.version}"
            )
            age = f"{now - self._since(ticket):.1f} s"
            rows.append((describe(ticket), ticket.state, ticket.worker or "-", age, event))
        more = f"\n… and {len(tickets) - MOST_ROWS} more" if len(tickets) > MOST_ROWS else ""
        return format_table(("ticket", "state", "worker", "age", "last event"), rows) + more

    def _since(self, ticket: Ticket) -> float:
        return self.seen[ticket.kind, ticket.ordinal][2]


def limit(config: Config, placement: SeparatePools) -> float:
    """Returns the seconds without a change after which the run has stalled: the sum of all deadlines of a step.

    One call may train all groups of a step. The longest time to find and restart a hung reward server is added.
    """
    deadlines = config.deadlines
    update = placement.update_seconds(config.prompts_per_step)
    served = [serve for _, serve in served_terms(config)]
    servers = max((s.start_seconds + (s.hung_seconds if isfinite(s.hung_seconds) else 0.0) for s in served), default=0)
    return servers + deadlines.load + deadlines.generate + deadlines.score + deadlines.publish + update


async def watch_for_stalls(ctx: Context) -> None:
    """Checks every `deadlines.stall` seconds and logs what waits; raises Stalled after `limit` without a change."""
    clock, deadlines, ages = asyncio.get_running_loop().time, ctx.config.deadlines, TicketAges()
    changed = clock()
    while True:
        await asyncio.sleep(deadlines.stall)
        if ages.look(ctx, clock()):
            changed = clock()
            continue
        report = ages.report(ctx, clock())
        ctx.observer.event("stall", seconds=clock() - changed, report=report)
        logger.info("nothing has changed for %.0f s:\n%s", clock() - changed, report)
        if clock() - changed > limit(ctx.config, ctx.placement):
            raise Stalled(f"nothing has changed for {clock() - changed:.0f} s:\n{report}")
