"""async-flowrl generate --lora RUN/lora --prompt "..." --out grid.png: images with and without the trained weights.

It samples with the stock diffusers pipeline, so a user of the weights gets the same images.
"""

import argparse
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from async_flowrl.cli.options import count, of_option, seed
from async_flowrl.config.check import guidance_refusal
from async_flowrl.config.compose import read_config
from async_flowrl.config.models import is_toy
from async_flowrl.config.resolution import configured, frames_of, height_width, resolution_option, with_frames
from async_flowrl.config.schema import Config, DataConfig, ModelConfig
from async_flowrl.data.condition_images import examined
from async_flowrl.image_file import opened
from async_flowrl.observability.images import animation, grid
from async_flowrl.observability.terminal import refuse
from async_flowrl.policies import lora_file, trained_file
from async_flowrl.policies.pipeline import over_white
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import (
    DTYPES,
    PromptCheck,
    family_of,
    load_family,
    load_pipeline,
    resolve_model,
    shapes_of,
)
from async_flowrl.policies.stored import EXPERTS
from async_flowrl.tickets.request import sampling
from async_flowrl.types import ByteArray, ConditionImage, Prompt, Sampling

logger = logging.getLogger(__name__)

# Endings of files that hold a moving picture, and its speed, which is that of Wan.
ANIMATED = (".gif", ".webp")


def config_of(trained: Path | None, model: str | None, *, run: Path | None = None, option: str = "--model") -> Config:
    """Configuration for trained weights, or for the base model alone: of their run, or of `run`, else the usual one.

    `model`, which `option` names, replaces the base model. Raises ValueError if `trained` holds no weights, and if no
    model is known.
    """
    if trained is not None:
        if not trained_file.is_whole(trained):
            lora_file.weights_file(trained)
        run = run or run_of(trained)
    if run is not None:
        config = read_config(run / "config.yaml")
        config.model = with_base(config.model, model)
        return config
    base = model or (None if trained is None or trained_file.is_whole(trained) else lora_file.base_of(trained))
    if base is None:
        raise ValueError(
            f"{option} is needed: there is no config.yaml of a run beside the weights, and they name no base model"
        )
    return usual(base)


def with_base(model: ModelConfig, base: str | None) -> ModelConfig:
    return model if base in (None, model.path) else replace(model, path=str(base), revision=None)


def run_of(trained: Path) -> Path | None:
    """The run of weights at RUN/lora, RUN/transformer, RUN/FILE or in those, also an expert's, by its config.yaml."""
    levels = 1 + (not trained.is_dir()) + any(part in EXPERTS for part in trained.parts[-2:])
    folders = list(trained.resolve().parents)[:levels]
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def usual(model: str) -> Config:
    """Configuration without prompts: the family's usual guidance, 512 × 512 pixels, 28 steps (tiny: 32 × 32, 6)."""
    config = Config(model=ModelConfig(path=model), data=DataConfig(train=""))
    how = config.rollout
    if not is_toy(config.model.path):
        how.num_inference_steps = 28
        how.true_cfg_scale, how.guidance_scale = resolve_model(config.model).usual_guidance
    return config


def check_guidance(model: ModelConfig, true_cfg_scale: float | None, guidance_scale: float | None) -> None:
    """Raises ValueError, one sentence, for a scale that is given (not None) and that the model cannot have."""
    if true_cfg_scale is not None and (no := guidance_refusal("--true-cfg-scale", true_cfg_scale)):
        raise ValueError(no)
    if guidance_scale is None:
        return
    family = resolve_model(model).family
    if load_family(family).usual_guidance[1] == 0:
        raise ValueError(f"--guidance-scale is no input of {family}, whose guidance is --true-cfg-scale")
    if no := guidance_refusal("--guidance-scale", guidance_scale, embedded=True):
        raise ValueError(no)


def sampling_of(config: Config) -> Sampling:
    """The settings of the sampler, whose `sde_type` and `noise_level` have no effect here."""
    steps = config.evaluate.num_inference_steps or config.rollout.num_inference_steps
    return replace(sampling(config, configured(config.rollout)[0]), num_inference_steps=steps)


