"""Builder of a fresh Context (context.py) for one attempt of a run: ticket table, signals and published weights.

run/recovery.py calls `build_context`; tests call it for simulated runs.
"""

from collections.abc import Mapping

from async_flowrl.config.pools import ROLLOUT, scoring_pools
from async_flowrl.controller.context import Context, Signal, Steps
from async_flowrl.controller.placement import SeparatePools
from async_flowrl.controller.resume import START, Resume
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.controller.weights import PublishedWeights
from async_flowrl.observability.events import EventLog
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import Ticket, TicketTable
from async_flowrl.tickets.ticket import record
from separation.group import WorkerGroup


def build_context(
    requests: RequestBuilder,
    pools: Mapping[str, WorkerGroup],
    trainers: TrainerGroup,
    observer: EventLog,
    steps: Steps,
    placement: SeparatePools,
    *,
    base_digest: str,
    resume: Resume = START,
) -> Context:
    """Returns the context of an attempt that begins at `resume`; the rollout workers have joined its ticket table."""
    config = requests.config

    def changed(ticket: Ticket) -> None:
        observer.event("ticket", **record(ticket))

    table, work = TicketTable(shape(config), first_step=resume.version, on_change=changed), Signal()
    for worker in pools[ROLLOUT].workers:
        table.join(worker.name)
    return Context(
        config=config,
        requests=requests,
        table=table,
        rollout=pools[ROLLOUT],
        rewards={pool.name: pools[pool.name] for pool in scoring_pools(config)},
        trainer=trainers,
        weights=PublishedWeights(
            config,
            table,
            pools[ROLLOUT],
            trainers,
            observer,
            work,
            placement,
            base_digest,
            resume.held_versions,
        ),
        observer=observer,
        steps=steps,
        placement=placement,
        base_digest=base_digest,
        work=work,
    )
