"""The prompt sampler: computes the prompts of a step from (seed, step) alone, so it has no state to save."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from async_flowrl.seeds import derive

Indices = npt.NDArray[np.int64]


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
