"""The ticket table with the gate: decides which images are made next, by which worker, from which weights. Pure Python.

The controller calls it for every event of the run. A ticket is `images_per_ticket` images of one group. Its ordinal
fixes its step, its group, and the version that makes it, max(0, step - max_staleness). Its states:

    PENDING → RUNNING → SCORING → READY → HANDED → TRAINED          SKIPPED: its group has no reward
       ▲____________________________________│  worker or payload lost: back to PENDING

There is no other queue or counter of tickets. A method raises Refused for a call that breaks a rule; that ends the run.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class State(StrEnum):
    PENDING = "PENDING"  # It waits for a worker.
    RUNNING = "RUNNING"  # A worker makes its images.
    SCORING = "SCORING"  # It has images; its group has no scores yet.
    READY = "READY"  # Its group has scores, or it is certain that there will be none.
    HANDED = "HANDED"  # The trainer has it.
    TRAINED = "TRAINED"  # Its training step (or its evaluation) is done.
    SKIPPED = "SKIPPED"  # The same, but its group has no scores.


FINAL = (State.TRAINED, State.SKIPPED)
TRAIN, EVALUATION = "train", "evaluation"
# Tickets (or batches of tickets) that a worker starts for each evaluation ticket among them, if one waits.
EVALUATION_EVERY_TICKETS = 4


class Refused(RuntimeError):
    """Raised by the ticket table for a call that breaks a rule, such as a result of the wrong version. Ends the run."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a run, from which the ordinal of a ticket gives its step, its group and its version."""

    tickets_per_group: int
    groups_per_step: int
    total_steps: int  # Number of training steps of the run.
    max_staleness: int

    @property
    def tickets_per_step(self) -> int:
        return self.tickets_per_group * self.groups_per_step

    def version_for(self, step: int) -> int:
        return max(0, step - self.max_staleness)


@dataclass
class Ticket:
    """One ticket of the table. Only the table changes its state."""

    kind: str  # TRAIN or EVALUATION.
    ordinal: int  # Number of the ticket among all tickets of its kind, from 0.
    step: int  # Training step that its images are for; for an evaluation, the evaluated version.
    group: int  # Number of its group in the step, or of its prompt in the evaluation, from 0.
    slice_index: int  # Position of these images in the group, 0 .. tickets_per_group - 1; 0 for an evaluation.
    version: int  # Version of the weights that must make its images.
    state: State = State.PENDING
    # Name of the worker that makes it or made it last; None if it waits to be made again or was never started.
    worker: str | None = None
    attempt: int = 0  # Number of times that a worker has started it.
    # Ordinals of the tickets of its last call, itself included; empty if a call has one ticket.
    batch: tuple[int, ...] = ()
    # Attempts that ended because their worker left the pool; the limit on attempts does not count them.
    handed_back: int = 0
    # Digest of the weights that made its images, as the worker reported it; None without images.
    digest: str | None = None
    payload: Any = None  # Payload of its result; the table does not read it.
    scores: Any = None  # Scores of its whole group; None before scoring, and if the group has no reward.
    # Evaluation tickets: scores of its images by the held-out terms (rewards that are not trained on).
    held_out: Any = None
    baseline: bool = False  # Evaluation tickets: True if the base model makes the images, as it is usually sampled.


class Payload(NamedTuple):
    """References to a ticket's images and its trajectory (of None for an evaluation) in the object store."""

    images: Any
    trajectory: Any


@dataclass
class Held:
    """The versions that one worker holds: it has received and verified them."""

    # Version → digest of its weights for training tickets, at most max_staleness + 1 of them.
    policy: dict[int, str] = field(default_factory=dict)
    # Version → digest of its weights for evaluation tickets, at most one.
    evaluation: dict[int, str] = field(default_factory=dict)
    taken: int = 0  # Number of tickets, or batches of tickets, that the worker has started.


