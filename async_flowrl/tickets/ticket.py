"""The ticket: its position in the run, its states, and the arithmetic of ordinals, steps and versions. Pure Python."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SCORING = "SCORING"
    READY = "READY"
    HANDED = "HANDED"
    TRAINED = "TRAINED"
    SKIPPED = "SKIPPED"


FINAL = (State.TRAINED, State.SKIPPED)
TRAIN, EVALUATION = "train", "evaluation"
EVALUATION_SHARE = 4
"""Every EVALUATION_SHARE-th ticket (or batch of them) a worker takes is an evaluation ticket, if one is waiting."""


class Refused(RuntimeError):
    """A result or a hand-over that breaks a promise. It ends the run."""


@dataclass(frozen=True)
class Shape:
    """The arithmetic of a run: how ordinals, steps, groups and versions hang together."""

    tickets_per_group: int
    groups_per_step: int
    total_steps: int
    max_staleness: int

    @property
    def tickets_per_step(self) -> int:
        return self.tickets_per_group * self.groups_per_step

    def version_for(self, step: int) -> int:
        """The one version that tickets of `step` are made with."""
        return max(0, step - self.max_staleness)


@dataclass
class Ticket:
    kind: str
    ordinal: int
    step: int
    group: int
    slice_index: int
    """Which slice of its group, 0 .. tickets_per_group - 1."""
    version: int
    state: State = State.PENDING
    worker: str | None = None
    attempt: int = 0
    handed_back: int = 0
    """Attempts that ended because their worker left, which says nothing against the ticket."""
    digest: str | None = None
    """Digest of the weights it was made with, as the worker reported it."""
    payload: Any = None
    """Where its images and trajectory are; opaque here."""
    scores: Any = None
    held_out: Any = None
    """Of an evaluation's ticket: what the held-out terms say of its images."""
    baseline: bool = False
    """Of an evaluation's ticket: its images are made as the base model is usually sampled."""


@dataclass
class Held:
    """Versions a worker has acknowledged and still holds, with their digests; evaluation has a slot of its own."""

    policy: dict[int, str] = field(default_factory=dict)
    evaluation: dict[int, str] = field(default_factory=dict)
    taken: int = 0


def record(ticket: Ticket) -> dict[str, Any]:
    """The fields of the event that records a transition."""
    names = ("ordinal", "kind", "step", "group", "state", "worker", "attempt", "version", "digest")
    return {name: getattr(ticket, name) for name in names}


def describe(ticket: Ticket) -> str:
    """One ticket in words, for errors and stall reports."""
    return (
        f"{ticket.kind} ticket {ticket.ordinal} (step {ticket.step}, group {ticket.group}, version {ticket.version}, "
        f"{ticket.state}, worker {ticket.worker}, attempt {ticket.attempt})"
    )
