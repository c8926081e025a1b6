"""The comparison of a model family with diffusers' own ("stock") pipeline: its steps in order, a Row for each.

`job_of` loads the model, `compare` makes the rows. docs/extending/model.md says what each step compares.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.check_model.rows import (
    BATCH,
    CAUSES,
    DECODE,
    EMBEDDINGS,
    IMAGES,
    LATENTS,
    LORA,
    SCHEDULE,
    TOLERANCES,
    VELOCITY,
    Row,
    Tolerance,
    gap,
    row_of,
)
from async_flowrl.check_model.stock import Inputs, Stock, record, watched
from async_flowrl.config.messages import in_one_line
from async_flowrl.config.schema import LoraConfig
from async_flowrl.generate import Settings, open_pipeline
from async_flowrl.policies import lora_file
from async_flowrl.policies.base import Policy
from async_flowrl.policies.checked import in_diffusers, pipeline_class
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family, resolve_model
from async_flowrl.policies.trained_file import apply_lora
from async_flowrl.seeds import derive, generator
from async_flowrl.types import Sampling

T = TypeVar("T")
Branch = Mapping[str, Tensor]
"""Text inputs of the network for one prompt, by name."""
LEAST_STEPS = 2
"""Fewest denoising steps; with a single one no step has noise."""
LORA_CONFIG = LoraConfig(rank=4, alpha=10.0)
"""Alpha differs from the rank, so that a scale lost during export is noticed."""
LORA_STRENGTH = 0.05
EULER = "FlowMatchEulerDiscreteScheduler"


@dataclass(frozen=True)
class Job:
    """One comparison: a model, the policy of its family around the stock pipeline, and the sampling settings."""

    model: ResolvedModel
    policy: Policy
    pipeline: Any
    settings: Settings
    prompt: str
    device: torch.device

    @property
    def allowed(self) -> Tolerance:
        return TOLERANCES[self.model.dtype]

    @property
    def sampling(self) -> Sampling:
        return self.settings.sampling

    @property
    def pipeline_name(self) -> str:
        return type(self.pipeline).__name__

    def start(self) -> Tensor:
        """Returns the initial noise [IMAGES, ...] float32."""
        shape = self.policy.latent_shape(self.sampling.resolution)
        drawn = [torch.randn(shape, generator=generator(derive(0, "initial", image))) for image in range(IMAGES)]
        return torch.stack(drawn).to(self.device)


def job_of(settings: Settings, prompt: str, device: str) -> Job:
    """Loads the model. Raises ValueError with one sentence if the family or the settings cannot be compared."""
    if settings.sampling.num_inference_steps < LEAST_STEPS:
        raise ValueError(f"--steps must be at least {LEAST_STEPS}, got {settings.sampling.num_inference_steps}")
    model = resolve_model(settings.model)
    family = load_family(model.family)
    settings = replace(settings, model=replace(settings.model, family=model.family, dtype=model.dtype))
    if not in_diffusers(name := pipeline_class(model.path, model.revision)):
        raise ValueError(f"diffusers has no {name}: there is no stock pipeline to compare {model.family} with")
    if not hasattr(family, "around"):
        raise ValueError(f"{model.family} has no around(pipeline, dtype, max_sequence_length), which tools compare")
    pipeline = open_pipeline(settings, device)
    try:
        policy = family.around(pipeline, DTYPES[model.dtype], max_sequence_length=model.max_sequence_length)
        policy.check(settings.sampling)
        policy.latent_shape(settings.sampling.resolution)
    except ValueError:
        raise
    except Exception as error:  # a family may raise anything for a pipeline of another kind
        raise ValueError(f"{model.family} cannot be put around a {name}: {in_one_line(error)}") from error
    return Job(model, policy, pipeline, settings, prompt, torch.device(device))


def compare(job: Job) -> list[Row]:
    """Makes the rows of all steps, in order. A step that raises an error counts as different.

    Afterwards the pipeline holds the LoRA of the step "LoRA round trip".
    """
    with torch.no_grad():
        stock = _tried("stock call", lambda: record(job.pipeline, job.settings, job.prompt, job.start()))
        if isinstance(stock, Row):
            return [replace(stock, said=f"{stock.said}; are guidance_arguments those of {job.pipeline_name}?")]
        branches = _tried(EMBEDDINGS, lambda: _encoded(job))
        if isinstance(branches, Row):
            return [branches]
        return [_tried(step, make) for step, make in _steps(job, stock, branches)]


def _steps(job: Job, stock: Stock, branches: Sequence[Branch]) -> Iterator[tuple[str, Callable[[], Row]]]:
    relative, sampling, policy = job.allowed.relative, job.sampling, job.policy
    positive, negative = branches[0], branches[1] if len(branches) > 1 else None

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(x, sigma.to(x.device).expand(len(x)), positive, negative, sampling)

    def denoised() -> list[Tensor]:
        """Returns the latents after every step of deterministic sampling with the family's schedule."""
        x, latents = job.start(), []
        for sigma, after in pairwise(policy.sigmas(sampling.num_inference_steps, sampling.resolution)):
            now, then = (each.to(x.device).expand(len(x)) for each in (sigma, after))
            x = sde.ode_step(x, velocity(x, now[:1]), now, then)
            latents.append(x)
        return latents

    def in_one_batch() -> tuple[Tensor, Tensor]:
        """Returns the velocities of all steps computed at once, and those of one step after the other."""
        count, steps = len(stock.before[0]), list(zip(stock.before, stock.sigmas, strict=False))
        sigmas = stock.sigmas[: len(steps)].repeat_interleave(count).to(job.device)
        at_once = policy.velocity(torch.cat(stock.before), sigmas, positive, negative, sampling)
        return at_once, torch.cat([velocity(x, sigma) for x, sigma in steps])

    yield EMBEDDINGS, lambda: _embeddings(job, stock, branches)
    yield SCHEDULE, lambda: _schedule(job, stock)
    made = zip(stock.before, stock.sigmas, stock.velocities, strict=False)
    yield VELOCITY, lambda: row_of(VELOCITY, ((velocity(x, sigma), v) for x, sigma, v in made), relative=relative)
    yield LATENTS, lambda: row_of(LATENTS, zip(denoised(), stock.after, strict=True), relative=relative)
    images = torch.from_numpy(stock.images)
    resolution = sampling.resolution
    yield (
        DECODE,
        lambda: row_of(
            DECODE, [(policy.decode(stock.after[-1], resolution).cpu(), images)], absolute=job.allowed.levels
        ),
    )
    yield BATCH, lambda: row_of(BATCH, [in_one_batch()], relative=relative)

    def round_trip() -> Row:
        bare = denoised()[-1]
        _adapt(policy)
        adapted = denoised()[-1]
        if gap(adapted, bare)[1] <= relative:
            return Row(LORA, False, said="the adapter changes nothing: is it on a branch whose output is dropped?")
        _move_to_pipeline(policy, job.pipeline)
        theirs = record(job.pipeline, job.settings, job.prompt, job.start()).after[-1]
        return row_of(LORA, [(adapted, theirs)], relative=relative)

    yield LORA, round_trip