def record(ticket: Ticket) -> dict[str, Any]:
    names = ("ordinal", "kind", "step", "group", "state", "worker", "attempt", "version", "digest")
    batch = {"batch": ticket.batch} if ticket.batch and ticket.state is State.RUNNING else {}
    return {name: getattr(ticket, name) for name in names} | batch


def describe(ticket: Ticket) -> str:
    """Returns a ticket in words, for errors and for the report on a run that makes no progress."""
    return (
        f"{ticket.kind} ticket {ticket.ordinal} (step {ticket.step}, group {ticket.group}, version {ticket.version}, "
        f"{ticket.state}, worker {ticket.worker}, attempt {ticket.attempt})"
    )


class PendingTickets:
    """The PENDING tickets of a table. Others are dropped when they come first in a queue."""

    def __init__(self, training: Mapping[int, Ticket], evaluation: Mapping[int, Ticket]) -> None:
        """Both mappings are the table's own, ordinal → ticket; what has left them is no longer PENDING."""
        self._tickets = {TRAIN: training, EVALUATION: evaluation}
        self._ordinals: dict[tuple[str, int], list[int]] = defaultdict(list)  # (kind, version) → heap of ordinals.

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._ordinals[ticket.kind, ticket.version], ticket.ordinal)

    def first(self, kind: str, versions: Iterable[int]) -> Ticket | None:
        """Returns the ticket with the lowest ordinal among those of one of these versions, or None."""
        tickets, first = self._tickets[kind], None
        for version in versions:
            heap = self._ordinals.get((kind, version), [])
            while heap and not (heap[0] in tickets and tickets[heap[0]].state is State.PENDING):
                heapq.heappop(heap)
            if heap and (first is None or heap[0] < first.ordinal):
                first = tickets[heap[0]]
        return first

    def any(self) -> bool:
        return any(self.first(kind, [version]) for kind, version in list(self._ordinals))

    def at_most(self, versions: Iterable[int]) -> int:
        """Returns an upper bound of `count`: a ticket started out of order counts until it is first of its queue."""
        return sum(len(self._ordinals.get((TRAIN, version), ())) for version in versions)

    def count(self, versions: Iterable[int]) -> int:
        tickets = self._tickets[TRAIN]
        heaps = [self._ordinals.get((TRAIN, version), ()) for version in versions]
        ordinals = {ordinal for heap in heaps for ordinal in heap if ordinal in tickets}
        return sum(tickets[ordinal].state is State.PENDING for ordinal in ordinals)

    def forget(self, kind: str, *, before: int | None = None) -> None:
        """Removes the queues of a kind, those of versions lower than `before` if that is given."""
        for key in [key for key in self._ordinals if key[0] == kind and (before is None or key[1] < before)]:
            del self._ordinals[key]


# A worker of several that is busy gets a further ticket only if at least this many tickets per worker wait.
MIN_WAITING_PER_WORKER = 2


