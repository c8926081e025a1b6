"""Record of one call of diffusers' own ("stock") pipeline: the inputs of its network and its scheduler's steps."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_flowrl.generate import Settings, run_pipeline
from async_flowrl.types import ByteArray

Inputs = dict[str, Any]
"""Arguments of a call by name."""


@dataclass
class Stock:
    """One call of the stock pipeline with n images and T denoising steps.

    `sigmas` [T+1] are the scheduler's noise levels. `before`, `velocities` and `after` are the inputs and the output of
    each scheduler step, [n, ...] float32. `network` holds the arguments of every network call before the first step.
    `images` is uint8 [n, H, W, 3].
    """

    sigmas: Tensor = field(default_factory=Tensor)
    before: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    network: list[Inputs] = field(default_factory=list)
    images: ByteArray = field(default_factory=lambda: np.empty(0, np.uint8))


def record(pipeline: Any, settings: Settings, prompt: str, latents: Tensor) -> Stock:
    """Calls the pipeline with initial noise `latents` [n, ...] and records the call.

    Raises ValueError if the pipeline does not sample with a scheduler that has sigmas.
    """
    stock, scheduler = Stock(), pipeline.scheduler
    step = scheduler.step

    @functools.wraps(step)
    def watching(model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **options: Any) -> Any:
        if not stock.before and getattr(scheduler, "sigmas", None) is not None:
            stock.sigmas = torch.as_tensor(scheduler.sigmas).to("cpu", torch.float32).clone()
            stock.network = list(network)
        stock.before.append(sample.detach().float().clone())
        stock.velocities.append(model_output.detach().float().clone())
        result = step(model_output, timestep, sample, *rest, **options)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        stock.after.append(after.detach().float().clone())
        return result

    scheduler.step = watching
    try:
        with watched(pipeline.transformer) as network:
            stock.images = run_pipeline(pipeline, settings, prompt, latents=latents, num_images_per_prompt=len(latents))
    finally:
        del scheduler.step
    if not stock.sigmas.numel():
        raise ValueError(f"{type(pipeline).__name__} does not sample by the steps of a scheduler with sigmas")
    return stock


@contextmanager
def watched(network: nn.Module) -> Iterator[list[Inputs]]:
    """Context in which every call of the network appends its arguments to the yielded list."""
    calls: list[Inputs] = []
    signature = inspect.signature(cast("Any", network).forward)

    def note(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(dict(signature.bind_partial(*positional, **named).arguments))

    handle = network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
