"""Measurement of an evaluation `Job`: images of the base model and of the trained one, from the same initial noises."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from async_flowrl.cli.evaluation_job import TOTAL, TRAINED, Job, servers_of
from async_flowrl.cli.generate import open_pipeline, run_pipeline, sampling_of, to_edit
from async_flowrl.config.resolution import Resolution, height_width, in_words, pixels
from async_flowrl.config.schema import Config
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.controller.scoring import asked_until_scored
from async_flowrl.observability.images import grid
from async_flowrl.observability.statistics import estimate
from async_flowrl.policies import trained_file
from async_flowrl.policies.pipeline import IMAGE, PipelinePolicy, with_euler_steps
from async_flowrl.policies.registry import family_of, resolve_model, shapes_of
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.composite import CompositeReward, weighted_total
from async_flowrl.rewards.registry import build_reward
from async_flowrl.seeds import derive, generator
from async_flowrl.types import ByteArray, Prompt, Scores
from separation.text_table import format_table

logger = logging.getLogger(__name__)

# Numbers of prompts, and of images per prompt, that the picture shows: the first of each.
SHOWN_PROMPTS, SHOWN_IMAGES = 4, 4
Images = dict[int, ByteArray]  # Index of a prompt in the job to its images, uint8 [n, H, W, 3].
ByPrompt = dict[int, tuple[float, ...]]  # Index of a prompt in the job to its scores, one per image.


@dataclass(frozen=True)
class Comparison:
    """Result of an evaluation: one row per score, over the prompts that have the score both before and after."""

    # `before` and `after` are the images to show. `missing` names the scores without any such prompt; their terms are
    # not required.

    job: Job
    rows: Mapping[str, dict[str, Any]]
    before: Images
    after: Images
    missing: list[str]


def evaluate(job: Job, *, device: str = "cpu") -> Comparison:
    """Scores images of both. Raises ValueError if weights and model do not fit, or a score is missing.

    Raises ServerLost if the server of a reward fails.
    """
    check_sizes(job)
    reward = build_reward(job.config.reward)
    pipeline = open_pipeline(job.config.model, sampling_of(job.config), device)
    pipeline.scheduler = with_euler_steps(pipeline.scheduler)  # with which the run sampled
    return asyncio.run(_both(pipeline, job, reward, device))


def check_sizes(job: Job) -> None:
    """Raises ValueError if the model cannot make an image's size; the message names the first prompt that sets it."""
    model = resolve_model(job.config.model)
    places = {job.resolution(place): place for place in reversed(range(len(job.prompts)))}
    for size, place in reversed(places.items()):
        try:
            shapes_of(model, size)
        except ValueError as error:
            of_prompt = job.prompts[place].resolution is not None and not job.one_size
            raise ValueError(f"{job.where(place)}: {error}" if of_prompt else str(error)) from error


async def _both(pipeline: Any, job: Job, reward: CompositeReward, device: str) -> Comparison:
    async with servers_of(job, reward, device) as servers:
        before, images_before = await _scored(pipeline, job, reward, servers)
        trained_file.apply(pipeline, job.trained_weights)
        after, images_after = await _scored(pipeline, job, reward, servers)
    names = [*job.terms, *([TOTAL] if job.trained else [])]
    rows = {name: row(name, job, before[name], after[name]) for name in names if name in before and name in after}
    missing = [name for name in names if not rows.get(name)]
    required = [name for name in missing if name in job.terms and job.terms[name].required]
    if required or len(missing) == len(names):
        raise ValueError(f"none of {len(job.prompts)} prompts could be scored by {(required or missing)[0]}")
    for name in missing:
        logger.warning("%s: no prompt was scored before and after, so it is left out", name)
    return Comparison(job, {name: found for name, found in rows.items() if found}, images_before, images_after, missing)


