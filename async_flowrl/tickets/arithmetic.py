"""Numbers that follow from the configuration alone: tickets per step, trained denoising steps, bytes of payloads.

The checks at start-up, the tools `plan` and `doctor`, and the benchmark use them before any worker starts.
"""

import math

from async_flowrl.algorithms.ema import kept_vectors
from async_flowrl.algorithms.window import draw_window, trains_on_final_images
from async_flowrl.config.resolution import pixels, sized
from async_flowrl.config.schema import Config
from async_flowrl.policies.pipeline import IMAGE, Shapes
from async_flowrl.tickets.table import Shape

_FLOAT_BYTES = 4
# Most versions that lie in the object store at the same time in an undisturbed run: the proof weights, which stay for
# workers that join later; the one under way; and one that is evaluated, the moving average (EMA) or a version again.
# Not counted are copies on further nodes, and versions that wait for a worker which takes longer than a step for one,
# or which joins while the run goes on.
SENT_VERSIONS = 3
HELD = 2  # Versions that are kept for evaluations: of one that is under way, and of the next one.


def shape(config: Config) -> Shape:
    """Returns the sizes that the ticket table needs: tickets per group, groups per step, steps, max_staleness."""
    return Shape(
        tickets_per_group=config.group_size // config.images_per_ticket,
        groups_per_step=config.prompts_per_step,
        total_steps=config.total_steps,
        max_staleness=config.max_staleness,
    )


def trained_steps(config: Config) -> int:
    """Returns the number of trained denoising steps per image; every window that can be drawn has as many."""
    steps = config.rollout.num_inference_steps
    return len(draw_window(config.algorithm, num_inference_steps=steps, seed=config.seed, step=0, group=0).train_steps)


def check_batching(config: Config) -> None:
    """Raises ValueError, naming the nearest values that fit, for batch sizes that do not fit together."""
    trainer, size = config.trainer, config.group_size
    if trainer.is_hybrid:
        if trainer.shard_size is None:
            raise ValueError("trainer.shard=hybrid needs trainer.shard_size, the ranks that hold the base once")
        _divides("trainer.num_workers", trainer.num_workers, "trainer.shard_size", trainer.shard_size)
    if config.algorithm.name == "dpo":
        if trainer.micro_batch_size < 2:
            raise ValueError(
                "dpo keeps both images of a pair in one micro-batch: trainer.micro_batch_size must be at least 2, "
                f"got {trainer.micro_batch_size}"
            )
    elif config.algorithm.train_images_per_group is None:  # Otherwise the last part may be smaller.
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
    batch, tickets = config.rollout.tickets_per_batch, shape(config).tickets_per_step
    if batch > tickets:
        raise ValueError(
            f"rollout.tickets_per_batch={batch}, but a step has {tickets} tickets, and a batch never spans two "
            f"steps: set at most {tickets}, or ticket_size smaller"
        )


def _divides(whole: str, count: int, part: str, size: int) -> None:
    if count % size:
        valid = [d for d in range(1, count + 1) if count % d == 0]
        near = sorted(sorted(valid, key=lambda d: abs(d - size))[:2])
        raise ValueError(f"{part}={size} must divide {whole}={count}; nearest: {' or '.join(map(str, near))}")


def ticket_bytes(config: Config, shapes: Shapes) -> int:
    """Returns the bytes of one training ticket's payload in Ray's object store, at `rollout.resolution`.

    It is images (uint8), and as float32 latents at every recorded noise level, log-probs, and the encoded prompt.
    """
    steps = trained_steps(config)
    whole = config.algorithm.window in ("none", "random", "sliding")
    recorded, log_probs = (steps + 1 if whole else 2 * steps), steps
    if trains_on_final_images(config.algorithm):
        recorded, log_probs = 1, 0
    colours = 3 * pixels(sized(config.rollout, config.rollout.resolution))
    image = colours + _FLOAT_BYTES * (recorded * math.prod(shapes.latents) + log_probs)
    text = sum(math.prod(shape) for shape in shapes.conditioning.values())
    if IMAGE.format(0) in shapes.conditioning and config.rollout.true_cfg_scale > 1:
        text *= 2  # Beside the prompt, the negative prompt with its images.
    return config.images_per_ticket * image + _FLOAT_BYTES * text


def stored_bytes(config: Config, shapes: Shapes, trained: int = 0) -> int:
    """Returns the most bytes that lie in the object store at the same time.

    They are the tickets of max_staleness + 1 steps and `state_bytes` of the `trained` parameters (0: not known yet).
    """
    tickets = config.prompts_per_step * config.group_size // config.images_per_ticket
    return config.live_versions * tickets * ticket_bytes(config, shapes) + state_bytes(config, trained)


def state_bytes(config: Config, trained: int) -> int:
    """Returns the bytes of the trainer's state that the controller keeps, 0 for whole weights.

    They are masters, two moments, versions that may be asked for or are held, and moving averages, all in float32.
    """
    if not config.keeps_state:
        return 0
    vectors = 3 + config.live_versions + HELD + kept_vectors(config.algorithm) + (config.trainer.ema_decay is not None)
    return _FLOAT_BYTES * vectors * trained
