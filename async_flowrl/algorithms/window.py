"""Which denoising steps get noise and which are trained: a pure function of (configuration, seed, step, group)."""

from collections.abc import Sequence
from dataclasses import dataclass

from async_flowrl.config import AlgorithmConfig
from async_flowrl.naming import unknown_name
from async_flowrl.seeds import derive

WINDOWS = ("none", "random", "sliding", "list", "fraction")
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
        return Window((), _subset(range(num_inference_steps), rows_per_image(config, num_inference_steps), source))
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
    places = high - low - size + 1
    offset = (step // config.window_interval) % places if config.window == "sliding" else source % places
    steps = tuple(range(low + offset, low + offset + size))
    return Window(steps, steps)


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


def rows_per_image(config: AlgorithmConfig, num_inference_steps: int) -> int:
    """How many noise levels each final image is trained at: `timestep_fraction` of the schedule, at least one."""
    return max(1, int(num_inference_steps * config.timestep_fraction))


def window_start(train_steps: Sequence[int]) -> int:
    """The index by which statistics of a window are logged."""
    return train_steps[0]


def check_window(config: AlgorithmConfig, num_inference_steps: int) -> None:
    """ValueError where a window cannot be drawn for trajectories of `num_inference_steps` steps."""
    if config.window not in WINDOWS:
        raise ValueError(unknown_name("algorithm.window", config.window, WINDOWS))
    if config.window_per not in ("group", "step"):
        raise ValueError(unknown_name("algorithm.window_per", config.window_per, ("group", "step")))
    if not 0.0 < config.timestep_fraction <= 1.0:
        raise ValueError(f"algorithm.timestep_fraction must be in (0, 1], got {config.timestep_fraction}")
    if num_inference_steps < 2:
        raise ValueError(f"rollout.num_inference_steps must be at least 2, got {num_inference_steps}")
    low, high = step_range(config, num_inference_steps)
    if not 0 <= low < high <= num_inference_steps - 1:
        raise ValueError(
            f"algorithm.sde_window_range must lie in (0, {num_inference_steps - 1}), the steps before the last one, "
            f"got ({low}, {high})"
        )
    if config.window in ("random", "sliding"):
        _check_size(config, high - low)
    if config.window == "sliding" and config.window_interval < 1:
        raise ValueError(f"algorithm.window_interval must be at least 1, got {config.window_interval}")
    if config.window == "list":
        _check_list(config, num_inference_steps)


def _check_size(config: AlgorithmConfig, available: int) -> None:
    if config.sde_window_size is None or not 1 <= config.sde_window_size <= available:
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
