"""The comparison of a model family with diffusers' own ("stock") pipeline: inputs, steps in order, and result.

command.py calls `job_of` and `compare`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_flowrl.check_model import denoising, embeddings, training
from async_flowrl.check_model.rows import TOLERANCES, Row, Tolerance
from async_flowrl.check_model.stock import IMAGES, Stock, record
from async_flowrl.config.messages import in_one_line
from async_flowrl.generate import Settings, open_pipeline
from async_flowrl.policies.base import Policy, PolicyFamily
from async_flowrl.policies.checked import in_diffusers, pipeline_class
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family, resolve_model
from async_flowrl.seeds import derive, generator

T = TypeVar("T")
STOCK = "stock call"
STEPS = (
    embeddings.STEP,
    denoising.SCHEDULE,
    denoising.VELOCITY,
    denoising.LATENTS,
    denoising.DECODE,
    training.LORA,
    training.REPLAY,
)
"""Names of the compared steps, in order."""
_LEAST_STEPS = 2
"""Fewest denoising steps; with a single one no step has noise."""


@dataclass(frozen=True)
class Job:
    """One comparison: a model, its family, the family's policy around the stock pipeline, and the sampling settings."""

    model: ResolvedModel
    family: PolicyFamily
    policy: Policy
    pipeline: Any
    settings: Settings
    prompt: str
    device: torch.device

    @property
    def allowed(self) -> Tolerance:
        return TOLERANCES[self.model.dtype]

    @property
    def pipeline_name(self) -> str:
        return type(self.pipeline).__name__


def job_of(settings: Settings, prompt: str, device: str) -> Job:
    """Loads the model. Raises ValueError with one sentence if the family or the settings cannot be compared."""
    if settings.sampling.num_inference_steps < _LEAST_STEPS:
        raise ValueError(f"--steps must be at least {_LEAST_STEPS}, got {settings.sampling.num_inference_steps}")
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
    return Job(model, family, policy, pipeline, settings, prompt, torch.device(device))


def compare(job: Job) -> list[Row]:
    """Makes the rows of all steps, in order. A step that raises an error counts as different.

    Steps are left out if they need the result of a failed one. Afterwards the pipeline holds the LoRA of the step "LoRA
    round trip".
    """
    start = _start(job)
    rows: list[Row] = []
    with torch.no_grad():
        stock = _tried(STOCK, lambda: record(job.pipeline, job.settings, job.prompt, start))
        if isinstance(stock, Row):
            return [replace(stock, said=f"{stock.said}; are guidance_arguments those of {job.pipeline_name}?")]
        branches = _tried(
            embeddings.STEP,
            lambda: embeddings.encode(job.policy, job.pipeline, job.prompt, job.settings.sampling, job.device),
        )
        if isinstance(branches, Row):
            return [branches]
        for step, make in _steps(job, stock, branches, start):
            row = _tried(step, make)
            if row is not None:
                rows.append(row)
    return rows


def _steps(
    job: Job, stock: Stock, branches: embeddings.Branches, start: Tensor
) -> Iterator[tuple[str, Callable[[], Row | None]]]:
    policy, sampling, allowed = job.policy, job.settings.sampling, job.allowed
    unguided = replace(sampling, true_cfg_scale=1.0)
    yield embeddings.STEP, lambda: embeddings.compare_embeddings(policy, branches, stock, unguided, allowed)
    scheduler = job.pipeline.scheduler
    yield denoising.SCHEDULE, lambda: denoising.compare_schedule(policy, stock, sampling, scheduler, allowed)
    yield denoising.VELOCITY, lambda: denoising.compare_velocity(policy, branches, stock, sampling, allowed)
    yield (
        denoising.LATENTS,
        lambda: denoising.compare_latents(
            denoising.denoised(policy, branches, start, sampling), stock, scheduler, allowed
        ),
    )
    yield denoising.DECODE, lambda: denoising.compare_images(policy, stock, sampling.resolution, allowed)
    replayed: list[Row] = []

    def round_trip() -> Row:
        training.adapt(policy)
        replayed.append(_replay(job, branches))
        return training.compare_lora(policy, job.pipeline, branches, job.settings, job.prompt, start, allowed)

    yield training.LORA, round_trip
    yield training.REPLAY, lambda: replayed[0] if replayed else None


def _replay(job: Job, branches: embeddings.Branches) -> Row:
    """Compares log-probabilities while the LoRA is active and with gradients enabled, as in training."""
    with torch.enable_grad():
        return _tried(
            training.REPLAY,
            lambda: training.compare_replay(job.policy, branches, job.settings.sampling, job.prompt, job.allowed),
        )


def _tried(step: str, make: Callable[[], T]) -> T | Row:
    """Returns what `make` returns, or a row with the error it raised, because a family's code may raise anything."""
    try:
        return make()
    except Exception as error:
        return Row(step, False, said=in_one_line(error))


def _start(job: Job) -> Tensor:
    """Initial noise [n, ...] float32."""
    shape = job.policy.latent_shape(job.settings.sampling.resolution)
    drawn = [torch.randn(shape, generator=generator(derive(0, "initial", image))) for image in range(IMAGES)]
    return torch.stack(drawn).to(job.device)
