"""The window: which denoising steps of a group add noise, and which are trained.

The request builder draws the window of each group; it depends only on the configuration, seed, step and group. The
checks of the settings are here, too.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from async_flowrl.config.schema import AlgorithmConfig
from async_flowrl.seeds import derive

# Built-in algorithms that train on final images; their denoising steps add no noise.
FINAL_ALGORITHMS = ("diffusion_nft", "dpo", "awm", "vgrpo", "dgpo", "crd", "direct_align")


class Window(NamedTuple):
    """The window of one group, the same for all its images; indices of denoising steps, ascending.

    `train_steps` are a subset of `noise_steps`, those that add noise. For algorithms that train on final images there
    are none of these, and `train_steps` are the noise levels to which the trainer noises each final image.
    """

    noise_steps: tuple[int, ...]
    train_steps: tuple[int, ...]


def trains_on_final_images(config: AlgorithmConfig) -> bool:
    return config.final_images or config.name in FINAL_ALGORITHMS


def draw_window(config: AlgorithmConfig, *, num_inference_steps: int, seed: int, step: int, group: int) -> Window:
    """Returns a group's window; with `window_per=step` or `global_std`, that of all groups of a training step."""
    shared = config.window_per == "step" or config.global_std
    source = derive(seed, "window", step) if shared else derive(seed, "window", step, group)
    if trains_on_final_images(config):
        low, high = level_range(config, num_inference_steps)
        size = rows_per_image(config, num_inference_steps)
        draw = _stratified if config.timestep_stratified else _subset
        return Window((), draw(range(low, high), size, source))
    low, high = step_range(config, num_inference_steps)
    size = trained_steps(config, num_inference_steps)
    if config.window in ("none", "fraction"):
        noisy = tuple(range(low, high))
        return Window(noisy, _subset(noisy, size, source))
    if config.window == "list":
        steps = _subset(config.window_list or [], size, source)
        return Window(steps, steps)
    places = range(low, high - size + 1)
    start = _sliding_start(config, places, step) if config.window == "sliding" else places[source % len(places)]
    steps = tuple(range(start, start + size))
    return Window(steps, steps)


def window_interval(config: AlgorithmConfig, start: int, *, low: int, last: int) -> int:
    """Returns the number of training steps for which a sliding window starts at denoising step `start`.

    It follows `window_decay`; the decays are those of MixGRPO (arXiv 2507.21802). `low` and `last` are the first and
    last denoising step that may be noisy. none: interval. linear: interval · (1 - p) + interval_min · p, rounded down,
    with p = (start - low) / (last - low). exponential: interval · exp(-rate · max(0, start - decay_start)), rounded up.
    """
    longest, least = config.window_interval, config.window_interval_min
    if config.window_decay == "linear":
        share = (start - low) / max(1, last - low)
        return max(least, int(longest * (1.0 - share) + least * share))
    if config.window_decay == "exponential":
        beyond = max(0, start - config.window_decay_start)
        return max(1, math.ceil(longest * math.exp(-config.window_decay_rate * beyond)))
    return longest


def _sliding_start(config: AlgorithmConfig, places: range, step: int) -> int:
    """Returns the first step of the sliding window at training step `step`; after its last place comes the first."""
    last = places[-1] + (config.sde_window_size or 1) - 1
    ends = list(accumulate(window_interval(config, start, low=places[0], last=last) for start in places))
    return places[bisect_right(ends, step % ends[-1])]


def _subset(steps: Sequence[int], size: int, source: int) -> tuple[int, ...]:
    """Draws `size` steps without replacement, ascending. Sorting by hashes gives the same on every Python version."""
    return tuple(sorted(sorted(steps, key=lambda index: derive(source, index))[:size]))


