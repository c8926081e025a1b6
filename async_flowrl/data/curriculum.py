"""Curriculum: prompts whose last groups had no spread of rewards are left out of the next epochs.

The prompts of step s are a function of the seed and of the outcomes of the steps up to s - lag, where lag is
max_staleness + 1: those are trained before any ticket of step s can be issued. So neither the schedule nor the number
of workers has a part in them, and the outcomes, one byte per group, are all that a checkpoint needs: choosing again
from them gives the same prompts.

Whether a prompt is left out is decided at the beginning of an epoch, and only if it has been trained since it was
decided last: a prompt that comes back is drawn once before it can be left out again. Where all prompts are left out,
the epochs until the first of them returns are passed over: they come back at once.
"""

import base64
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_flowrl.config.schema import CurriculumConfig
from async_flowrl.data.sampler import Indices, Sampler

logger = logging.getLogger(__name__)

NO_SPREAD, SPREAD, UNKNOWN = 0, 1, 2
"""Outcomes of a group: all of its rewards equal, or not, or it has none."""
KEPT_STEPS = 16
"""Steps whose prompts are remembered after their outcomes have been counted."""


@dataclass(frozen=True)
class Choice:
    """The prompts of a step, and how many were set aside when the last of them was chosen."""

    prompts: tuple[int, ...]
    epoch: int
    set_aside: int


class Curriculum:
    """Chooses the prompts of step after step. Outcomes must come in order of steps."""

    def __init__(self, config: CurriculumConfig, sampler: Sampler, *, lag: int, outcomes: bytes = b"") -> None:
        """`outcomes`: of the groups of all steps that were trained before, in order."""
        self._sampler, self._lag, self._outcomes = sampler, lag, bytearray(outcomes)
        self._after, self._skip_epochs = config.after or 0, config.skip_epochs
        count = sampler.num_prompts
        self._streak = np.zeros(count, np.int32)
        self._trained = np.zeros(count, np.bool_)
        """Since it was decided last whether the prompt is left out."""
        self._returns = np.zeros(count, np.int64)
        """Epoch that a prompt which is left out comes back in."""
        self._choices: dict[int, Choice] = {}
        self._next = self._counted = 0
        self._epoch, self._place, self._set_aside = -1, 0, 0
        self._order: Indices = np.empty(0, np.int64)

    def choice(self, step: int) -> Choice:
        """Raises RuntimeError for a step that is asked for before what it depends on has been trained."""
        while self._next <= step:
            self._choose()
        return self._choices[step]

    def record(self, step: int, outcomes: Sequence[int]) -> None:
        """The outcomes of the groups of `step`, in order."""
        groups = self._sampler.prompts_per_step
        if len(self._outcomes) != step * groups or len(outcomes) != groups:
            raise RuntimeError(f"step {step} brings {len(outcomes)} outcomes after {len(self._outcomes)} earlier ones")
        self._outcomes += bytes(outcomes)

    def saved(self) -> str:
        """All outcomes, for a checkpoint."""
        return base64.b64encode(zlib.compress(bytes(self._outcomes))).decode()

    def _choose(self) -> None:
        step = self._next
        while self._counted <= step - self._lag:
            self._count(self._counted)
            self._counted += 1
        prompts: list[int] = []
        while len(prompts) < self._sampler.prompts_per_step:
            while self._place == len(self._order):
                self._open_epoch(step)
            prompts.append(int(self._order[self._place]))
            self._place += 1
        self._choices[step] = Choice(tuple(prompts), self._epoch, self._set_aside)
        self._choices.pop(self._counted - KEPT_STEPS, None)
        self._next = step + 1

    def _count(self, step: int) -> None:
        groups = self._sampler.prompts_per_step
        outcomes = self._outcomes[step * groups : (step + 1) * groups]
        if len(outcomes) != groups:
            raise RuntimeError(f"the prompts of step {self._next} were asked for before step {step} was trained")
        for prompt, outcome in zip(self._choices[step].prompts, outcomes, strict=True):
            if outcome == UNKNOWN:
                continue
            self._streak[prompt] = 0 if outcome == SPREAD else self._streak[prompt] + 1
            self._trained[prompt] = True

    def _open_epoch(self, step: int) -> None:
        self._epoch, self._place = self._epoch + 1, 0
        away = self._returns > self._epoch
        self._trained[self._returns == self._epoch] = False
        newly = ~away & self._trained & (self._streak >= self._after)
        self._returns[newly] = self._epoch + self._skip_epochs
        self._trained[newly] = False
        left_out = away | newly
        self._order = self._sampler.order(self._epoch, ~left_out if left_out.any() else None)
        self._set_aside = int(left_out.sum())
        if self._set_aside:
            logger.info(
                "epoch %d begins in step %d: %d of %d prompts are set aside, %d of them newly, as the rewards of their "
                "last %d groups did not differ",
                *(self._epoch, step, self._set_aside, len(left_out), int(newly.sum()), self._after),
            )
        if not len(self._order):
            self._epoch = int(self._returns[left_out].min()) - 1  # the next one is that which somebody returns in


def read_outcomes(saved: str) -> bytes:
    """What `Curriculum.saved` wrote."""
    return zlib.decompress(base64.b64decode(saved))