def open_pipeline(model: ModelConfig, how: Sampling, device: str) -> Any:
    """The stock pipeline of the model on `device`. ValueError for too few steps, and for guidance that it ignores."""
    resolved = resolve_model(model)
    resolved.check_distilled({"the guidance scale": how.true_cfg_scale})
    load_family(resolved.family).policy.check_steps(how.num_inference_steps)
    pipeline = load_pipeline(resolved, dtype=resolved.dtype, device=device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(
    pipeline: Any, model: ModelConfig, how: Sampling, prompt: str, seeds: Sequence[int], **options: Any
) -> ByteArray:
    """Images uint8 [n, H, W, 3] (or videos) of one prompt, one per seed; the initial noise is drawn on the CPU."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    return run_pipeline(pipeline, model, how, prompt, len(seeds), generator=generators, **options)


def to_edit(images: Sequence[ConditionImage]) -> dict[str, Any]:
    """Returns the stock pipeline's argument for the images that are edited, {} for none; some take one, not a list."""
    found = [opened(image) for image in images]
    return {"image": found if len(found) > 1 else found[0]} if found else {}


def run_pipeline(
    pipeline: Any, model: ModelConfig, how: Sampling, prompt: str | None, count: int, **options: Any
) -> ByteArray:
    """Returns `count` images of the stock pipeline. Raises ValueError for values that are not finite.

    They are images uint8 [n, H, W, 3] or, with a size that has frames, videos [n, frames, H, W, 3].
    """
    many = "num_videos_per_prompt" if makes_videos(pipeline) else "num_images_per_prompt"
    arguments = arguments_of(pipeline, model, how) | {many: count, "output_type": "pil", "return_dict": False}
    prompts: str | list[str] | None = prompt
    if prompt is not None and getattr(pipeline, "image_encoder", None) is not None:
        # Embeddings of the image are repeated for every prompt only, by diffusers 0.42.
        prompts, arguments[many] = [prompt] * count, 1
    try:
        with np.errstate(invalid="raise"):
            made = pipeline(prompt=prompts, **(arguments | options))[0]
    except FloatingPointError as error:
        raise ValueError(f"the images of {prompt!r:.80} have values that are not finite: {error}") from error
    if makes_videos(pipeline):
        videos = np.stack([np.stack(list(map(np.asarray, frames))) for frames in made])
        return videos[:, 0] if frames_of(how.resolution) is None else videos
    return over_white(torch.from_numpy(np.stack(list(map(np.asarray, made))))).numpy()


def makes_videos(pipeline: Any) -> bool:
    """Whether a stock pipeline, or its class, makes videos."""
    return "num_frames" in inspect.signature(pipeline.__call__).parameters


def arguments_of(
    pipeline: Any, model: ModelConfig, how: Sampling, family: PipelineFamily | None = None
) -> dict[str, Any]:
    """Returns the arguments with which a stock pipeline, or its class with a `family`, samples as `how` says."""
    height, width = height_width(how.resolution)
    arguments = {"height": height, "width": width, "num_inference_steps": how.num_inference_steps}
    arguments |= (family or family_of(pipeline, model.family)).guidance_arguments(how)
    if makes_videos(pipeline):
        arguments["num_frames"] = frames_of(how.resolution) or 1
    if model.max_sequence_length is not None:
        arguments["max_sequence_length"] = model.max_sequence_length
    takes = inspect.signature(pipeline.__call__).parameters
    if "use_resolution_binning" in takes:
        arguments["use_resolution_binning"] = False  # SANA would otherwise make 1024 pixels and shrink them to the size
    if "max_area" in takes:
        arguments["max_area"] = height * width  # FLUX.1-Kontext would otherwise make 1024 × 1024 pixels of this shape
    return arguments


def in_diffusers(arguments: Mapping[str, Any], seed: int = 0, *, edits: bool = False) -> str:
    given = f"prompt=PROMPT{', image=IMAGES' if edits else ''}"
    keywords = "".join(f", {name}={value!r}" for name, value in arguments.items())
    made = "frames" if "num_frames" in arguments else "images"
    return f'pipe({given}{keywords}, generator=torch.Generator("cpu").manual_seed({seed})).{made}[0]'


def generate(
    model: ModelConfig,
    how: Sampling,
    trained: Path | None,
    prompts: Sequence[str],
    *,
    seed: int,
    images: int,
    animated: bool = False,
    edited: Sequence[ConditionImage] = (),
) -> list[Image.Image]:
    """Samples all prompts with and without the LoRA. ValueError for a size that the model cannot make.

    `edited` are the images that each prompt edits, for a model that does; ValueError for another, or for none.

    Returns one picture with all images; `animated`: one per frame of the videos.
    """
    resolved = resolve_model(model)
    shapes_of(resolved, how.resolution)
    check = PromptCheck(resolved, targets=False)
    for text in prompts:
        check(Prompt(0, text, how.negative_prompt, images=tuple(edited)))
    pipeline = open_pipeline(model, how, "cuda" if torch.cuda.is_available() else "cpu")
    seeds, options = range(seed, seed + images), to_edit(edited)

    def sampled() -> list[ByteArray]:
        return [sample(pipeline, model, how, prompt, seeds, **options) for prompt in prompts]

    columns = [("before" if trained else "", sampled())]
    if trained is not None:
        trained_file.apply(pipeline, trained)
        columns.append(("after", sampled()))
    line = in_diffusers(arguments_of(pipeline, model, how), seed, edits=bool(edited))
    logger.info("the same images in diffusers: %s", line)
    frames = frames_of(how.resolution) if animated else None
    drawn = partial(grid, prompts, max_side=sys.maxsize, sources=[edited] * len(prompts))
    if frames is None:
        return [drawn(columns)]
    each = [[(title, [videos[:, place] for videos in rows]) for title, rows in columns] for place in range(frames)]
    return [drawn(of_frame) for of_frame in each]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="async-flowrl generate", description="Images before and after training.")
    parser.add_argument("--model", help="tiny, a diffusers folder or a hub name (default: the run's own)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--lora", type=Path, help="RUN/lora, or a LoRA of any format; without it, only the base model")
    weights.add_argument("--transformer", type=Path, help="RUN/transformer of a run with tune=full")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times: one row each")
    parser.add_argument("--image", action="append", type=Path, default=[], help="to edit, for all prompts; or several")
    parser.add_argument("--out", type=Path, default=Path("before_after.png"))
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--images", type=count, default=4, help="images per prompt (default 4)")
    parser.add_argument("--resolution", metavar="SIZE", help="512, or [FRAMESx]HEIGHTxWIDTH in pixels")
    parser.add_argument("--num-inference-steps", type=count)
    parser.add_argument("--true-cfg-scale", type=float, help="scale of classifier-free guidance; 0 or 1 for none")
    parser.add_argument("--guidance-scale", type=float, help="for models that take it as an input, such as FLUX.1-dev")
    parser.add_argument("--negative-prompt")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = options.lora or options.transformer
    trained = path.expanduser() if path is not None else None
    try:
        if trained is not None and options.transformer is not None and not trained_file.is_whole(trained):
            lora_file.check_holder(trained)
            raise ValueError(f"--transformer {trained} is no folder with {trained_file.CONFIG} and weights")
        config = config_of(trained, options.model)
        check_guidance(config.model, options.true_cfg_scale, options.guidance_scale)
        names = ("resolution", "num_inference_steps", "true_cfg_scale", "guidance_scale", "negative_prompt")
        changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        if options.resolution is not None:
            frames = frames_of(configured(config.rollout)[0])  # A size without frames has the run's.
            changes["resolution"] = with_frames(resolution_option(options.resolution), frames)
        model = replace(config.model, dtype=options.dtype or config.model.dtype)
        how = replace(sampling_of(config), **changes)
        out = options.out.expanduser()
        if (suffix := out.suffix.lower()) not in Image.registered_extensions():
            raise ValueError(f"--out {out}: no format has this ending; e.g. .png, or .webp for videos that move")
        edited, moves = tuple(map(examined, options.image)), suffix in ANIMATED
        sheets = generate(
            model, how, trained, options.prompt, seed=options.seed, images=options.images, animated=moves, edited=edited
        )
    except ValueError as error:
        return refuse(of_option(error, "--model", options.model))
    out.parent.mkdir(parents=True, exist_ok=True)
    sheets[0].save(out, **animation(sheets))
    logger.info("wrote %s", out)
    return 0
