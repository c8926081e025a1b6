"""Tests of every model of configs/architectures/ at its own size, without weights: LoRA, tokens, schedule."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torch import nn

from async_flowrl.config.models import Architecture, architectures
from async_flowrl.config.resolution import Resolution, frames_of, height_width
from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies.lora import attach_lora, lora_modules, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import load_family
from async_flowrl.policies.stored import EXPERTS
from tests.support.families import EDITING, NAMES, how

ADAPTED = {
    "Qwen/Qwen-Image": (60 * 12 - 4, 6_592_512),
    "Qwen/Qwen-Image-2.1": (32 * 7, 2_621_440),
    "Qwen/Qwen-Image-Edit-2509": (60 * 12 - 4, 6_592_512),
    "Qwen/Qwen-Image-Edit-2511": (60 * 12 - 4, 6_592_512),
    "stabilityai/stable-diffusion-3.5-medium": (24 * 8 - 2, 583_680),
    "stabilityai/stable-diffusion-3.5-large": (38 * 8 - 2, 1_468_928),
    "black-forest-labs/FLUX.1-dev": (19 * 12 + 38 * 3, 2_801_664),
    "black-forest-labs/FLUX.1-Kontext-dev": (19 * 12 + 38 * 3, 2_801_664),
    "black-forest-labs/FLUX.2-klein-base-4B": (5 * 12 + 20 * 2, 1_505_280),
    "Tongyi-MAI/Z-Image-Turbo": (34 * 7, 2_480_640),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (20 * 8, 716_800),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (30 * 8, 737_280),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (2 * 40 * 8, 6_553_600),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (30 * 8, 1_474_560),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (40 * 8, 3_276_800),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (2 * 40 * 8, 6_553_600),
}
"""Layers with a LoRA, blocks times those of a block less those without effect, and the numbers of one of rank 1."""
SIZES: list[Resolution] = [512, 1024, (768, 1344)]
VIDEOS: list[Resolution] = [(81, 480, 832), (33, 704, 1280)]
KNOWN = [name for name in ADAPTED if architectures()[name].family in (*NAMES, *EDITING)]


def family_of(architecture: Architecture) -> PipelineFamily:
    family = load_family(architecture.family)
    assert isinstance(family, PipelineFamily)
    return family


FIRST = {
    (family_of(each).transformer, each.boundary_ratio is None): name
    for name in reversed(KNOWN)
    if (each := architectures()[name])
}
LATER = set(KNOWN) - set(FIRST.values())
"""Models that `make test` leaves out: another one with a network of the same class has as many experts."""


class Reached(Exception):
    """The stock pipeline calls its network: with these latents."""


class Part(nn.Module):
    """A part of a pipeline that has the configuration of a published one and nothing else."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        usual = inspect.signature(kind.__init__).parameters.values()
        values = {p.name: p.default for p in usual if p.default is not p.empty} | dict(config)
        self.config = diffusers.configuration_utils.FrozenDict(values)

    def __getattr__(self, name: str) -> Any:
        """Networks and VAEs have some of their settings as attributes, too."""
        settings = self.__dict__.get("config", {})
        return settings[name] if name in settings else super().__getattr__(name)

    def forward(self, *arguments: Any, **inputs: Any) -> None:
        raise Reached(inputs["hidden_states"] if "hidden_states" in inputs else arguments[0])

    def encode(self, image: torch.Tensor) -> SimpleNamespace:
        channels = [self.z_dim, 1] if "z_dim" in self.config else [self.latent_channels]
        return SimpleNamespace(latents=torch.zeros(1, *channels, *(side // 8 for side in image.shape[-2:])))

    def cache_context(self, name: str, **step: Any) -> Any:
        return torch.no_grad()

    @property
    def transformer_blocks(self) -> list[nn.Module]:
        return []


def published_scheduler(architecture: Architecture) -> Any:
    config = dict(architecture.scheduler or {})
    if "flow_shift" not in config:
        return diffusers.FlowMatchEulerDiscreteScheduler(**config)
    return diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, **config)


def stock_scheduler(architecture: Architecture) -> Any:
    """As published; for SANA and Wan, whose multistep solvers are not trained with, Euler steps of the same shift."""
    published = published_scheduler(architecture)
    shift = published.config.get("flow_shift")
    return published if shift is None else diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


def test_every_published_model_is_here() -> None:
    distinct = {id(architecture): name for name, architecture in reversed(architectures().items())}
    assert set(distinct.values()) == set(ADAPTED)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LATER else ()) for name in KNOWN]
)
def test_its_lora_has_the_layers_and_the_shapes_of_its_network(name: str) -> None:
    architecture = architectures()[name]
    family = family_of(architecture)
    table = {"pos_embed_max_size": 16} if architecture.family == "sd3" else {}  # which takes long to compute
    network = family.network({**architecture.transformer, **table}, torch.bfloat16, architecture.boundary_ratio)
    linear = [(layer, module) for layer, module in network.named_modules() if isinstance(module, nn.Linear)]
    shapes = {layer: tuple(module.weight.shape) for layer, module in linear}
    policy = family.policy_of(network, None, architecture.vae, dtype=torch.bfloat16)
    attach_lora(network, LoraConfig(rank=1, alpha=1.0), policy)
    adapted = set(lora_modules(network))
    assert all(any(layer.endswith(f".{target}") for layer in adapted) for target in policy.lora_targets)
    expected = {f"{layer}.lora_A.weight": (1, shapes[layer][1]) for layer in adapted}
    expected |= {f"{layer}.lora_B.weight": (shapes[layer][0], 1) for layer in adapted}
    found = {layer: tuple(parameter.shape) for layer, parameter in lora_parameters(network).items()}
    assert found == expected
    assert (len(adapted), sum(sum(shapes[layer]) for layer in adapted)) == ADAPTED[name]


