"""`Waves`: the longest time that a reward's server calls for one group can take."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Waves:
    """A reward's server calls for one group: `concurrency` at a time, each limited to `deadline` seconds."""

    calls: int
    concurrency: int
    deadline: float

    @property
    def seconds(self) -> float:
        """The largest number of seconds until every call has an answer or has failed."""
        return math.ceil(self.calls / self.concurrency) * self.deadline

    def __str__(self) -> str:
        many = f"{self.calls} calls, {self.concurrency} at a time, each" if self.calls > 1 else "one call,"
        return f"{many} up to {self.deadline:g} s: up to {self.seconds:g} s in all"
