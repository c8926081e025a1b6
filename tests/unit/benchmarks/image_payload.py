"""Bytes that one image costs in the object store: a real ticket, beside what it may cost."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.rollout.worker import RolloutWorker
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.table import TRAIN, Ticket

OVERHEAD_BYTES = 4096
WINDOW = ("algorithm.window=random", "algorithm.sde_window_size=2", "rollout.num_inference_steps=10")


@dataclass(frozen=True)
class Payload:
    """Bytes per image: what a ticket's two objects weigh, and (w + 1) latents + embeddings ÷ group + image + 4 KB."""

    stored: float
    allowed: float
    latent: int
    image: int
    embeddings: int


def measure(resolution: int = 512, images: int = 2, overrides: Sequence[str] = WINDOW) -> Payload:
    """Generates one ticket of the tiny model, whose latents and images have the size of Qwen-Image's."""
    torch.set_num_threads(1)
    shape = (f"rollout.resolution={resolution}", f"group_size={images}", f"trainer.micro_batch_size={images}")
    config: Config = compose_config("one_step_off", [*shape, *overrides, "output_dir=nowhere"])
    prepared = prepare(config)
    worker = RolloutWorker(config, prepared.model, 0, "rollout-0")
    worker.load()
    made = worker.engine.generate(prepared.requests.request(Ticket(TRAIN, 0, 0, 0, 0, 0)))
    assert made.trajectory is not None
    # As an object store holds them: one object with the images, one with everything that is trained on.
    stored = len(pickle.dumps(made.images, 5)) + len(pickle.dumps(made.trajectory, 5))
    latent = 4 * int(np.prod(made.trajectory.latents.shape[2:]))
    image = 3 * resolution * resolution
    embeddings = sum(array.nbytes for array in made.trajectory.conditioning.values())
    allowed = (len(made.trajectory.train_steps) + 1) * latent + embeddings / images + image + OVERHEAD_BYTES
    return Payload(stored / images, allowed, latent, image, embeddings)
