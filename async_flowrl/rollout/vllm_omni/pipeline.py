"""The pipeline that vllm-omni runs: a whole ticket per request, through the reference engine's own loop."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from async_flowrl.config.resolution import height_width
from async_flowrl.config.schema import Config
from async_flowrl.policies.loading import settle
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import DTYPES
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.vllm_omni.extension import Adapters
from async_flowrl.rollout.vllm_omni.settings import REQUEST, ROLLOUT
from async_flowrl.types import RolloutRequest


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

    def forward(self, *, encoder_hidden_states: Tensor, **inputs: Any) -> Any:
        """vllm-omni's rotary embedding wants each row's padded text length named."""
        rows, length = encoder_hidden_states.shape[:2]
        return self.network(encoder_hidden_states=encoder_hidden_states, txt_seq_lens=[length] * rows, **inputs)


class RolloutQwenImagePipeline(QwenImagePipeline):  # type: ignore[misc]
    """vllm-omni's Qwen-Image; denoising steps, noise and log-probs are `DiffusersEngine`'s and so the trainer's."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        # vllm-omni loads them in the dtype of their files; the reference computes everything in `model.dtype`.
        self.text_encoder.to(od_config.dtype)
        self.vae.to(od_config.dtype)

    def open_rollout(self, adapters: Adapters, config: Config, max_sequence_length: int | None) -> None:
        """Schedule, guidance, prompt template and decoding are the reference's; the network and its ranks vllm's."""
        self.adapters = adapters
        self.image_processor = VaeImageProcessor(vae_scale_factor=2 * self.vae_scale_factor)
        for module in (self.text_encoder, self.vae):
            settle(module, self.device)
        policy = QwenImagePolicy(
            VllmNetwork(self.transformer),
            self.scheduler,
            side=2 * self.vae_scale_factor,
            dtype=DTYPES[config.model.dtype],
            pipeline=self,
            max_sequence_length=max_sequence_length,
        )
        self.engine = DiffusersEngine(policy, batch_size=config.rollout.batch_size, device=self.device)

    def encode_prompt(self, *prompt: Any, device: Any = None, **options: Any) -> Any:
        """As the diffusers pipeline's, which is told the device; here the text encoder's is known."""
        return super().encode_prompt(*prompt, **options)

    def forward(self, req: Any) -> list[Any]:
        """One output for one request, a whole ticket; the engine's own warm-up request takes its own way.

        Raises ValueError for any other composition of a batch: the trajectory would not be the ticket's.
        """
        if req.is_dummy_run():
            return cast("list[Any]", super().forward(req))
        request = whole_ticket(req)
        rollout = self.engine.generate(request)
        # The images are bytes already and travel beside the trajectory; nothing is left for vllm-omni to convert.
        payload = {"image": torch.empty(0, 3, *height_width(request.sampling.resolution))}
        stamped = {"active": self.adapters.active(), "rollout": rollout}
        return [DiffusionOutput(output={"payload": payload, "metadata": {ROLLOUT: stamped}})]

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> tuple[Any, Any]:
        """vllm-omni's hook for adapters that are no files."""
        return self.adapters.load(lora_request.lora_int_id, dtype)


def whole_ticket(batch: Any) -> RolloutRequest:
    """The one ticket that a batch consists of; ValueError otherwise."""
    if batch.num_reqs != 1:
        raise ValueError(f"one engine batch is one whole ticket, got {batch.num_reqs} requests: {batch.request_ids}")
    parameters = batch.sampling_params
    request = (parameters.extra_args or {}).get(REQUEST)
    if not isinstance(request, RolloutRequest):
        raise ValueError(f"engine request {batch.request_id} carries no ticket")
    if parameters.num_outputs_per_prompt != len(request.images):
        raise ValueError(
            f"one engine batch is one whole ticket: request {batch.request_id} asks for "
            f"{parameters.num_outputs_per_prompt} images, ticket {request.ordinal} has {len(request.images)}"
        )
    return request
