"""Units of work of a simulated run: each has a worker, a training step, a start and an end.

They are drawn in pictures of schedules.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Piece of work: a ticket, the score of a group, a call to train, or the end of an optimizer step."""

    place: str
    """Worker that computed it, such as `rollout-0`, `trainer-0` or `reward-0`.

    Ranks that compute together have one unit each.
    """
    step: int
    """Training step to which it belongs, from 0."""
    start: float
    """Virtual seconds from the start of the run."""
    end: float
    evaluation: bool = False
    """True for a ticket of an evaluation; its `step` is the evaluated version."""