def _tried(step: str, make: Callable[[], T]) -> T | Row:
    """Returns what `make` returns, or a row with the error it raised, because a family's code may raise anything."""
    try:
        return make()
    except Exception as error:
        return Row(step, False, said=in_one_line(error))


def _encoded(job: Job) -> list[Branch]:
    """Returns the text inputs for the prompt, and with guidance for the negative prompt, by the family's own code."""
    encoded = list(job.policy.encode([job.prompt]))
    if job.sampling.true_cfg_scale > 1:
        encoded += job.policy.encode([job.sampling.negative_prompt], negative=True)
    return [{name: torch.as_tensor(value).to(job.device) for name, value in each.items()} for each in encoded]


def _schedule(job: Job, stock: Stock) -> Row:
    """Compares the family's sigmas (noise levels) with those of the scheduler in the stock call."""
    ours = job.policy.sigmas(job.sampling.num_inference_steps, job.sampling.resolution)
    row = row_of(SCHEDULE, zip(ours[:, None], stock.sigmas[:, None], strict=False), absolute=job.allowed.relative)
    if ours.shape != stock.sigmas.shape:
        row = Row(SCHEDULE, False, said=f"the family has {len(ours)} sigmas, the stock pipeline {len(stock.sigmas)}")
    kind = type(job.pipeline.scheduler).__name__
    if row.holds or kind == EULER:
        return row
    return replace(row, said=f"{row.said}; the stock pipeline steps with {kind}, a run steps as {EULER} does")


