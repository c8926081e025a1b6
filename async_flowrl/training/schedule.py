"""The learning rate as a pure function of the number of published batch updates: nothing to save or restore."""

import math

from async_flowrl.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The rate of every optimizer step of batch `step` (counted from 0), after `step` published updates.

    Linear warm-up over the first `warmup_steps` updates (the first is already above zero), then constant, or falling
    linearly or along half a cosine to zero at `total_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return config.learning_rate * max(0.0, 1.0 - done)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
