"""How a family of pipeline policies is loaded, or built without weights to be planned."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from async_flowrl.policies.loading import quiet, settle, weight_options
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.types import Sampling


class PipelineFamily:
    """Loads a pipeline policy from a diffusers folder or a hub name."""

    policy: ClassVar[type[PipelinePolicy]]
    pipeline: ClassVar[str]
    """diffusers' class names, of the pipeline and of its transformer."""
    transformer: ClassVar[str]
    usual_guidance: tuple[float, float]

    def load(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parts: str,
        revision: str | None = None,
        max_sequence_length: int | None = None,
    ) -> PipelinePolicy:
        """`parts` is "all" (weights go straight to `device`), "transformer" (no text encoder, no VAE weights) or
        "structure" (the transformer with its parameters on the meta device)."""
        kind = getattr(diffusers, self.transformer)
        with quiet():
            if parts == "all":
                pipeline = getattr(diffusers, self.pipeline).from_pretrained(
                    path, device_map=device.type, **weight_options(dtype, revision)
                )
                for component in pipeline.components.values():
                    if isinstance(component, nn.Module):
                        settle(component, device)
                return self.around(pipeline, dtype, max_sequence_length=max_sequence_length)
            if parts == "structure":
                described = kind.load_config(path, subfolder="transformer", revision=revision)
                transformer: Any = _structure(kind, described, dtype)
            else:
                transformer = kind.from_pretrained(path, subfolder="transformer", **weight_options(dtype, revision))
                settle(transformer, device)
            scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler", revision=revision)
            vae = diffusers.AutoencoderKL.load_config(path, subfolder="vae", revision=revision)
        return self.policy(
            transformer,
            scheduler,
            side=self.policy.pixels_per_token(vae, transformer.config),
            dtype=dtype,
            max_sequence_length=max_sequence_length,
        )

    def around(self, pipeline: Any, dtype: torch.dtype, *, max_sequence_length: int | None = None) -> PipelinePolicy:
        """The policy of a pipeline that is loaded already."""
        return self.policy(
            pipeline.transformer,
            pipeline.scheduler,
            side=self.policy.pixels_per_token(pipeline.vae.config, pipeline.transformer.config),
            dtype=dtype,
            pipeline=pipeline,
            max_sequence_length=max_sequence_length,
        )

    def on_meta(
        self,
        transformer: Mapping[str, Any],
        vae: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_sequence_length: int | None = None,
    ) -> PipelinePolicy:
        """The policy with its VAE on the meta device, from their configurations: shapes and dtypes, no memory.

        Such a policy predicts and decodes shapes; it has no schedule and encodes nothing.
        """
        kind = getattr(diffusers, self.transformer)
        with quiet(), torch.device("meta"):
            network = kind.from_config(dict(transformer)).requires_grad_(False).eval()
            decoder = getattr(diffusers, vae["_class_name"]).from_config(dict(vae)).requires_grad_(False).eval()
        for tensor in [*network.parameters(), *decoder.parameters()]:
            tensor.data = tensor.data.to(dtype)
        stock = getattr(diffusers, self.pipeline)
        factor = 8 if "block_out_channels" not in vae else 2 ** (len(vae["block_out_channels"]) - 1)
        pipeline = SimpleNamespace(
            vae=decoder, vae_scale_factor=factor, _unpack_latents=getattr(stock, "_unpack_latents", None)
        )
        return self.policy(
            network,
            None,
            side=self.policy.pixels_per_token(decoder.config, network.config),
            dtype=dtype,
            pipeline=pipeline,
            max_sequence_length=max_sequence_length,
        )

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        return self.policy.guidance_arguments(sampling)


def _structure(kind: Any, described: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The network as `from_pretrained` makes it before it reads weights: parameters on meta, tables computed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights():
            network: nn.Module = kind.from_config(dict(described))
    finally:
        torch.set_default_dtype(before)
    saved = network.state_dict(keep_vars=True)
    for name, buffer in network.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return network.eval().requires_grad_(False)
