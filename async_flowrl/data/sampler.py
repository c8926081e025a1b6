"""Prompt sampler: the prompts of a step as a pure function of (seed, step), so that there is no state to save."""

from functools import lru_cache

import numpy as np

from async_flowrl.seeds import derive


def prompts_for_step(num_prompts: int, prompts_per_step: int, *, seed: int, step: int, shuffle: bool) -> list[int]:
    """Prompt indices of `step`, in group order. Every prompt comes exactly once per epoch; a step may span epochs."""
    if num_prompts < 1 or prompts_per_step < 1:
        raise ValueError(f"both must be at least 1, got num_prompts={num_prompts}, prompts_per_step={prompts_per_step}")
    return list(_chosen(num_prompts, prompts_per_step, seed, step, shuffle))


def steps_for(epochs: int, num_prompts: int, prompts_per_step: int) -> int:
    """Steps until every prompt has come `epochs` times; the last one may reach into the next epoch."""
    return -(-epochs * num_prompts // prompts_per_step)


@lru_cache(maxsize=16)
def _chosen(num_prompts: int, prompts_per_step: int, seed: int, step: int, shuffle: bool) -> tuple[int, ...]:
    """Every ticket of a step asks for the same list."""
    first = step * prompts_per_step
    chosen = []
    for position in range(first, first + prompts_per_step):
        epoch, place = divmod(position, num_prompts)
        chosen.append(_permutation(num_prompts, seed, epoch)[place] if shuffle else place)
    return tuple(chosen)


@lru_cache(maxsize=4)
def _permutation(num_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    named = derive(seed, "prompts", epoch)
    # RandomState, because its stream is frozen across numpy versions; Generator's is not.
    source = np.random.RandomState([named & 0xFFFFFFFF, named >> 32])
    return tuple(int(index) for index in source.permutation(num_prompts))
