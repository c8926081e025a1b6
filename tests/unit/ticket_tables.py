"""Small ticket tables, and shorthands for what happens to them."""

from async_flowrl.tickets.table import Shape, Ticket, TicketTable


def digest(version: int) -> str:
    return f"digest-{version}"


def table(k: int = 1, steps: int = 4, groups: int = 2, parts: int = 1) -> TicketTable:
    return TicketTable(Shape(parts, groups, steps, k))


def opened(k: int = 1, steps: int = 4, groups: int = 2) -> TicketTable:
    """A table whose worker "w" holds version 0."""
    t = table(k, steps, groups)
    t.join("w")
    publish(t, 0, "w")
    return t


def started(t: TicketTable, worker: str) -> Ticket:
    ticket = t.next_for(worker)
    assert ticket is not None
    t.start(ticket, worker)
    return ticket


def run_ticket(t: TicketTable, worker: str) -> Ticket:
    ticket = started(t, worker)
    assert t.generated(ticket, version=ticket.version, digest=digest(ticket.version), payload=ticket.ordinal)
    return ticket


def publish(t: TicketTable, version: int, *workers: str) -> None:
    t.publish(version, digest(version))
    for worker in workers:
        t.acknowledge(worker, version, digest(version))


def finish_step(t: TicketTable, step: int) -> None:
    for group in range(t.shape.groups_per_step):
        t.scored(t.group(step, group), scores=(1.0,))
        t.hand_over(step, group)
    t.close_step(step)
