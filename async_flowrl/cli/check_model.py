"""The comparison of a model family with diffusers' own ("stock") pipeline: its steps in order, a Row for each."""

import argparse
import functools
import inspect
import logging
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from async_flowrl.algorithms import sde
from async_flowrl.cli.generate import open_pipeline, run_pipeline, to_edit
from async_flowrl.config import exit_codes
from async_flowrl.config.check import guidance_refusal
from async_flowrl.config.error_text import in_one_line
from async_flowrl.config.own_code import absolute
from async_flowrl.config.resolution import in_pixels, resolution_option
from async_flowrl.config.schema import LoraConfig, ModelConfig, TinyConfig
from async_flowrl.data.condition_images import examined, written
from async_flowrl.observability.terminal import refuse
from async_flowrl.policies import lora_file
from async_flowrl.policies.checked import in_diffusers, pipeline_class, write_stamp
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy, with_euler_steps
from async_flowrl.policies.registry import DTYPES, PromptCheck, ResolvedModel, load_family, resolve_model
from async_flowrl.policies.trained_file import apply_lora
from async_flowrl.rollout.text_encoder import encode_one
from async_flowrl.seeds import derive, generator
from async_flowrl.tickets.request import asked_of
from async_flowrl.types import ByteArray, ConditionImage, Prompt, Sampling
from separation.text_table import format_table

logger = logging.getLogger(__name__)
T = TypeVar("T")
Branch = Mapping[str, Tensor]  # Text inputs of the network for one prompt, by name.
LEAST_STEPS = 2  # Fewest denoising steps; with a single one no step has noise.
# Alpha differs from the rank, so that a scale lost during export is noticed.
LORA_CONFIG = LoraConfig(rank=4, alpha=10.0)
LORA_STRENGTH = 0.05
Inputs = dict[str, Any]  # Arguments of a call by name.
# Arguments of networks that are no text inputs; also those with `timestep` in their name.
LATENTS_OR_TIME = {"hidden_states", "x", "sample", "latents", "t", "sigma", "sigmas"}
EMBEDDINGS, SCHEDULE, VELOCITY, LATENTS = "prompt embeddings", "schedule", "velocity", "ODE latents"
DECODE, BATCH, LORA = "decoded images", "noise levels in one batch", "LoRA round trip"
# Name of a step, in order → the usual cause of a difference.
CAUSES = {
    EMBEDDINGS: "the stock pipeline may add an instruction or a template, pad to another length, or give a mask",
    SCHEDULE: "_set_schedule spaces or shifts otherwise than its __call__ does",
    VELOCITY: "_network or _guide is not what the stock pipeline does: the sign, the unit of time, or guidance",
    LATENTS: "the stock pipeline may step with another scheduler than FlowMatchEulerDiscreteScheduler",
    DECODE: "_decoded or _unpacked scales, shifts or unpacks the latents otherwise than its __call__",
    BATCH: "rows at different noise levels in one batch, as the trainer has them, give other velocities than alone",
    LORA: "layers that the stock pipeline does not adapt, or another scale",
}
IMAGES = 2  # Images per comparison; with a single one, mixed-up rows of a batch would not be seen.
# Dtype of the model → the largest difference that rounding may explain, relative to the largest stock value.
RELATIVE = {"float32": 1e-4, "bfloat16": 1e-1}
LEVELS = {"float32": 1, "bfloat16": 4}  # Dtype of the model → the same for decoded images, in levels of 0..255.


@dataclass(frozen=True)
class Row:
    """Result of one step: the largest difference, absolute and relative to the largest stock value, or NaN."""

    step: str
    holds: bool
    difference: float = math.nan
    relative: float = math.nan
    text: str = ""


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


