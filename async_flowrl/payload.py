"""How many bytes a ticket brings to the object store: known from shapes, before anything is generated."""

import math

from async_flowrl.algorithms.window import trains_on_final_images
from async_flowrl.config import Config
from async_flowrl.policies.base import Shapes
from async_flowrl.recipe import ticket_size
from async_flowrl.training.batch import trained_steps

_FLOAT = 4


def ticket_bytes(config: Config, shapes: Shapes) -> int:
    """Images, latents at every recorded point, log-probs and the conditioning of a prompt of usual length."""
    steps = trained_steps(config)
    whole = config.algorithm.window in ("none", "random", "sliding")
    recorded, log_probs = (steps + 1 if whole else 2 * steps), steps
    if trains_on_final_images(config.algorithm):
        recorded, log_probs = 1, 0
    image = 3 * config.rollout.resolution**2 + _FLOAT * (recorded * math.prod(shapes.latents) + log_probs)
    text = sum(math.prod(shape) for shape in shapes.conditioning.values())
    return ticket_size(config) * image + _FLOAT * text


def stored_bytes(config: Config, shapes: Shapes) -> int:
    """Tickets of max_staleness + 1 steps: what the object store must hold when the trainer is slow."""
    tickets = config.prompts_per_step * config.group_size // ticket_size(config)
    return (config.max_staleness + 1) * tickets * ticket_bytes(config, shapes)
