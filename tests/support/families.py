"""Tiny models of every family for tests: policies with an adapter that changes the output, and diffusers' pipelines."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.config.resolution import height_width
from async_flowrl.config.schema import LoraConfig, ModelConfig, TinyConfig
from async_flowrl.data.condition_images import examined
from async_flowrl.policies import tiny
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy, with_euler_steps
from async_flowrl.policies.registry import FAMILIES, family_of, load_family, load_pipeline, load_policy, resolve_model
from async_flowrl.types import ConditionImage, Sampling
from tests.support.tiny import randomise, sampling, tensors


def runs_here(family: str) -> bool:
    """Whether the installed diffusers has the family's classes."""
    try:
        load_family(family)
    except ValueError:
        return False
    return True


EDITING = ("qwen_image_edit", "flux_kontext", "wan_image")
"""Families whose prompts need images; test_image_edits.py and test_wan_image.py test them."""
NAMES = sorted(family for family in filter(runs_here, FAMILIES) if family not in EDITING)
WHOLE_TEXTS = ("qwen_image", "qwen_image_21", "qwen_image_edit", "wan_image")
"""Families that do not pad texts."""
TWO_AND_SLOW = [
    name if name in ("flux", "qwen_image") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES
]
"""All families, two of them outside the slow tier: for what is the same code in every family."""
ONE_AND_EXTENDED = [name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.extended) for name in NAMES]
"""All families, of which `make test` runs one and `make test-extended` the others."""
TEXT, NEGATIVE = "red red red red", "a grey one"
EXPERTS = {"wan22": "async_flowrl.policies.wan:tiny_experts"}
"""Tiny models that are no family of their own → value of `model.tiny.family`."""
N = 3
"""Images of a batch."""


def tiny_model(family: str) -> str:
    """Returns the value of `model` that chooses the family's tiny model."""
    return {"qwen_image": "tiny", "wan": "tiny_wan21"}.get(family, f"tiny_{family}")


def model_config(family: str) -> ModelConfig:
    """Returns the configuration of the family's tiny model, with short texts if it pads texts, to save time."""
    if family == "qwen_image":
        return ModelConfig(path=str(spread_qwen_image()))
    tiny_config = TinyConfig(family=EXPERTS.get(family, family), heads=4)
    return ModelConfig(tiny=tiny_config, max_sequence_length=None if family in WHOLE_TEXTS else 24)


def spread_qwen_image() -> Path:
    """Returns the folder of a tiny Qwen-Image in which a norm too few, or rows for columns, shows as in other families.

    The package's own keeps the bits that experiment=two_prompts has trained.
    """
    source = tiny.build_tiny(TinyConfig(heads=4))

    def build(folder: Path) -> None:
        pipeline = pipeline_from(source)
        axes = {**pipeline.transformer.config, "axes_dims_rope": (4, 4, 8)}
        turned = type(pipeline.transformer).from_config(axes)
        turned.load_state_dict(pipeline.transformer.state_dict())
        pipeline.register_modules(transformer=turned.eval())
        tiny.spread_norms(pipeline)
        pipeline.save_pretrained(folder)

    return tiny.cached(source.with_name(f"{source.name}-spread"), build)


def pipeline_from(folder: Path) -> Any:
    return load_pipeline(resolve_model(ModelConfig(path=str(folder))), dtype="float32", device="cpu")


def policy_of(family: str, *, parts: str = "all", dtype: str = "float32") -> PipelinePolicy:
    return load_policy(
        resolve_model(replace(model_config(family), dtype=dtype)), dtype=dtype, device="cpu", parts=parts
    )


def adapted(family: str, *, lora: LoraConfig | None = None) -> PipelinePolicy:
    """Returns the policy with a LoRA whose B is random instead of zero, so that it changes the output."""
    policy = policy_of(family)
    add_lora(policy.transformer, lora or LoraConfig(rank=4, alpha=10.0), policy, seed=0)
    randomise(lora_parameters(policy.transformer))
    return policy


def pipeline_of(family: str) -> Any:
    """Returns diffusers' pipeline of the tiny model, loaded as a policy's is, so that results are equal bit for bit."""
    pipeline = load_pipeline(resolve_model(model_config(family)), dtype="float32", device="cpu")
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = with_euler_steps(pipeline.scheduler)
    return pipeline