def _stratified(steps: Sequence[int], size: int, source: int) -> tuple[int, ...]:
    """Cuts `steps` into `size` parts as equal as can be and draws one step of each."""
    ends = [len(steps) * part // size for part in range(size + 1)]
    return tuple(steps[low + derive(source, low) % (high - low)] for low, high in pairwise(ends))


def step_range(config: AlgorithmConfig, num_inference_steps: int) -> tuple[int, int]:
    """Returns the half-open range of steps that may add noise; that of the last one would stay in the image."""
    low, high = config.sde_window_range or (0, num_inference_steps - 1)
    return low, min(high, num_inference_steps - 1)


def possible_steps(config: AlgorithmConfig, num_inference_steps: int) -> list[int]:
    """Returns all steps that a window may contain; [] for algorithms that train on final images."""
    if trains_on_final_images(config):
        return []
    if config.window == "list":
        return sorted(config.window_list or [])
    return list(range(*step_range(config, num_inference_steps)))


def trained_steps(config: AlgorithmConfig, num_inference_steps: int) -> int:
    """Returns the number of trained denoising steps per image, for algorithms that train on noisy steps."""
    low, high = step_range(config, num_inference_steps)
    if config.window == "none":
        return high - low
    if config.window == "fraction":
        return max(1, int((high - low) * config.timestep_fraction))
    return config.sde_window_size or len(config.window_list or [])


def level_range(config: AlgorithmConfig, num_inference_steps: int) -> tuple[int, int]:
    """Returns the half-open range of noise levels, by index, at which final images may be trained."""
    low, high = config.timestep_range or (0, num_inference_steps)
    return low, min(high, num_inference_steps)


def rows_per_image(config: AlgorithmConfig, num_inference_steps: int) -> int:
    """Returns the number of noise levels at which each final image is trained: `timestep_fraction` of them, or one."""
    low, high = level_range(config, num_inference_steps)
    return max(1, int((high - low) * config.timestep_fraction))


def check_levels(config: AlgorithmConfig, num_inference_steps: int) -> None:
    """Raises ValueError if `timestep_range` is outside the schedule, or set for an algorithm that does not use it."""
    if config.timestep_range is None:
        return
    if not trains_on_final_images(config):
        hint = "set algorithm.timestep_range=null and algorithm.sde_window_range"
        raise ValueError(f"algorithm.timestep_range is for final images, {config.name} trains on noisy steps: {hint}")
    low, high = level_range(config, num_inference_steps)
    if not 0 <= low < high:
        raise ValueError(
            f"algorithm.timestep_range must have some of (0, {num_inference_steps}), the noise levels of "
            f"rollout.num_inference_steps={num_inference_steps}, got {tuple(config.timestep_range)}"
        )


def check_window(config: AlgorithmConfig, num_inference_steps: int) -> None:
    """Raises ValueError if the window's settings do not suit `num_inference_steps` denoising steps."""
    low, high = step_range(config, num_inference_steps)
    if not 0 <= low < high:
        raise ValueError(
            f"algorithm.sde_window_range must have some of (0, {num_inference_steps - 1}), the steps before the last "
            f"one, got {tuple(config.sde_window_range or (low, high))}"
        )
    if config.window in ("random", "sliding"):
        span = list(config.sde_window_range or ()) or "null"
        bounds = f"algorithm.sde_window_range={span} and rollout.num_inference_steps={num_inference_steps}"
        _check_size(config, high - low, bounds)
    if config.window == "sliding" and config.window_interval_min > config.window_interval:
        bound = f"window_interval={config.window_interval}"
        raise ValueError(f"algorithm.window_interval_min must be at most {bound}, got {config.window_interval_min}")
    if config.window == "list":
        _check_list(config, num_inference_steps)


def _check_size(config: AlgorithmConfig, available: int, bounds: str) -> None:
    if config.sde_window_size is None or config.sde_window_size > available:
        bound = f"in 1..{available} for window={config.window} with {bounds}"
        raise ValueError(f"algorithm.sde_window_size must be {bound}, got {config.sde_window_size}")


def _check_list(config: AlgorithmConfig, num_inference_steps: int) -> None:
    steps = list(config.window_list or [])
    if not steps or len(set(steps)) != len(steps) or not all(0 <= index < num_inference_steps - 1 for index in steps):
        last = num_inference_steps - 2
        raise ValueError(f"algorithm.window_list must name different steps in 0..{last}, got {config.window_list}")
    if config.sde_window_size is not None:
        _check_size(config, len(steps), f"algorithm.window_list={steps}")
