"""Qwen-Image as vllm-omni holds it, behind the reference's own policy: only the network is called differently."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import nn

from async_flowrl.policies.loading import settle
from async_flowrl.policies.qwen_image import QwenImagePolicy


class VllmNetwork(nn.Module):
    """vllm-omni's network with the signature and the `config` of the diffusers one."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.config = SimpleNamespace(
            guidance_embeds=network.guidance_embeds,
            num_layers=len(network.transformer_blocks),
            in_channels=network.in_channels,
        )

    def forward(self, *, encoder_hidden_states: torch.Tensor, **inputs: Any) -> Any:
        """vllm-omni's rotary embedding wants each row's padded text length named."""
        rows, length = encoder_hidden_states.shape[:2]
        return self.network(encoder_hidden_states=encoder_hidden_states, txt_seq_lens=[length] * rows, **inputs)


def policy_around(pipeline: Any, dtype: torch.dtype, max_sequence_length: int | None) -> QwenImagePolicy:
    """Schedule, guidance, prompt template and decoding are the reference's; the network and its parallelism vllm's."""
    pipeline.image_processor = VaeImageProcessor(vae_scale_factor=pipeline.vae_scale_factor * 2)
    for module in (pipeline.text_encoder, pipeline.vae):
        settle(module, pipeline.device)
    return QwenImagePolicy(
        VllmNetwork(pipeline.transformer),
        pipeline.scheduler,
        side=2 * pipeline.vae_scale_factor,
        dtype=dtype,
        pipeline=pipeline,
        max_sequence_length=max_sequence_length,
    )
