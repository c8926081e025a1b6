"""A run in which nothing happens says what it waits for, and ends by name instead of hanging.

Every single wait has a deadline of its own; this is for what no single wait can see: tickets that nobody may run.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.shared import update_seconds
from async_flowrl.rewards.served import served_terms
from async_flowrl.tickets.table import Ticket, describe
from separation.table import format_table

logger = logging.getLogger(__name__)


class Stalled(RuntimeError):
    """No ticket changed its state for longer than all phases together may take."""


@dataclass(frozen=True)
class StallRow:
    """Something that waits. `age` is in seconds since it came into `state`."""

    ticket: str
    state: str
    worker: str
    age: float
    last_event: str


class StallReport:
    """Who waits for what: the oldest first, because that one usually blocks the others."""

    def __init__(self, rows: Sequence[StallRow], *, limit: int = 20) -> None:
        self.rows = sorted(rows, key=lambda row: (-row.age, row.ticket))
        self.limit = limit

    def __str__(self) -> str:
        if not self.rows:
            return "nothing is under way"
        shown = [(r.ticket, r.state, r.worker, f"{r.age:.1f} s", r.last_event) for r in self.rows[: self.limit]]
        text = format_table(("ticket", "state", "worker", "age", "last event"), shown)
        hidden = len(self.rows) - len(shown)
        return text + (f"\n… and {hidden} more" if hidden > 0 else "")


@dataclass
class TicketAges:
    """Since when each live ticket has been in its state, as seen at each `look`."""

    seen: dict[tuple[str, int], tuple[str, int, float]] = field(default_factory=dict)
    workers: tuple[str, ...] = ()

    def look(self, ctx: Context, now: float) -> bool:
        """Takes note; True if a ticket came, went or moved since the last look, or a worker was replaced."""
        before, self.seen = self.seen, {}
        groups = (ctx.rollout, *ctx.rewards.values())
        known_workers, self.workers = self.workers, tuple(w.name for group in groups for w in group.workers)
        for ticket in ctx.table.live():
            key, state = (ticket.kind, ticket.ordinal), (str(ticket.state), ticket.attempt)
            known = before.get(key)
            since = known[2] if known is not None and known[:2] == state else now
            self.seen[key] = (*state, since)
        moved = {k: v[:2] for k, v in before.items()} != {k: v[:2] for k, v in self.seen.items()}
        return moved or known_workers != self.workers

    def report(self, ctx: Context, now: float) -> StallReport:
        return StallReport([self._row(ctx, ticket, now) for ticket in ctx.table.live()])

    def _row(self, ctx: Context, ticket: Ticket, now: float) -> StallRow:
        since = self.seen[ticket.kind, ticket.ordinal][2]
        held = ctx.table.held.get(ticket.worker or "")
        holds = f"{ticket.worker} holds versions {sorted(held.policy)}" if held else f"version {ticket.version} wanted"
        return StallRow(describe(ticket), str(ticket.state), ticket.worker or "-", now - since, holds)


def limit(config: Config) -> float:
    """Seconds without a change after which nothing can be under way any more.

    The trainer may take `deadlines.update` for each group of a call, and be given all of a step's in one. Groups wait
    for a reward server that is seen to hang, and is started again.
    """
    deadlines = config.deadlines
    update = update_seconds(config, config.prompts_per_step)
    served = [serve for _, serve in served_terms(config)]
    servers = max((s.start_seconds + (s.hung_seconds if isfinite(s.hung_seconds) else 0.0) for s in served), default=0)
    return servers + deadlines.load + deadlines.generate + deadlines.score + deadlines.publish + update


async def watch_for_stalls(ctx: Context) -> None:
    """Logs what blocks once nothing has changed for `deadlines.stall`; raises Stalled after all deadlines together."""
    clock, deadlines, ages = asyncio.get_running_loop().time, ctx.config.deadlines, TicketAges()
    changed = clock()
    while True:
        await asyncio.sleep(deadlines.stall)
        if ages.look(ctx, clock()):
            changed = clock()
            continue
        report = ages.report(ctx, clock())
        ctx.observer.event("stall", seconds=clock() - changed, report=str(report))
        logger.info("nothing has changed for %.0f s:\n%s", clock() - changed, report)
        if clock() - changed > limit(ctx.config):
            raise Stalled(f"nothing has changed for {clock() - changed:.0f} s:\n{report}")
