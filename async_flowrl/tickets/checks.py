"""Checks of the ticket table on what comes from workers and what goes to the trainer; each raises Refused. Pure Python.

`digests` is version → digest of the weights that this run has published, or has had evaluated.
"""

from collections.abc import Collection, Mapping

from async_flowrl.tickets.ticket import Refused, State, Ticket, describe


def check_start(ticket: Ticket, worker: str, versions: Collection[int]) -> None:
    """Raises Refused unless the ticket is PENDING and `versions`, those that the worker holds, have its own."""
    if ticket.state is not State.PENDING or ticket.version not in versions:
        raise Refused(f"{worker} may not start {describe(ticket)}: it holds versions {sorted(versions)}")


def check_acknowledged(worker: str, version: int, digest: str, digests: Mapping[int, str]) -> None:
    """Raises Refused if the worker verified `version` with another digest than the published one."""
    if digests.get(version) != digest:
        raise Refused(
            f"{worker} acknowledged version {version} with digest {digest}, but {digests.get(version)} was published"
        )


def check_made_with(ticket: Ticket, version: int, digest: str, digests: Mapping[int, str]) -> None:
    """Raises Refused if a ticket's images were made with other weights (`version`, `digest`) than its version's."""
    if version != ticket.version:
        raise Refused(f"{describe(ticket)} came back labelled version {version}")
    if digest != digests.get(version):
        raise Refused(
            f"{describe(ticket)} was made with weights {digest}, but version {version} is {digests.get(version)}"
        )


def check_handed(ticket: Ticket, step: int, max_staleness: int, digests: Mapping[int, str]) -> None:
    """Raises Refused if a ticket that goes to the trainer in `step` is not READY, is too old, or has other weights."""
    if ticket.state is not State.READY:
        raise Refused(f"{describe(ticket)} is not ready")
    if not 0 <= step - ticket.version <= max_staleness:
        raise Refused(f"{describe(ticket)} is {step - ticket.version} versions old; the bound is {max_staleness}")
    if ticket.digest != digests.get(ticket.version):
        raise Refused(
            f"{describe(ticket)} was made with weights {ticket.digest}, which this run did not publish as version "
            f"{ticket.version}"
        )