@pytest.mark.parametrize("name", [name for name in KNOWN if architectures()[name].family != "wan_image"])
def test_its_tokens_and_schedule_are_the_stock_pipelines(name: str) -> None:
    """Stock pipelines, stopped where they call the network for the first time."""
    architecture = architectures()[name]
    family = family_of(architecture)
    part = Part(getattr(diffusers, family.transformer), architecture.transformer)
    networks = dict.fromkeys(EXPERTS[: 1 if architecture.boundary_ratio is None else 2], part)
    network = family.joined(networks, architecture.boundary_ratio)
    vae = Part(getattr(diffusers, architecture.vae["_class_name"]), architecture.vae)
    policy = family.policy_of(network, published_scheduler(architecture), architecture.vae, dtype=torch.float32)
    stock = stock_pipeline(family, networks, vae, stock_scheduler(architecture), architecture.boundary_ratio)
    for size in [*SIZES, *(VIDEOS if policy.makes_videos else ())]:
        (height, width), steps = height_width(size), family.usual_steps
        with pytest.raises(Reached) as reached:
            stock(
                height=height,
                width=width,
                num_inference_steps=steps,
                output_type="latent",
                **stock_inputs(policy),
                **family.guidance_arguments(replace(how(architecture.family), negative_prompt="")),
                **({"use_resolution_binning": False} if architecture.family == "sana" else {}),
                **({"max_area": height * width} if architecture.family == "flux_kontext" else {}),
                **({"num_frames": frames_of(size) or 1} if policy.makes_videos else {}),
            )
        (latents,) = reached.value.args
        shape = (latents[0] if isinstance(latents, list) else latents).squeeze().shape
        expected = [side for side in policy.latent_shape(size) if side > 1]
        if edited := policy.conditioning_shapes().get("image_0"):
            expected[0] += math.prod(edited[:2])
        assert shape == tuple(expected), size
        assert torch.equal(stock.scheduler.sigmas.cpu().float(), policy.sigmas(steps, size)), size


def stock_pipeline(
    family: PipelineFamily, networks: Mapping[str, nn.Module], vae: Part, scheduler: Any, ratio: float | None
) -> Any:
    kind = getattr(diffusers, family.pipeline)
    parameters = inspect.signature(kind).parameters.items()
    nothing = dict.fromkeys(name for name, parameter in parameters if parameter.default is parameter.empty)
    parts = nothing | family.own_parts(None) | {**networks, "vae": vae, "scheduler": scheduler}
    pipeline = kind(**parts, **({} if ratio is None else {"boundary_ratio": ratio}))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_inputs(policy: PipelinePolicy) -> dict[str, Any]:
    """The arguments of the stock pipeline, where a policy's arrays have its names; Z-Image's are lists."""
    arrays = {name: torch.ones(1, *shape) for name, shape in policy.conditioning_shapes().items()}
    if arrays.pop("image_0", None) is not None:
        return {**arrays, "image": [Image.new("RGB", (300, 300))]}
    return {name: list(tensor) if policy.family == "z_image" else tensor for name, tensor in arrays.items()}
