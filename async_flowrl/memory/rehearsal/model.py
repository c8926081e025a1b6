"""Policies of fake tensors for a rehearsal: a model at full size with shapes, dtypes and storages, but no weights."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from async_flowrl.config.models import Architecture, architectures
from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import Config
from async_flowrl.memory.model_sizes import PromptSizes, prompt_sizes, text_bytes
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.quantized_layer import quantize
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family, resolve_model
from async_flowrl.policies.stored import boundary_ratio, configuration, elements_in
from async_flowrl.types import Conditioning

# Side of a square image to edit as the VAE gets it, whatever its own size.
IMAGE_SIDE = 1024
# Returns a context in which new tensors count as host memory (`Ledger.aside`).
Aside = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class FakeModel:
    """Stand-in for a model's files wherever a worker loads them; it needs an active FakeTensorMode."""

    known: Architecture
    family: PipelineFamily
    resolved: ResolvedModel
    prompts: PromptSizes  # Every prompt is as long, and has as many images, as the largest of the configuration.
    size: Resolution  # Of every image or video.

    @classmethod
    def of(cls, config: Config) -> "FakeModel":
        """Returns the configuration's model. Raises ValueError if its architecture is not known or not supported."""
        known, dtype = architecture(config)
        family = load_family(known.family)
        family.network_class()
        model = config.model
        resolved = ResolvedModel(
            model.path,
            known.family,
            None,
            dtype,
            model.max_sequence_length,
            quantize=model.quantize,
            quantize_text_encoder=model.quantize_text_encoder,
        )
        return cls(known, family, resolved, prompt_sizes(config.data), config.rollout.resolution)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.resolved.dtype]

    @property
    def text_bytes(self) -> int:
        return text_bytes(self.resolved.quantize_text_encoder, self.known.text_parameters, self.dtype.itemsize)

    def shortened(self, fewest: int, period: int) -> "list[tuple[int, FakeModel]]":
        """Returns models with fewer blocks, each with a weight: what is linear in blocks is the weighted sum of theirs.

        The first has of each stack of blocks that are alike at least `fewest`, by a multiple of `period` less than all;
        in each of the others one stack has `period` blocks more. Stacks of few blocks stay whole.
        """
        stacks = self.family.stacks(self.known.transformer)
        short = {name: fewest + (blocks - fewest) % period for name, blocks in stacks.items()}
        long = {name: blocks for name, blocks in stacks.items() if blocks > short[name] + period}
        short = {name: short[name] if name in long else blocks for name, blocks in stacks.items()}
        weights = {name: (blocks - short[name]) // period for name, blocks in long.items()}
        longer = [(weights[name], self._with({**short, name: short[name] + period})) for name in long]
        return [(1 - sum(weights.values()), self._with(short) if long else self), *longer]

    def _with(self, stacks: Mapping[str, int]) -> "FakeModel":
        return replace(
            self, known=replace(self.known, transformer=self.family.with_stacks(self.known.transformer, stacks))
        )

    def load_policy(
        self, aside: Aside, model: ResolvedModel, *, dtype: str, device: str | torch.device, parts: str
    ) -> Any:
        """Replaces `policies.registry.load_policy`; returns a policy of fake tensors on the CPU."""
        network = self._network(aside, on_meta=parts in ("structure", "vae"))
        whole = parts in ("all", "offload", "vae")
        policy = self.family.policy_of(
            network,
            None,
            self.known.vae,
            dtype=self.dtype,
            pipeline=self._pipeline(network, encodes=parts != "vae") if whole else None,
            max_sequence_length=self.resolved.max_sequence_length,
        )
        policy.planned_tokens = self.prompts.longest
        policy.planned_images = max(self.prompts.images, policy.images[0])
        policy.planned_size = self.size
        changed = cast("Any", policy)  # Its noise levels fall evenly, and all prompts have one length.
        changed.sigmas = _sigmas
        changed.encode = lambda texts, system=None, *, negative=False: [_encoded(policy) for _ in texts]
        return policy

    def _network(self, aside: Aside, *, on_meta: bool) -> nn.Module:
        # Builds the network in host memory, because its tables are computed, and then replaces its tensors.
        with aside():
            network = self.family.network(self.known.transformer, self.dtype, self.known.boundary_ratio)
            quantize(network, self.resolved.quantize)
        for module in network.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    place = "meta" if on_meta else "cpu"
                    fresh = torch.empty(weight.shape, dtype=weight.dtype, device=place)
                    module._parameters[name] = nn.Parameter(fresh, requires_grad=False)
            for name, table in module._buffers.items():
                if table is not None:
                    module._buffers[name] = torch.empty(table.shape, dtype=table.dtype)
        return network

    def _pipeline(self, network: nn.Module, *, encodes: bool) -> Any:
        import diffusers
        from diffusers.image_processor import VaeImageProcessor

        vae, factor = self.known.vae, self.family.scale_factor(self.known.vae)
        decoder = getattr(diffusers, vae["_class_name"]).from_config(dict(vae)).requires_grad_(False).eval()
        cast("Any", decoder)._apply(lambda t: torch.empty_like(t, dtype=self.dtype))
        text = nn.Module()
        text.register_parameter(
            "weights",
            nn.Parameter(torch.empty(self.text_bytes if encodes else 0, dtype=torch.int8), requires_grad=False),
        )
        return SimpleNamespace(
            **self.family.components(network),
            scheduler=None,
            vae=decoder,
            text_encoder=text,
            vae_scale_factor=factor,
            image_processor=VaeImageProcessor(vae_scale_factor=factor),
            _unpack_latents=getattr(getattr(diffusers, self.family.pipeline), "_unpack_latents", None),
        )


def architecture(config: Config) -> tuple[Architecture, str]:
    """Returns the model's architecture and its dtype's name. ValueError if it is neither known nor a local folder."""
    path, random = config.model.path, config.model.weights == "random"
    if path in architectures():
        published = architectures()[path]
        published = replace(published, text_parameters=0) if random else published
        return published, published.dtype if config.model.dtype == "auto" else config.model.dtype
    resolved = resolve_model(config.model)
    folder = Path(resolved.path)
    if not folder.is_dir():
        known = ", ".join(architectures())
        raise ValueError(f"{path} is not among the known architectures ({known}); give a local folder to plan it")
    transformer, vae = (configuration(resolved.path, part) for part in ("transformer", "vae"))
    ratio = boundary_ratio(resolved.path)
    encoders = [] if random else sorted(folder.glob("text_encoder*/*.safetensors"))
    text = sum(sum(elements_in(file).values()) for file in encoders)
    return Architecture(resolved.family, transformer, vae, text, resolved.dtype, boundary_ratio=ratio), resolved.dtype


def _sigmas(num_inference_steps: int, resolution: Resolution) -> Tensor:
    with unset_fake_temporarily():
        return torch.linspace(1.0, 0.0, num_inference_steps + 1)


def _encoded(policy: PipelinePolicy) -> Conditioning:
    if policy.images[1] and policy.planned_images:
        sides = height_width(policy.planned_size) if policy.makes_videos else (IMAGE_SIDE, IMAGE_SIDE)
        policy.encode_image(torch.empty(1, 3, *sides))
    return conditioning(policy)


def conditioning(policy: Any) -> Conditioning:
    return {name: np.zeros(shape, np.float32) for name, shape in policy.conditioning_shapes().items()}