class TicketTable:
    """The tickets that are issued and not yet trained, and the versions that each worker holds.

    `on_change("ticket", **fields)` is called after every change of a ticket's state (fields: see `record`); it must not
    call the table.
    """

    def __init__(self, shape: Shape, *, first_step: int = 0, on_change: Callable[..., object] | None = None) -> None:
        self.shape = shape
        self.first_step = self.step = first_step  # `step` is the step that the trainer makes next.
        # Version → digest, for the versions published since this start that a ticket of the table may have.
        self.published: dict[int, str] = {}
        # Evaluated version → digest, as the first worker that acknowledged it reported it.
        self.evaluated: dict[int, str] = {}
        self.held: dict[str, Held] = {}  # Name of a worker → the versions that it holds.
        self.retried = self.duplicates = 0
        # Number of training tickets that have left the table, by final state.
        self.finished: dict[State, int] = dict.fromkeys(FINAL, 0)
        self._on_change = on_change or (lambda event, **fields: None)
        self._tickets: dict[int, Ticket] = {}
        self._evaluation: dict[int, Ticket] = {}
        self._pending = PendingTickets(self._tickets, self._evaluation)
        self._ready: dict[int, set[int]] = defaultdict(set)  # Step → groups whose tickets are all READY.
        self._issued_steps = first_step
        self._next_evaluation = 0

    # -- versions that the workers hold

    def join(self, worker: str) -> None:
        """Adds a worker that holds no version. It gets tickets after it has acknowledged a version."""
        self.held[worker] = Held()

    def publish(self, version: int, digest: str) -> None:
        """Records a new version, forgets old ones, and issues the tickets of steps up to version + max_staleness."""
        self.published[version] = digest
        oldest = self.shape.version_for(self.step)
        for old in [v for v in self.published if v < oldest]:
            del self.published[old]
        self._issue(version + self.shape.max_staleness)

    def acknowledge(self, worker: str, version: int, digest: str, *, evaluation: bool = False) -> None:
        """Records that `worker` has verified `version`; Refused if its digest is not the published one.

        A worker holds the newest max_staleness + 1 versions for training and one for evaluation.
        """
        held = self.held[worker]
        if evaluation:
            if self.evaluated.setdefault(version, digest) != digest:
                raise Refused(f"{worker} acknowledged evaluation version {version} with another digest than others")
            held.evaluation = {version: digest}
            return
        if version < self.shape.version_for(self.step):
            return  # the worker was slow: no ticket needs this version any more
        if self.published.get(version) != digest:
            published = self.published.get(version)
            raise Refused(
                f"{worker} acknowledged version {version} with digest {digest}, but {published} was published"
            )
        held.policy[version] = digest
        for old in sorted(held.policy)[: -(self.shape.max_staleness + 1)]:
            del held.policy[old]

    def lost_worker(self, worker: str) -> list[Ticket]:
        """Removes a dead worker; its running tickets become PENDING again and are returned."""
        self.held.pop(worker, None)
        running = [t for t in self.live() if t.state is State.RUNNING and t.worker == worker]
        for ticket in running:
            self.retry(ticket)
        return running

    def hand_back(self, worker: str) -> list[Ticket]:
        """Removes a worker that leaves as planned; its running tickets become PENDING again and are returned."""
        tickets = self.lost_worker(worker)
        for ticket in tickets:
            ticket.handed_back += 1
        return tickets

    # -- the gate

    def next_for(self, worker: str, *, ahead: bool = False, together: int = 1) -> Ticket | None:
        """Returns the PENDING ticket with the lowest ordinal among those whose version `worker` holds, or None.

        An evaluation ticket comes if no training ticket can be given, and as every EVALUATION_EVERY_TICKETS-th ticket.
        `ahead=True` means that the worker is busy. If it is one of several, it then gets a ticket only if
        MIN_WAITING_PER_WORKER × `together` tickets per worker wait, so that idle workers have enough; `together` is the
        number of tickets per batch. The only worker takes nothing from another.
        """
        held = self.held.get(worker)
        if held is None:
            return None
        train = self._pending.first(TRAIN, held.policy)
        enough = MIN_WAITING_PER_WORKER * together * len(self.held) if len(self.held) > 1 else 1
        if ahead and self._waiting(held, together) < enough:
            return None
        evaluation = self._pending.first(EVALUATION, held.evaluation)
        if evaluation and (train is None or held.taken % EVALUATION_EVERY_TICKETS == EVALUATION_EVERY_TICKETS - 1):
            return evaluation
        return train

    def _waiting(self, held: Held, together: int) -> int:
        if together == 1:
            return self._pending.at_most(held.policy)
        return self._pending.count(held.policy)  # Batches take their tickets out of order.

    def start(self, ticket: Ticket, worker: str, *, batch: tuple[int, ...] = (), along: bool = False) -> None:
        """Marks a PENDING ticket, whose version `worker` holds, as RUNNING there; Refused for any other ticket.

        `batch` has the ordinals of all tickets of its call, if they are several. `along=True` means that it is not the
        first one that is wanted of them and does not count for EVALUATION_EVERY_TICKETS.
        """
        held = self.held[worker]
        versions = held.policy if ticket.kind == TRAIN else held.evaluation
        if ticket.state is not State.PENDING or ticket.version not in versions:
            raise Refused(f"{worker} may not start {describe(ticket)}: it holds versions {sorted(versions)}")
        held.taken += not along
        ticket.worker, ticket.attempt, ticket.batch = worker, ticket.attempt + 1, batch
        self._move(ticket, State.RUNNING)

    def blocked(self) -> str:
        """Returns why `next_for` gave None: "weights" if a ticket waits whose version the worker lacks, else "work"."""
        return "weights" if self._pending.any() else "work"

    # -- results

    def generated(self, ticket: Ticket, *, version: int, digest: str, payload: Any) -> bool:
        """Records a ticket's images; Refused if other weights made them. False if it has images already: these stay."""
        if ticket.state not in (State.PENDING, State.RUNNING):
            self.duplicates += 1
            return False
        expected = (self.published if ticket.kind == TRAIN else self.evaluated).get(version)
        if version != ticket.version:
            raise Refused(f"{describe(ticket)} came back labelled version {version}")
        if digest != expected:
            raise Refused(f"{describe(ticket)} was made with weights {digest}, but version {version} is {expected}")
        ticket.digest, ticket.payload = digest, payload
        self._move(ticket, State.SCORING)
        return True

    def to_score(self, ticket: Ticket) -> list[Ticket]:
        """Returns all tickets of the ticket's group if all have images, else an empty list."""
        tickets = self.group(ticket.step, ticket.group, kind=ticket.kind)
        return tickets if all(t.state in (State.SCORING, State.READY) for t in tickets) else []

    def scored(self, tickets: list[Ticket], scores: Any) -> None:
        """Records the scores of a group; None means that it has none and is skipped."""
        for ticket in tickets:
            if ticket.state in (State.SCORING, State.READY):
                ticket.scores = scores
            if ticket.state is State.SCORING:
                self._move(ticket, State.READY)

    def retry(self, ticket: Ticket) -> None:
        """Makes a ticket PENDING again after the loss of its worker or its images; its seeds and version stay."""
        if ticket.state in FINAL:
            raise Refused(f"{describe(ticket)} cannot be made again")
        self.retried += 1
        ticket.worker, ticket.payload, ticket.scores, ticket.digest = None, None, None, None
        self._move(ticket, State.PENDING)

    # -- tickets for the trainer

    def group(self, step: int, group: int, *, kind: str = TRAIN) -> list[Ticket]:
        if kind == EVALUATION:
            return [t for t in self._evaluation.values() if t.group == group]
        first = step * self.shape.tickets_per_step + group * self.shape.tickets_per_group
        ordinals = range(first, first + self.shape.tickets_per_group)
        return [self._tickets[k] for k in ordinals if k in self._tickets]

    def ready(self, step: int, group: int) -> bool:
        tickets = self.group(step, group)
        return bool(tickets) and all(t.state is State.READY for t in tickets)

    def ready_groups(self, step: int) -> list[int]:
        """Returns the numbers of the groups of a step that are READY, ascending."""
        return sorted(self._ready.get(step, ()))

    def hand_over(self, step: int, group: int) -> list[Ticket]:
        """Marks a READY group of the next step as HANDED and returns its tickets, which the trainer gets.

        Refused for another step, and for a ticket that is not READY, is too old, or was made by unknown weights.
        """
        if step != self.step:
            raise Refused(f"step {step} asked for its samples, but step {self.step} is due")
        tickets = self.group(step, group)
        for ticket in tickets:
            self._check_handed(ticket)
            self._move(ticket, State.HANDED)
        return tickets

    def _check_handed(self, ticket: Ticket) -> None:
        age, most = self.step - ticket.version, self.shape.max_staleness
        if ticket.state is not State.READY:
            raise Refused(f"{describe(ticket)} is not ready")
        if not 0 <= age <= most:
            raise Refused(f"{describe(ticket)} is {age} versions old; the bound is {most}")
        if ticket.digest != self.published.get(ticket.version):
            raise Refused(
                f"{describe(ticket)} was made with weights {ticket.digest}, which this run did not publish as version "
                f"{ticket.version}"
            )

    def close_step(self, step: int) -> list[Ticket]:
        """Removes a trained step's HANDED tickets and returns them, now TRAINED or, without scores, SKIPPED."""
        done = [t for group in range(self.shape.groups_per_step) for t in self.group(step, group)]
        if len(done) != self.shape.tickets_per_step or any(t.state is not State.HANDED for t in done):
            raise Refused(f"step {step} cannot be closed: {[describe(t) for t in done if t.state is not State.HANDED]}")
        for ticket in done:
            self._move(ticket, State.SKIPPED if ticket.scores is None else State.TRAINED)
            self.finished[ticket.state] += 1
            del self._tickets[ticket.ordinal]
        self.step = step + 1
        self._ready.pop(step, None)
        self._pending.forget(TRAIN, before=self.shape.version_for(self.step))
        return done

    # -- evaluation

    def issue_evaluation(self, *, version: int, step: int, groups: int, baseline: bool = False) -> list[Ticket]:
        """Returns `groups` new evaluation tickets, one per prompt; Refused while an earlier evaluation is open."""
        if self._evaluation:
            raise Refused("an evaluation is still outstanding")
        for old in [v for v in self.evaluated if v < version]:
            del self.evaluated[old]
        for group in range(groups):
            ordinal = self._next_evaluation
            self._next_evaluation += 1
            self._evaluation[ordinal] = Ticket(EVALUATION, ordinal, step, group, 0, version, baseline=baseline)
            self._move(self._evaluation[ordinal], State.PENDING)
        return list(self._evaluation.values())

    def close_evaluation(self) -> None:
        for ticket in self._evaluation.values():
            self._move(ticket, State.SKIPPED if ticket.scores is None else State.TRAINED)
        self._evaluation.clear()
        self._pending.forget(EVALUATION)

    # -- bookkeeping

    def live(self) -> Iterator[Ticket]:
        yield from self._tickets.values()
        yield from self._evaluation.values()

    def counts(self) -> dict[State, int]:
        counts = {state: self.finished.get(state, 0) for state in State}
        for ticket in self._tickets.values():
            counts[ticket.state] += 1
        return counts

    @property
    def issued(self) -> int:
        return (self._issued_steps - self.first_step) * self.shape.tickets_per_step

    def _issue(self, last_step: int) -> None:
        while self._issued_steps <= min(last_step, self.shape.total_steps - 1):
            step = self._issued_steps
            for index in range(self.shape.tickets_per_step):
                group, slice_index = divmod(index, self.shape.tickets_per_group)
                ordinal = step * self.shape.tickets_per_step + index
                ticket = Ticket(TRAIN, ordinal, step, group, slice_index, self.shape.version_for(step))
                self._tickets[ordinal] = ticket
                self._move(ticket, State.PENDING)
            self._issued_steps += 1

    def _move(self, ticket: Ticket, state: State) -> None:
        ticket.state = state
        if ticket.kind == TRAIN:
            ready = self._ready[ticket.step]
            # The first ticket that is handed over or made again removes its group.
            if state is State.READY and self.ready(ticket.step, ticket.group):
                ready.add(ticket.group)
            elif state is not State.READY:
                ready.discard(ticket.group)
        if state is State.PENDING:
            self._pending.add(ticket)
        self._on_change("ticket", **record(ticket))
