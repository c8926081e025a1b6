"""Units of work of a simulated run: who computed what, for which step, and when. Pictures of schedules show them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A ticket, the score of a group, a call to train, or the end of an optimizer step."""

    place: str
    """Who computed it: `rollout-0`, `trainer-0`, `reward-0`. Ranks that do the same have a unit each."""
    step: int
    """Training step that it is for, from 0."""
    start: float
    """Virtual seconds from the start of the run."""
    end: float
