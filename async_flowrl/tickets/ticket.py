"""The ticket: its number, its state, and how numbers of tickets, steps and versions belong together. Pure Python."""

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
