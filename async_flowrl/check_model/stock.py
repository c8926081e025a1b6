"""Record of one call of diffusers' own ("stock") pipeline: the inputs of its network and its scheduler's steps."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.generate import Settings, run_pipeline
from async_flowrl.types import ByteArray

IMAGES = 2
"""Images per comparison; with a single one, mixed-up rows of a batch would not be seen."""
Inputs = dict[str, Any]
"""Arguments of a call by name."""


@dataclass(frozen=True)
class Stock:
    """One call of the stock pipeline with n images and T denoising steps.

    `sigmas` [T+1] are the scheduler's noise levels. `before`, `velocities` and `after` are the inputs and the output of
    each scheduler step, [n, ...] float32. `network` holds the arguments of every network call before the first step,
    `encoded` those of every call of `encode_prompt`. `images` is uint8 [n, H, W, 3].
    """

    sigmas: Tensor
    before: list[Tensor]
    velocities: list[Tensor]
    after: list[Tensor]
    network: list[Inputs]
    encoded: list[Inputs]
    images: ByteArray


@dataclass
class _Steps:
    sigmas: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    calls: int = 0


def record(pipeline: Any, settings: Settings, prompt: str, latents: Tensor) -> Stock:
    """Calls the pipeline with initial noise `latents` [n, ...] and records the call.

    Raises ValueError if the pipeline does not sample with a scheduler that has sigmas.
    """
    steps = _Steps()
    with (
        watched(pipeline.transformer) as network,
        replaced(pipeline.scheduler, "step", lambda step: _watched_step(step, pipeline.scheduler, steps, network)),
        watched_encoding(pipeline) as encoded,
    ):
        images = run_pipeline(pipeline, settings, prompt, latents=latents, num_images_per_prompt=len(latents))
    if not steps.sigmas:
        raise ValueError(f"{type(pipeline).__name__} does not sample by the steps of a scheduler with sigmas")
    return Stock(
        steps.sigmas[0], steps.before, steps.velocities, steps.after, network[: steps.calls], list(encoded), images
    )


def _watched_step(step: Callable[..., Any], scheduler: Any, steps: _Steps, network: list[Inputs]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watching(model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **options: Any) -> Any:
        given = model_output, timestep, sample
        if not steps.before:
            steps.calls = len(network)
            sigmas = getattr(scheduler, "sigmas", None)
            steps.sigmas += [] if sigmas is None else [torch.as_tensor(sigmas).to("cpu", torch.float32).clone()]
        steps.before.append(sample.detach().float().clone())
        steps.velocities.append(model_output.detach().float().clone())
        result = step(*given, *rest, **options)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        steps.after.append(after.detach().float().clone())
        return result

    return watching


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


@contextmanager
def watched_encoding(pipeline: Any) -> Iterator[list[Inputs]]:
    """Context in which each call of the pipeline's `encode_prompt` appends all its arguments to the yielded list."""
    calls: list[Inputs] = []
    if not hasattr(pipeline, "encode_prompt"):
        yield calls
        return

    def watching(encode: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(encode)

        @functools.wraps(encode)
        def note(*positional: Any, **named: Any) -> Any:
            given = signature.bind_partial(*positional, **named)
            given.apply_defaults()
            calls.append(dict(given.arguments))
            return encode(*positional, **named)

        return note

    with replaced(pipeline, "encode_prompt", watching):
        yield calls


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context in which the method `name` of the object `owner` is `wrap(method)`."""
    object.__setattr__(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        object.__delattr__(owner, name)


def network_name(name: str) -> str:
    """Kind of a transformer's argument by its name: `latents`, `time` or `other`."""
    if name in ("hidden_states", "x", "sample", "latents"):
        return "latents"
    return "time" if "timestep" in name or name in ("t", "sigma", "sigmas") else "other"