def stock_images(pipeline: Any, policy: PipelinePolicy, sampling: Sampling, start: Tensor, output: str) -> Any:
    """Returns what the stock pipeline makes of TEXT and the noise; of a model that makes videos, one frame of each."""
    (height, width), length = height_width(sampling.resolution), model_config(policy.family).max_sequence_length
    arguments: dict[str, Any] = {
        "prompt": TEXT,
        "height": height,
        "width": width,
        "num_inference_steps": sampling.num_inference_steps,
        "latents": policy.stock_latents(start, sampling.resolution),
        "output_type": output,
        **family_of(pipeline).guidance_arguments(sampling),
        **({} if length is None else {"max_sequence_length": length}),
    }
    video, n = hasattr(pipeline, "video_processor"), len(start)
    arguments |= {"num_videos_per_prompt": n, "num_frames": 1} if video else {"num_images_per_prompt": n}
    if output == "latent":
        return last_latents(pipeline, **arguments)
    made = pipeline(return_dict=False, **arguments)[0]
    return [frames[0] for frames in made] if video and output == "pil" else made


def last_latents(pipeline: Any, **arguments: Any) -> Tensor:
    """Returns the latents after the last step; what some pipelines return as such is scaled for the VAE."""
    step, last = pipeline.scheduler.step, []

    @functools.wraps(step)
    def watching(*given: Any, **options: Any) -> Any:
        last[:] = step(*given, **options)
        return tuple(last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.scheduler, "step", watching)
        pipeline(return_dict=False, **arguments)
    return last[0]


def how(family: str, *, cfg: float = 1.0, **options: Any) -> Sampling:
    embedded = 3.5 if family in ("flux", "flux_kontext") else 0.0
    return replace(sampling(cfg=cfg, **options), guidance_scale=embedded, negative_prompt=NEGATIVE)


def conditioning(policy: PipelinePolicy) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    (positive,), (negative,) = policy.encode([TEXT]), policy.encode([NEGATIVE], negative=True)
    return tensors(positive), tensors(negative)


def latents(policy: PipelinePolicy, n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, *policy.latent_shape(32), generator=torch.Generator().manual_seed(seed))


def denoised(policy: Any, start: Tensor, sampling: Sampling, *branches: Any, steps: int) -> Tensor:
    """Returns the latents after `steps` steps without noise; `branches` are conditioning and, guided, its negative."""
    x = start
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigmas(steps, sampling.resolution)):
            velocity = policy.velocity(x, sigma.expand(len(x)), *branches, sampling)
            x = sde.ode_step(x, velocity, sigma.expand(len(x)), after.expand(len(x)))
    return x


def on_white(image: Image.Image) -> Image.Image:
    """Returns the image as a viewer shows it on a white page."""
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A") if image.mode == "RGBA" else None)
    return white


def to_edit(folder: Path, *sizes: tuple[int, int]) -> list[ConditionImage]:
    """Returns a coarse image of each size, height and width in pixels, as a prompt has it to be edited."""
    found = []
    for seed, size in enumerate(sizes):
        coarse = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size[::-1]).save(folder / f"{seed}.png")
        found.append(examined(folder / f"{seed}.png"))
    return found


def passes_by_length(policy: Any) -> list[int]:
    """Returns the number of the network's calls for a prompt as long as its negative prompt, and for a longer one."""
    device, found = next(policy.transformer.parameters()).device, []
    x, sigma = torch.zeros(1, *policy.latent_shape(32), device=device), torch.tensor([0.5], device=device)
    for text in (NEGATIVE, f"{NEGATIVE} beside a long river"):
        calls: list[Any] = []
        hook = policy.transformer.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module))
        branches = [tensors(policy.encode([words])[0]) for words in (text, NEGATIVE)]
        on_device = [{name: value.to(device) for name, value in branch.items()} for branch in branches]
        with torch.no_grad():
            policy.velocity(x, sigma, *on_device, how(policy.family, cfg=3.0))
        hook.remove()
        found.append(len(calls))
    return found