@dataclass(frozen=True)
class Job:
    """One comparison: a model, the policy of its family around the stock pipeline, and the sampling settings."""

    model: ResolvedModel
    policy: PipelinePolicy
    pipeline: Any
    config: ModelConfig
    sampling: Sampling
    prompt: str
    device: torch.device
    images: tuple[ConditionImage, ...] = ()  # Those that the prompt edits.
    replaced: str | None = None  # The model's own scheduler, if it is a solver in whose place there are Euler steps.

    @property
    def pipeline_name(self) -> str:
        return type(self.pipeline).__name__

    @property
    def how(self) -> str:
        how = self.sampling
        scale = how.guidance_scale or how.true_cfg_scale
        return (
            f"{how.num_inference_steps} steps at {in_pixels(how.resolution)}, guidance {scale:g}, {self.model.dtype} "
            f"on {self.device.type}{f', Euler steps in place of {self.replaced}' if self.replaced else ''}"
        )

    def start(self) -> Tensor:
        shape = self.policy.latent_shape(self.sampling.resolution)
        drawn = [torch.randn(shape, generator=generator(derive(0, "initial", image))) for image in range(IMAGES)]
        return torch.stack(drawn).to(self.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and the first step that differs; returns 0 (all agree), 1 or 2 (nothing to compare)."""
    # After agreement it records that the family was checked, so that runs no longer warn.
    command_line = argparse.ArgumentParser(
        prog="async-flowrl check-model",
        description="Compares a model family with diffusers' own pipeline and names the first step that differs.",
    )
    option = command_line.add_argument
    option("model", metavar="NAME_OR_PATH", help="model.path: tiny, a diffusers folder or a hub name")
    option("--family", default="auto", help="model.family: a name, or pkg.module:attr (default: auto)")
    option("--tiny-family", default=TinyConfig().family, help="model.tiny.family, where the model is tiny")
    option("--prompt", default="a red apple on a wooden table")
    option("--image", action="append", type=Path, default=[], help="to edit (default: a drawn one, for models that do)")
    option("--num-inference-steps", type=int, default=6, help="denoising steps (default 6)")
    option("--guidance", type=float, help="of the kind that the family takes (default: its usual one)")
    option("--resolution", metavar="SIZE", help="512, [FRAMESx]HEIGHTxWIDTH in pixels (default 512; of tiny 32)")
    option("--dtype", choices=("bfloat16", "float32"), default="float32", help="default float32: no rounding")
    option("--max-sequence-length", type=int, help="model.max_sequence_length")
    options = command_line.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        device, images = "cuda" if torch.cuda.is_available() else "cpu", tuple(map(examined, options.image))
        job = job_of(*settings_of(options), options.prompt, device, images)
    except (ValueError, OSError, ImportError) as error:
        return refuse(error)
    family = job.model.family
    sys.stdout.write(f"{family} against diffusers' {job.pipeline_name}: {job.how}\n")
    rows = compare(job)
    sys.stdout.write(f"{table(rows)}\n")
    if first := next((row for row in rows if not row.holds), None):
        sys.stdout.write(f"{first.step} is the first step that differs: {first.text}\n")
        return exit_codes.ERROR
    try:
        write_stamp(family, job.pipeline_name, job.how)
    except OSError as error:
        logger.warning("runs will go on to warn, that it was compared cannot be kept: %s", error)
    sys.stdout.write(f"{family} is {job.pipeline_name}: all {len(rows)} steps agree\n")
    return exit_codes.OK


def settings_of(options: argparse.Namespace) -> tuple[ModelConfig, Sampling]:
    model = ModelConfig(
        path=options.model,
        family=absolute(options.family),
        dtype=options.dtype,
        tiny=TinyConfig(family=absolute(options.tiny_family)),
        max_sequence_length=options.max_sequence_length,
    )
    cfg, embedded = resolve_model(model).usual_guidance
    if options.guidance is not None:
        if refusal := guidance_refusal("--guidance", options.guidance, embedded=embedded > 0):
            raise ValueError(refusal)
        cfg, embedded = (cfg, options.guidance) if embedded > 0 else (options.guidance, embedded)
    resolution = resolution_option(options.resolution or ("32" if options.model == "tiny" else "512"))
    return model, Sampling(
        resolution, options.num_inference_steps, cfg, embedded, "a grey, dull and blurry picture", "ode", 0.0
    )


def table(rows: Sequence[Row]) -> str:
    cells = [(r.step, "yes" if r.holds else "no", *map(_digits, (r.difference, r.relative))) for r in rows]
    return format_table(("step", "equal", "max |difference|", "relative"), cells)


def _digits(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.2g}"


def job_of(
    config: ModelConfig, sampling: Sampling, prompt: str, device: str, images: tuple[ConditionImage, ...] = ()
) -> Job:
    """Loads the model. Raises ValueError if the family or the settings cannot be compared."""
    if sampling.num_inference_steps < LEAST_STEPS:
        raise ValueError(f"--num-inference-steps must be at least {LEAST_STEPS}, got {sampling.num_inference_steps}")
    model = resolve_model(config)
    family = load_family(model.family)
    config = replace(config, family=model.family, dtype=model.dtype)
    if not in_diffusers(name := pipeline_class(model.path, model.revision)):
        raise ValueError(f"diffusers has no {name}: there is no stock pipeline to compare {model.family} with")
    if family.policy.images[0] and not images:
        images = (drawn_image(),)
    PromptCheck(model, targets=False)(Prompt(0, prompt, images=images))
    pipeline = open_pipeline(config, sampling, device)
    stock, pipeline.scheduler = pipeline.scheduler, with_euler_steps(pipeline.scheduler)
    replaced = type(stock).__name__ if pipeline.scheduler is not stock else None
    try:
        policy = family.around(pipeline, DTYPES[model.dtype], max_sequence_length=model.max_sequence_length)
        policy.check(sampling)
        policy.latent_shape(sampling.resolution)
    except ValueError:
        raise
    except Exception as error:  # a family may raise anything for a pipeline of another kind
        raise ValueError(f"{model.family} cannot be put around a {name}: {where_raised(error)}") from error
    return Job(model, policy, pipeline, config, sampling, prompt, torch.device(device), images, replaced)


def drawn_image() -> ConditionImage:
    """Returns an image of colours that differ in every direction, wider than high."""
    rows, columns = np.mgrid[:96, :160].astype(np.uint8)
    content = BytesIO()
    Image.fromarray(np.stack([2 * rows, columns, rows + columns], axis=-1)).save(content, "PNG")
    return examined(written(content.getvalue()))


def compare(job: Job) -> list[Row]:
    """Makes the rows of all steps, in order; one that raises differs. The pipeline then holds a LoRA."""
    with torch.no_grad():
        stock = _tried("stock call", lambda: record(job))
        if isinstance(stock, Row):
            return [replace(stock, text=f"{stock.text}; are guidance_arguments those of {job.pipeline_name}?")]
        branches = _tried(EMBEDDINGS, lambda: _encoded(job))
        if isinstance(branches, Row):
            return [branches]
        return [_tried(step, make) for step, make in _steps(job, stock, branches).items()]


def _steps(job: Job, stock: Stock, branches: Sequence[Branch]) -> dict[str, Callable[[], Row]]:
    relative, sampling, policy = RELATIVE[job.model.dtype], job.sampling, job.policy
    positive, negative = branches[0], branches[1] if len(branches) > 1 else None

    def sigmas() -> Tensor:
        return policy.sigmas(sampling.num_inference_steps, sampling.resolution)

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(x, sigma.to(x.device).expand(len(x)), positive, negative, sampling)

    def velocities() -> list[Tensor]:
        return [velocity(x, sigma) for x, sigma in zip(stock.before, stock.sigmas, strict=False)]

    def denoised() -> list[Tensor]:
        x, latents = job.start(), []
        for sigma, after in pairwise(sigmas()):
            now, then = (level.to(x.device).expand(len(x)) for level in (sigma, after))
            x = sde.ode_step(x, velocity(x, now[:1]), now, then)
            latents.append(x)
        return latents

    def decoded() -> Row:
        images = policy.decode(stock.after[-1], sampling.resolution).cpu()
        return row_of(DECODE, [(images, torch.from_numpy(stock.images))], absolute=LEVELS[job.model.dtype])

    def in_one_batch() -> Tensor:
        sigmas = stock.sigmas[: len(stock.before)].repeat_interleave(IMAGES).to(job.device)
        return policy.velocity(torch.cat(stock.before), sigmas, positive, negative, sampling)

    def round_trip() -> Row:
        bare = denoised()[-1]
        tensors = _adapted(policy)
        adapted = denoised()[-1]
        if gap(adapted, bare)[1] <= RELATIVE["float32"]:  # Rounding is the same in both: on a dropped branch it is 0.
            return Row(LORA, False, text="the adapter changes nothing: is it on a branch whose output is dropped?")
        job.pipeline.unload_lora_weights()  # Its network is the policy's.
        with tempfile.TemporaryDirectory() as work:
            lora_file.save(Path(work), tensors, alpha=LORA_CONFIG.alpha)
            apply_lora(job.pipeline, Path(work))
        theirs = record(job).after[-1]
        return row_of(LORA, [(adapted, theirs)], relative=relative)

    return {
        EMBEDDINGS: lambda: _embeddings(job, stock, branches),
        SCHEDULE: lambda: row_of(SCHEDULE, [(sigmas(), stock.sigmas)], absolute=relative),
        VELOCITY: lambda: row_of(VELOCITY, zip(velocities(), stock.velocities, strict=False), relative=relative),
        LATENTS: lambda: row_of(LATENTS, zip(denoised(), stock.after, strict=True), relative=relative),
        DECODE: decoded,
        BATCH: lambda: row_of(BATCH, [(in_one_batch(), torch.cat(velocities()))], relative=relative),
        LORA: round_trip,
    }


def _tried(step: str, make: Callable[[], T]) -> T | Row:
    # Returns what `make` returns, or a row with the error it raised, because a family's code may raise anything.
    try:
        return make()
    except Exception as error:
        return Row(step, False, text=where_raised(error))


def where_raised(error: BaseException) -> str:
    """Returns an exception on one line with file and line: the last one that is not of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((candidate for candidate in reversed(frames) if "site-packages" not in candidate.filename), frames[-1])
    return f"{in_one_line(error)} ({frame.filename}:{frame.lineno})"


def _encoded(job: Job) -> list[Branch]:
    prompt = Prompt(0, job.prompt, images=job.images)
    encoded = [encode_one(job.policy, key) for key in asked_of(prompt, job.sampling)]
    return [{name: torch.as_tensor(value).to(job.device) for name, value in values.items()} for values in encoded]


def _embeddings(job: Job, stock: Stock, branches: Sequence[Branch]) -> Row:
    # The tensors that the network gets for each prompt, except latents and noise level. Without guidance, the prompt is
    # not padded to the length of the negative one.
    policy, x, rows = job.policy, stock.before[0][:1], []
    for branch in branches:
        with watched(policy.transformer) as calls:
            policy.velocity(x, stock.sigmas[:1].to(x.device), branch, None, replace(job.sampling, true_cfg_scale=1.0))
        if not calls:
            raise ValueError("velocity() does not call policy.transformer, the only network that is trained")
        given = {*calls[0], *stock.network[0]} - LATENTS_OR_TIME
        names = sorted(name for name in given if "timestep" not in name)
        rows += [_input(name, calls[0].get(name), stock.network, RELATIVE[job.model.dtype]) for name in names]
    # A row without a number comes first: what it names is missing or has another shape.
    return min(rows, key=lambda row: (row.holds, not math.isnan(row.difference), -row.difference))


def _input(name: str, value: Any, network: Sequence[Inputs], relative: float) -> Row:
    # Compares an argument of the network with the nearest row of the stock pipeline's. Only tensors are compared. A
    # tensor of ones that only one side gives equals none: a mask that masks nothing.
    mine, others = list(_tensors(value)), [tensor for call in network for tensor in _tensors(call.get(name))]
    if not mine or not others:
        lonely = [tensor for tensor in (*mine, *others) if not bool((tensor == 1).all())]
        whose = "family" if mine else "stock pipeline"
        return Row(
            EMBEDDINGS, not lonely, 0.0, 0.0, f"only the {whose} gives {name} to the network: {CAUSES[EMBEDDINGS]}"
        )
    ours = mine[0]
    candidates = [tensor for other in others for tensor in (*other, *(row[None] for row in other)) if tensor.dim()]
    fitting = [other for other in (*others, *candidates) if other.shape == ours.shape]
    nearest = min(fitting, key=lambda other: gap(ours, other)[0], default=others[0])
    row = row_of(EMBEDDINGS, [(ours, nearest)], relative=relative)
    return row if row.holds else replace(row, text=f"{name} differs {row.text}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().float() if not value.is_complex() else torch.view_as_real(value.detach())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _adapted(policy: PipelinePolicy) -> dict[str, Tensor]:
    # The weights are random, so that the LoRA changes the output.
    add_lora(policy.transformer, LORA_CONFIG, policy, seed=0)
    weights = lora_parameters(policy.transformer)
    for name, parameter in weights.items():
        if ".lora_B." in name:
            drawn = torch.randn(parameter.shape, generator=generator(derive(1, name)))
            parameter.copy_(LORA_STRENGTH * drawn)
    return {name: parameter.detach().cpu() for name, parameter in weights.items()}


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Returns the largest difference, absolute and relative to `theirs`; infinite if a value is not finite."""
    one, other = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if not one.numel():
        return 0.0, 0.0
    if not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return float("inf"), float("inf")
    difference = float((one - other).abs().max())
    return difference, difference / max(float(other.abs().max()), 1e-12)


def row_of(
    step: str, pairs: Iterable[tuple[Tensor, Tensor]], *, relative: float = float("inf"), absolute: float = float("inf")
) -> Row:
    """Returns the row of a step from pairs of the family's tensor and the stock pipeline's, in order."""
    gaps, first = [(0.0, 0.0)], None
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape:
            shapes = f"the family's shape is {list(ours.shape)}, the stock pipeline's {list(theirs.shape)}"
            return Row(step, False, text=f"{shapes}: {CAUSES[step]}")
        gaps.append(gap(ours, theirs))
        if first is None and (gaps[-1][0] > absolute or gaps[-1][1] > relative):
            first = number
    largest = max(gaps, key=lambda pair: pair[1])
    text = "" if first is None else f"by {gaps[first + 1][0]:.2g} at number {first}: {CAUSES[step]}"
    return Row(step, first is None, *largest, text)


def record(job: Job) -> Stock:
    """Records a call of the pipeline from the job's noise. Raises ValueError for a scheduler without sigmas."""
    stock, pipeline, scheduler = Stock(), job.pipeline, job.pipeline.scheduler
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
            latents = job.policy.stock_latents(job.start(), job.sampling.resolution)
            options = {"latents": latents, **to_edit(job.images)}
            stock.images = run_pipeline(pipeline, job.config, job.sampling, job.prompt, IMAGES, **options)
    finally:
        del scheduler.step
    if not stock.sigmas.numel():
        raise ValueError(f"{type(pipeline).__name__} does not sample by the steps of a scheduler with sigmas")
    return stock


@contextmanager
def watched(network: nn.Module) -> Iterator[list[Inputs]]:
    calls: list[Inputs] = []
    signature = inspect.signature(cast("Any", network).forward)

    def note(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(dict(signature.bind_partial(*positional, **named).arguments))

    handle = network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
