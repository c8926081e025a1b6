"""Windows of noisy and of trained denoising steps: a pure function of (configuration, seed, step, group)."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from async_flowrl.config.algorithm_schema import AlgorithmConfig
from async_flowrl.seeds import derive

FINAL_ALGORITHMS = ("diffusion_nft", "dpo")
"""Built-in algorithms that train on final images: their rollouts are deterministic after the initial noise."""


@dataclass(frozen=True)
class Window:
    """Ascending step indices. `train_steps` is a subset of `noise_steps`, and equal for all images of a group.

    For algorithms that train on final images there is no noise, and `train_steps` are the levels of the schedule to
    which the trainer noises them, one row each.
    """

    noise_steps: tuple[int, ...]
    train_steps: tuple[int, ...]


def trains_on_final_images(config: AlgorithmConfig) -> bool:
    """Known from the configuration alone, so that nothing it names has to be imported."""
    return config.final_images or config.name in FINAL_ALGORITHMS


def draw_window(config: AlgorithmConfig, *, num_inference_steps: int, seed: int, step: int, group: int) -> Window:
    """The window of one group; with `window_per=step` (or `global_std`, whose statistics span groups) of all groups."""
    shared = config.window_per == "step" or config.global_std
    source = derive(seed, "window", step) if shared else derive(seed, "window", step, group)
    if trains_on_final_images(config):
        low, high = level_range(config, num_inference_steps)
        return Window((), _subset(range(low, high), rows_per_image(config, num_inference_steps), source))
    low, high = step_range(config, num_inference_steps)
    if config.window == "none":
        steps = tuple(range(low, high))
        return Window(steps, steps)
    if config.window == "fraction":
        noisy = tuple(range(low, high))
        return Window(noisy, _subset(noisy, trained_steps(config, num_inference_steps), source))
    if config.window == "list":
        steps = _subset(config.window_list or [], trained_steps(config, num_inference_steps), source)
        return Window(steps, steps)
    size = trained_steps(config, num_inference_steps)
    places = range(low, high - size + 1)
    start = _sliding_start(config, places, step) if config.window == "sliding" else places[source % len(places)]
    steps = tuple(range(start, start + size))
    return Window(steps, steps)


def window_interval(config: AlgorithmConfig, start: int, *, low: int, last: int) -> int:
    """Updates for which a sliding window stays at `start`: constant, or one of MixGRPO's decays (arXiv 2507.21802).

    linear: interval (1 - p) + interval_min p, rounded down, p = (start - low) / (last - low) with the first and last
    step that may be noisy; exponential: interval exp(-rate max(0, start - decay_start)), rounded up.
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
    """After the last of its places the window starts again at the first."""
    last = places[-1] + (config.sde_window_size or 1) - 1
    ends = list(accumulate(window_interval(config, start, low=places[0], last=last) for start in places))
    return places[bisect_right(ends, step % ends[-1])]


def _subset(steps: Sequence[int], size: int, source: int) -> tuple[int, ...]:
    """`size` of the steps, drawn without replacement, ascending. Hash order: the same on every Python version."""
    return tuple(sorted(sorted(steps, key=lambda index: derive(source, index))[:size]))


def step_range(config: AlgorithmConfig, num_inference_steps: int) -> tuple[int, int]:
    """Half-open range of the steps that may get noise. Never the last one: its noise would stay in the image."""
    return config.sde_window_range or (0, num_inference_steps - 1)


def possible_steps(config: AlgorithmConfig, num_inference_steps: int) -> list[int]:
    """Every step that some window may train as a noisy one; none for algorithms that train on final images."""
    if trains_on_final_images(config):
        return []
    if config.window == "list":
        return sorted(config.window_list or [])
    return list(range(*step_range(config, num_inference_steps)))


def trained_steps(config: AlgorithmConfig, num_inference_steps: int) -> int:
    """How many steps of each trajectory are trained (transition algorithms)."""
    low, high = step_range(config, num_inference_steps)
    if config.window == "none":
        return high - low
    if config.window == "fraction":
        return max(1, int((high - low) * config.timestep_fraction))
    if config.window == "list":
        return config.sde_window_size or len(config.window_list or [])
    return config.sde_window_size or 0


def level_range(config: AlgorithmConfig, num_inference_steps: int) -> tuple[int, int]:
    """Half-open range of the schedule's noise levels at which final images may be trained."""
    return config.timestep_range or (0, num_inference_steps)


def rows_per_image(config: AlgorithmConfig, num_inference_steps: int) -> int:
    """How many noise levels each final image is trained at: `timestep_fraction` of the range, at least one."""
    low, high = level_range(config, num_inference_steps)
    return max(1, int((high - low) * config.timestep_fraction))


def check_levels(config: AlgorithmConfig, num_inference_steps: int) -> None:
    """ValueError where `timestep_range` does not suit a schedule of `num_inference_steps` levels, or has no meaning."""
    if config.timestep_range is None:
        return
    if not trains_on_final_images(config):
        raise ValueError(
            f"algorithm.timestep_range chooses the noise levels of final images, and {config.name} trains on recorded "
            "steps: set algorithm.timestep_range=null and algorithm.sde_window_range instead"
        )
    low, high = config.timestep_range
    if not 0 <= low < high <= num_inference_steps:
        raise ValueError(
            f"algorithm.timestep_range must lie in (0, {num_inference_steps}), the noise levels of "
            f"rollout.num_inference_steps={num_inference_steps}, got ({low}, {high})"
        )


def window_start(train_steps: Sequence[int]) -> int:
    """The index by which statistics of a window are logged."""
    return train_steps[0]


def check_window(config: AlgorithmConfig, num_inference_steps: int) -> None:
    """ValueError where a window cannot be drawn for trajectories of `num_inference_steps` steps."""
    low, high = step_range(config, num_inference_steps)
    if not 0 <= low < high <= num_inference_steps - 1:
        raise ValueError(
            f"algorithm.sde_window_range must lie in (0, {num_inference_steps - 1}), the steps before the last one, "
            f"got ({low}, {high})"
        )
    if config.window in ("random", "sliding"):
        _check_size(config, high - low)
    if config.window == "sliding" and config.window_interval_min > config.window_interval:
        raise ValueError(
            f"algorithm.window_interval_min must be at most window_interval={config.window_interval}, "
            f"got {config.window_interval_min}"
        )
    if config.window == "list":
        _check_list(config, num_inference_steps)


def _check_size(config: AlgorithmConfig, available: int) -> None:
    if config.sde_window_size is None or config.sde_window_size > available:
        raise ValueError(
            f"algorithm.sde_window_size must be in 1..{available} for window={config.window}, "
            f"got {config.sde_window_size}"
        )


def _check_list(config: AlgorithmConfig, num_inference_steps: int) -> None:
    steps = list(config.window_list or [])
    if not steps or len(set(steps)) != len(steps) or not all(0 <= index < num_inference_steps - 1 for index in steps):
        raise ValueError(
            f"algorithm.window_list must name different steps in 0..{num_inference_steps - 2}, got {config.window_list}"
        )
    if config.sde_window_size is not None:
        _check_size(config, len(steps))