def row(name: str, job: Job, before: ByPrompt, after: ByPrompt) -> dict[str, Any]:
    """One score, paired by prompt and noise, `improved` the share of better images, 0..1; {} without common prompts."""
    common = sorted(before.keys() & after.keys())
    if not common:
        return {}
    if len(common) < len(job.prompts):
        logger.warning("%s: means over %d of %d prompts", name, len(common), len(job.prompts))
    first, second = ({place: side[place] for place in common} for side in (before, after))
    kind, weight = (job.kinds[name], job.terms[name].weight) if name in job.kinds else (TRAINED, 1.0)
    sign = -1.0 if weight < 0 else 1.0
    changes = {place: tuple(np.subtract(second[place], first[place]).tolist()) for place in common}
    better = [sign * change > 0 for group in changes.values() for change in group]
    return {
        "kind": kind,
        "weight": weight,
        "before": asdict(estimate(first)),
        "after": asdict(estimate(second)),
        "difference": asdict(estimate(changes)),
        "improved": float(np.mean(better)),
        "scores": {"before": first, "after": second},
    }


async def _scored(
    pipeline: Any, job: Job, reward: CompositeReward, servers: RewardServers
) -> tuple[dict[str, ByPrompt], Images]:
    config = job.config
    policy = family_of(pipeline, config.model.family).around(
        pipeline, pipeline.transformer.dtype, max_sequence_length=config.model.max_sequence_length
    )
    policy.check(sampling_of(config))
    results: dict[str, ByPrompt] = {}
    shown: Images = {}
    with ThreadPoolExecutor(config.reward.threads) as executor:
        for place, prompt in enumerate(job.prompts):
            parts = []
            for seed in job.seeds:
                make_images = partial(_images, pipeline, policy, job, prompt, place, seed)
                # In a thread, because the event loop of this thread must keep watching the servers.
                parts.append(make_images() if not servers.terms else await asyncio.to_thread(make_images))
            images = np.concatenate(parts)
            if place < SHOWN_PROMPTS:
                shown[place] = images[:SHOWN_IMAGES]

            async def ask(terms: Sequence[str], prompt: Prompt = prompt, images: ByteArray = images) -> Scores:
                return await reward.attempt(prompt, images, executor, only=terms)

            try:
                scores = reward.demanded(await asked_until_scored(job.terms, config.reward, servers, ask))
            except RewardError as error:
                if config.reward.on_error == "fail":
                    raise ValueError(f"{job.where(place)}: this prompt has no score: {error}") from error
                logger.warning("%s: this prompt is skipped: %s", job.where(place), error)
                continue
            for name, values in scores.by_term.items():
                results.setdefault(name, {})[place] = tuple(values)
            if job.trained and job.trained.keys() <= scores.by_term.keys():
                total = weighted_total(job.trained, scores.by_term, len(images))
                results.setdefault(TOTAL, {})[place] = total
    return results, shown


def _images(pipeline: Any, policy: PipelinePolicy, job: Job, prompt: Prompt, place: int, seed: int) -> ByteArray:
    size = job.resolution(place)
    how = replace(sampling_of(job.config), resolution=size)
    if prompt.negative is not None:
        how = replace(how, negative_prompt=prompt.negative)
    latents = policy.stock_latents(noise(job.config, policy, size, place, seed), size)
    latents = latents.to(pipeline.device, pipeline.transformer.dtype)
    text, options = _conditioning(policy, prompt)
    options |= to_edit(prompt.images)
    return run_pipeline(pipeline, job.config.model, how, text, len(latents), latents=latents, **options)


def noise(config: Config, policy: PipelinePolicy, size: Resolution, place: int, seed: int) -> Tensor:
    """Initial latents [n, ...] in the model family's layout; `evaluate.seed` gives those of a run's evaluations."""
    shape = policy.latent_shape(size)
    seeds = [derive(seed, "evaluation", place, image) for image in range(config.evaluate.images_per_prompt)]
    return torch.stack([torch.randn(shape, generator=generator(image_seed)) for image_seed in seeds])


def _conditioning(policy: PipelinePolicy, prompt: Prompt) -> tuple[str | None, dict[str, Any]]:
    # Returns the prompt's text, or None and embeddings if it has a system prompt or token ids; and more options.
    like = next(policy.transformer.parameters())
    options: dict[str, Any] = {}
    if prompt.negative_token_ids is not None:
        (negative,) = policy.encode([prompt.negative_token_ids], negative=True)
        options = {f"negative_{name}": torch.from_numpy(value)[None].to(like) for name, value in negative.items()}
        options["negative_prompt"] = None
    if prompt.system is None and prompt.token_ids is None:
        return prompt.text, options
    (encoded,) = policy.encode([prompt.wording], system=prompt.system)
    # The stock pipeline encodes images itself.
    texts = {name: value for name, value in encoded.items() if not name.startswith(IMAGE.format(""))}
    return None, options | {name: torch.from_numpy(value)[None].to(like) for name, value in texts.items()}


