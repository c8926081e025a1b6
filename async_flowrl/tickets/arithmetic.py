"""Arithmetic of a configuration: tickets per step, trained denoising steps, counts that must divide, payload bytes.

Everything here is known before a process starts.
"""

import math

from async_flowrl.algorithms.window import draw_window, trains_on_final_images
from async_flowrl.config.resolution import parse_resolution, pixels
from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Shapes
from async_flowrl.tickets.table import Shape

_FLOAT_BYTES = 4


def shape(config: Config) -> Shape:
    """The arithmetic of tickets, steps and versions for this run."""
    return Shape(
        tickets_per_group=config.group_size // config.images_per_ticket,
        groups_per_step=config.prompts_per_step,
        total_steps=config.total_steps,
        max_staleness=config.max_staleness,
    )


def trained_steps(config: Config) -> int:
    """How many denoising steps of a trajectory are trained; the same for every window that can be drawn."""
    steps = config.rollout.num_inference_steps
    return len(draw_window(config.algorithm, num_inference_steps=steps, seed=config.seed, step=0, group=0).train_steps)


def parts_per_group(config: Config) -> int:
    """Parts that a group whose images all differ is cut into; an own algorithm that selects few images has fewer."""
    selected = 2 if config.algorithm.name == "dpo" else config.group_size
    return -(-selected // config.trainer.micro_batch_size)


def check_batching(config: Config) -> None:
    """Raises ValueError, in one sentence with the nearest valid values, for counts that do not divide."""
    trainer, size = config.trainer, config.group_size
    if trainer.shard == "hybrid":
        if trainer.shard_size is None:
            raise ValueError("trainer.shard=hybrid needs trainer.shard_size, the ranks that hold the base once")
        _divides("trainer.num_workers", trainer.num_workers, "trainer.shard_size", trainer.shard_size)
    if config.algorithm.name == "dpo":
        if trainer.micro_batch_size < 2:
            raise ValueError(
                "dpo keeps both images of a pair in one micro-batch: trainer.micro_batch_size must be at least 2, "
                f"got {trainer.micro_batch_size}"
            )
    else:
        _divides("group_size", size, "trainer.micro_batch_size", trainer.micro_batch_size)
    _divides("prompts_per_step", config.prompts_per_step, "trainer.updates_per_batch", trainer.updates_per_batch)
    steps = trained_steps(config)
    together = trainer.timesteps_per_forward or steps
    _divides("the number of trained steps", steps, "trainer.timesteps_per_forward", together)
    if config.hand_over == "stream" and trainer.updates_per_batch > 1:
        raise ValueError(
            f"hand_over=stream makes one optimizer step per batch, so trainer.updates_per_batch must be 1, "
            f"got {trainer.updates_per_batch}"
        )


def _divides(whole: str, count: int, part: str, size: int) -> None:
    if count % size:
        valid = [d for d in range(1, count + 1) if count % d == 0]
        near = sorted(sorted(valid, key=lambda d: abs(d - size))[:2])
        raise ValueError(f"{part}={size} must divide {whole}={count}; nearest: {' or '.join(map(str, near))}")


def ticket_bytes(config: Config, shapes: Shapes) -> int:
    """Bytes of one ticket in the object store, for a prompt of usual length and images of `rollout.resolution`.

    It holds images, latents at every recorded point, log-probs and the prompt's conditioning.
    """
    steps = trained_steps(config)
    whole = config.algorithm.window in ("none", "random", "sliding")
    recorded, log_probs = (steps + 1 if whole else 2 * steps), steps
    if trains_on_final_images(config.algorithm):
        recorded, log_probs = 1, 0
    colours = 3 * pixels(parse_resolution(config.rollout.resolution))
    image = colours + _FLOAT_BYTES * (recorded * math.prod(shapes.latents) + log_probs)
    text = sum(math.prod(shape) for shape in shapes.conditioning.values())
    return config.images_per_ticket * image + _FLOAT_BYTES * text


def stored_bytes(config: Config, shapes: Shapes, trained: int = 0) -> int:
    """Bytes of max_staleness + 1 steps' tickets: what the object store must hold when the trainer is slow.

    Of several trainer ranks that train so many parameters, also of the state that one hands to a successor of another.
    """
    tickets = config.prompts_per_step * config.group_size // config.images_per_ticket
    return config.live_versions * tickets * ticket_bytes(config, shapes) + peer_bytes(config, trained)


def peer_bytes(config: Config, trained: int) -> int:
    """Bytes that a trainer rank hands to a successor of another, versions as if in float32; 0 where there is none.

    Masters, two moments, versions that may be asked for, one that is kept for an evaluation, and moving averages.
    """
    if config.trainer.num_workers == 1:
        return 0
    vectors = 3 + config.live_versions + 1 + 2 * (config.trainer.ema_decay is not None)
    return _FLOAT_BYTES * vectors * trained
