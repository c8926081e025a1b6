"""The curriculum (`data.curriculum`): sets prompts aside for some epochs if their last groups had no spread of rewards.

The prompts of step s follow from the seed and from the outcomes of the groups of steps up to s - lag, where lag is
max_staleness + 1. Those steps are trained before any ticket of step s is issued, so neither timing nor the number of
workers changes the choice. A checkpoint stores only the outcomes, one byte per group; a resumed run computes the same
prompts from them.

At the beginning of an epoch, a prompt is set aside (left out) if its last `after` groups had no spread, and if it was
trained since it last returned. A prompt that returns is therefore drawn at least once before it can be left out again.
If all prompts are left out, the epochs until the first of them returns are skipped.
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

# Outcomes of a group: all rewards are equal, rewards differ, or there are none (it is ignored).
NO_SPREAD, SPREAD, UNKNOWN = 0, 1, 2
# Steps whose prompts are remembered after their outcomes have been counted.
KEPT_STEPS = 16


@dataclass(frozen=True)
class Choice:
    """The prompts of a step in group order, and the epoch of the last of them with its number of left-out prompts."""

    prompts: tuple[int, ...]
    epoch: int
    set_aside: int


class Curriculum:
    """Chooses the prompts of one step after the other; `lag` is max_staleness + 1.

    `choice` is called for every ticket, and `record` after every trained step.
    """

    def __init__(self, config: CurriculumConfig, sampler: Sampler, *, lag: int, outcomes: bytes = b"") -> None:
        """`outcomes` holds one byte per group of all steps trained so far, in order."""
        self._sampler, self._lag, self._outcomes = sampler, lag, bytearray(outcomes)
        self._after, self._skip_epochs = config.after or 0, config.skip_epochs
        count = sampler.num_prompts
        self._streak = np.zeros(count, np.int32)
        # [prompts] True if the prompt was trained since it last returned, or since the start.
        self._trained = np.zeros(count, np.bool_)
        # [prompts] Epoch in which a left-out prompt returns.
        self._returns = np.zeros(count, np.int64)
        self._choices: dict[int, Choice] = {}
        self._next = self._counted = 0
        self._epoch, self._place, self._set_aside = -1, 0, 0
        self._order: Indices = np.empty(0, np.int64)

    def choice(self, step: int) -> Choice:
        """Returns the prompts of `step`. Raises RuntimeError if the outcomes of step - lag are not recorded yet."""
        while self._next <= step:
            self._choose()
        return self._choices[step]

    def record(self, step: int, outcomes: Sequence[int]) -> None:
        """Stores the outcomes of the groups of `step`, in order. Raises RuntimeError unless it is the next step."""
        groups = self._sampler.prompts_per_step
        if len(self._outcomes) != step * groups or len(outcomes) != groups:
            raise RuntimeError(f"step {step} brings {len(outcomes)} outcomes after {len(self._outcomes)} earlier ones")
        self._outcomes += bytes(outcomes)

    def saved(self) -> str:
        """Returns all outcomes as text, for a checkpoint."""
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
            self._epoch = int(self._returns[left_out].min()) - 1  # the next epoch is the first with a returning prompt


def read_outcomes(saved: str) -> bytes:
    """Returns the outcomes from the text of `Curriculum.saved`."""
    return zlib.decompress(base64.b64decode(saved))