def _embeddings(job: Job, stock: Stock, branches: Sequence[Branch]) -> Row:
    """Compares the tensors that the network gets for each prompt, except latents and noise level.

    Without guidance, the prompt is not padded to the length of the negative one. Raises ValueError if `velocity` does
    not call `policy.transformer`.
    """
    policy, x, rows = job.policy, stock.before[0][:1], []
    for branch in branches:
        with watched(policy.transformer) as calls:
            policy.velocity(x, stock.sigmas[:1].to(x.device), branch, None, replace(job.sampling, true_cfg_scale=1.0))
        if not calls:
            raise ValueError("velocity() does not call policy.transformer, the only network that is trained")
        names = sorted(name for name in {*calls[0], *stock.network[0]} if not _is_latents_or_time(name))
        rows += [_input(name, calls[0].get(name), stock.network, job.allowed.relative) for name in names]
    return min(rows, key=lambda row: (row.holds, -(row.difference or 0.0)))


def _input(name: str, given: Any, network: Sequence[Inputs], relative: float) -> Row:
    """Compares an argument of the network with the nearest row of the stock pipeline's.

    Only tensors are compared. A tensor of ones that only one side gives equals none: a mask that masks nothing.
    """
    mine, others = list(_tensors(given)), [tensor for call in network for tensor in _tensors(call.get(name))]
    if not mine or not others:
        lonely = [tensor for tensor in (*mine, *others) if not bool((tensor == 1).all())]
        whose = "family" if mine else "stock pipeline"
        return Row(
            EMBEDDINGS, not lonely, 0.0, 0.0, f"only the {whose} gives {name} to the network: {CAUSES[EMBEDDINGS]}"
        )
    ours = mine[0]
    candidates = [each for other in others for each in (other, *(row[None] for row in other)) if each.dim()]
    fitting = [other for other in (*others, *candidates) if other.shape == ours.shape]
    nearest = min(fitting, key=lambda other: gap(ours, other)[0], default=others[0])
    row = row_of(EMBEDDINGS, [(ours, nearest)], relative=relative)
    return row if row.holds else replace(row, said=f"{name} differs {row.said}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().float() if not value.is_complex() else torch.view_as_real(value.detach())
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _is_latents_or_time(name: str) -> bool:
    return name in ("hidden_states", "x", "sample", "latents", "t", "sigma", "sigmas") or "timestep" in name


def _adapt(policy: Policy) -> None:
    """Adds a LoRA with random weights to the policy's network, so that it changes the output."""
    add_lora(policy.transformer, LORA_CONFIG, policy, seed=0)
    with torch.no_grad():
        for name, parameter in lora_parameters(policy.transformer).items():
            if ".lora_B." in name:
                drawn = torch.randn(parameter.shape, generator=generator(derive(1, name)))
                parameter.copy_(LORA_STRENGTH * drawn)


def _move_to_pipeline(policy: Policy, pipeline: Any) -> None:
    """Exports the policy's LoRA to a file and loads that into the pipeline, whose network is the policy's."""
    tensors = {name: parameter.detach().cpu() for name, parameter in lora_parameters(policy.transformer).items()}
    pipeline.unload_lora_weights()
    with tempfile.TemporaryDirectory() as work:
        lora_file.save(Path(work), tensors, alpha=LORA_CONFIG.alpha)
        apply_lora(pipeline, Path(work))
