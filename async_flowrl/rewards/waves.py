"""The longest time that the calls of a reward for one group can take."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Waves:
    """The calls that a reward makes for one group: `concurrency` at a time, each ended by its `deadline` in seconds."""

    calls: int
    concurrency: int
    deadline: float

    @property
    def seconds(self) -> float:
        """Until the last of them has its answer or has failed."""
        return math.ceil(self.calls / self.concurrency) * self.deadline

    def __str__(self) -> str:
        many = f"{self.calls} calls, {self.concurrency} at a time, each" if self.calls > 1 else "one call,"
        return f"{many} up to {self.deadline:g} s: up to {self.seconds:g} s in all"
