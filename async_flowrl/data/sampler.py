"""The sampler and the curriculum: which prompts a training step gets.

The sampler computes the prompts of a step from (seed, step) alone, so it has no state to save. The curriculum
(`data.curriculum`) sets prompts aside for some epochs if their last groups had no spread of rewards. Its prompts of
step s follow from the seed and from the outcomes of the groups of steps up to s - lag, where lag is max_staleness + 1.
Those steps are trained before any ticket of step s is issued, so neither timing nor the number of workers changes the
choice. A checkpoint stores only the outcomes, one byte per group; a resumed run computes the same prompts from them.

At the beginning of an epoch, a prompt is set aside (left out) if its last `after` groups had no spread, and if it was
trained since it last returned. A prompt that returns is therefore drawn at least once before it can be left out again.
If all prompts are left out, the epochs until the first of them returns are skipped.
"""

import base64
import logging
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from async_flowrl.config.schema import CurriculumConfig
from async_flowrl.seeds import derive

logger = logging.getLogger(__name__)

Indices = npt.NDArray[np.int64]
# Outcomes of a group: all rewards are equal, rewards differ, or there are none (it is ignored).
NO_SPREAD, SPREAD, UNKNOWN = 0, 1, 2
# Steps whose prompts are remembered after their outcomes have been counted.
KEPT_STEPS = 16


def steps_for(epochs: int, num_prompts: int, prompts_per_step: int) -> int:
    """Returns the number of steps until every prompt has come `epochs` times; the last may span epochs."""
    return -(-epochs * num_prompts // prompts_per_step)


class Sampler:
    """Draws the prompts of every epoch and step.

    Without weights, every prompt comes exactly once per epoch. With weights, an epoch has as many draws as there are
    prompts, and prompt i gets the floor or the ceiling of its share of them, and exactly its share on average
    (systematic sampling, Madow 1949, with one random offset per epoch). `shuffle=False` keeps the file's order.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_step: int,
        *,
        seed: int,
        shuffle: bool,
        weights: npt.NDArray[np.float64] | None = None,
    ) -> None:
        if num_prompts < 1 or prompts_per_step < 1:
            raise ValueError(f"both must be at least 1, got {num_prompts=}, {prompts_per_step=}")
        self.num_prompts, self.prompts_per_step = num_prompts, prompts_per_step
        self._seed, self._shuffle, self._weights = seed, shuffle, weights
        self._order = lru_cache(maxsize=4)(self.order)
        # Cached, because every ticket of a step asks for the same list several times.
        self.step = lru_cache(maxsize=64)(self._step)

    def order(self, epoch: int, kept: npt.NDArray[np.bool_] | None = None) -> Indices:
        """Returns the prompt indices of an epoch in order, only those with True in `kept` [prompts] if it is given."""
        drawn = self._drawn(epoch, kept)
        if not self._shuffle:
            return drawn
        if self._weights is not None:
            return drawn[self._permutation(epoch, len(drawn))]
        shuffled = self._permutation(epoch, self.num_prompts)
        return shuffled if kept is None else shuffled[kept[shuffled]]

    def _step(self, step: int) -> tuple[int, ...]:
        first = step * self.prompts_per_step
        places = (divmod(first + group, self.num_prompts) for group in range(self.prompts_per_step))
        return tuple(int(self._order(epoch)[place]) for epoch, place in places)

    def _drawn(self, epoch: int, kept: npt.NDArray[np.bool_] | None) -> Indices:
        """Returns the prompts of an epoch in file order, each repeated as often as it is drawn."""
        if self._weights is None:
            return np.arange(self.num_prompts) if kept is None else np.flatnonzero(kept)
        weights = self._weights if kept is None else np.where(kept, self._weights, 0.0)
        draws = self.num_prompts if kept is None else int(kept.sum())
        ends = np.cumsum(weights)
        if ends[-1] == 0:
            return np.empty(0, np.int64)
        offset = self._source("weights", epoch).random_sample()
        points = (np.arange(draws) + offset) * (ends[-1] / draws)
        # Rounding may put the last point at the end of the range; a prompt of weight 0 must not be drawn.
        hit = np.searchsorted(ends, points, side="right")
        return np.asarray(np.minimum(hit, np.flatnonzero(weights)[-1]), np.int64)

    def _permutation(self, epoch: int, count: int) -> Indices:
        return np.asarray(self._source("prompts", epoch).permutation(count), np.int64)

    def _source(self, name: str, epoch: int) -> np.random.RandomState:
        seed = derive(self._seed, name, epoch)
        # numpy keeps the numbers of RandomState equal in all versions, those of Generator not.
        return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])


class Choice(NamedTuple):
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