RESULTS, GRID = "evaluation.json", "before_after.png"
HEAD = ("score", "kind", "before", "after", "difference [95 %]", "images improved")
_MAX_SCORES = 4  # Largest number of score lines below an image.


def table(comparison: Comparison) -> str:
    job, how = comparison.job, sampling_of(comparison.job.config)
    title = (
        f"{len(job.prompts)} prompts ({job.chosen}) × {job.images_per_prompt} images, {how.num_inference_steps} steps "
        f"at {', '.join(map(in_words, sizes_of(comparison)))} px, guidance {how.guidance_scale or how.true_cfg_scale:g}"
    )
    return f"{title}\n{format_table(HEAD, score_rows(comparison.rows))}\n"


def score_rows(rewards: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells below HEAD, from `rewards` of evaluation.json. Raises KeyError or TypeError if they are none."""
    rows: list[tuple[str, ...]] = []
    for name, row in rewards.items():
        mean, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
        interval = "" if low is None else f" [{low:+.4g}, {high:+.4g}]"
        before, after = (f"{row[side]['mean']:.4g}" for side in ("before", "after"))
        rows.append(
            (name, row["kind"].replace("_", " "), before, after, f"{mean:+.4g}{interval}", f"{row['improved']:.0%}")
        )
    return rows


def sizes_of(comparison: Comparison) -> list[Resolution]:
    sizes = {comparison.job.resolution(place) for place in range(len(comparison.job.prompts))}
    return sorted(sizes, key=lambda size: (pixels(size), height_width(size)))


def as_json(comparison: Comparison) -> dict[str, Any]:
    job, how = comparison.job, sampling_of(comparison.job.config)
    sizes = sizes_of(comparison)
    return {
        "base": job.config.model.path,
        "trained_weights": str(job.trained_weights),
        "prompts": [prompt.text for prompt in job.prompts],
        "chosen": job.chosen,
        "scored": min(row["before"]["prompts"] for row in comparison.rows.values()),
        "images_per_prompt": job.images_per_prompt,
        "seeds": list(job.seeds),
        # A single size is written as in the configuration, so [448, 576] is one height and width. Several sizes are
        # written as a list of (height, width).
        "resolution": sizes[0] if len(sizes) == 1 else [height_width(size) for size in sizes],
        "num_inference_steps": how.num_inference_steps,
        "true_cfg_scale": how.true_cfg_scale,
        "guidance_scale": how.guidance_scale,
        "rewards": comparison.rows,
        "missing": comparison.missing,
    }


def picture(comparison: Comparison) -> Image.Image:
    places = sorted(comparison.before)
    sides = [("before", comparison.before), ("after", comparison.after)]
    columns = [(title, [images[place] for place in places]) for title, images in sides]
    captions = [[_captions(comparison, title, place) for place in places] for title, _ in sides]
    prompts = [comparison.job.prompts[place] for place in places]
    sources = [prompt.images for prompt in prompts]
    return grid([prompt.text for prompt in prompts], columns, captions=captions, sources=sources)


def _captions(comparison: Comparison, side: str, place: int) -> list[list[str]]:
    rows = [(name, row) for name, row in comparison.rows.items() if name != TOTAL][:_MAX_SCORES]
    scores = [(name, row["scores"][side][place]) for name, row in rows if place in row["scores"][side]]
    count = min(SHOWN_IMAGES, comparison.job.images_per_prompt)
    return [[f"{values[image]:.3g} {name}" for name, values in scores] for image in range(count)]


def write(comparison: Comparison, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(as_json(comparison), indent=2) + "\n")
    picture(comparison).save(folder / GRID, format="PNG", optimize=True)
    return [folder / RESULTS, folder / GRID]
