"""Pipeline class that vllm-omni runs in its engine processes; it makes the images of tickets.

Only the transformer is vllm-omni's. The denoising loop is `DiffusersEngine`, so noise and log-probs are computed by the
same code as in the trainer.
"""

from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, cast

import diffusers
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

from async_flowrl.config.schema import Config
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import load_whole, quiet, weight_options
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.vllm_omni.engine_settings import FAMILIES, FAMILY, REQUEST, ROLLOUT
from async_flowrl.rollout.vllm_omni.extension import Adapters
from async_flowrl.types import RolloutRequest


class RolloutPipeline(nn.Module):
    """The pipeline that vllm-omni builds in each of its processes; `open_rollout` loads what is not the network."""

    supports_request_batch = True  # vllm-omni passes a batch object to `forward`; here it always holds one request.
    _dit_modules: ClassVar[list[str]] = ["transformer"]

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.device = get_local_device()
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model, subfolder="transformer", revision=None, prefix="transformer."
            )
        ]
        self.transformer = build_network(od_config.custom_pipeline_args[FAMILY], od_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the network's weights, which vllm-omni reads from the model's files. Returns the loaded names."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded

    def open_rollout(
        self, adapters: Adapters, config: Config, model: ResolvedModel, network_config: Mapping[str, Any]
    ) -> None:
        """Loads the parts that are not the network, and makes the engine; called once, before the first ticket."""
        self.adapters = adapters
        network = as_in_diffusers(model.family, self.transformer, network_config)
        policy = around_network(network, model, self.device, offload=config.rollout.text_encoder == "offload")
        policy.decode_by_parts(images=config.rollout.vae_slicing, tiles=config.rollout.vae_tiling)
        self.engine = DiffusersEngine(
            policy, batch_size=config.rollout.batch_size, device=self.device, text_encoder=config.rollout.text_encoder
        )

    def forward(self, req: Any) -> list[DiffusionOutput]:
        """Makes the images of all tickets of a request; the output's metadata has the rollouts and the LoRA version.

        The warm-up request, before `open_rollout`, gets a black image. Raises ValueError as `whole_tickets`.
        """
        if req.is_dummy_run():
            return [DiffusionOutput(output={"payload": {"image": torch.zeros(1, 3, 32, 32)}})]
        rollouts = self.engine.generate(whole_tickets(req))
        # The rollouts contain the images as uint8. vllm-omni would convert an image of the payload, so it gets none.
        payload = {"image": torch.empty(0, 3, 32, 32)}
        stamped = {"active": self.adapters.active(), "rollouts": rollouts}
        return [DiffusionOutput(output={"payload": payload, "metadata": {ROLLOUT: stamped}})]

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> tuple[Any, Any]:
        return self.adapters.load(lora_request.lora_int_id, dtype)


def around_network(network: Any, model: ResolvedModel, device: torch.device, *, offload: bool) -> PipelinePolicy:
    """Returns a policy with `network` and diffusers' other parts; `offload`: text encoders stay in host memory."""
    family = load_family(model.family)
    dtype = DTYPES[model.dtype]
    with quiet():
        stock = getattr(diffusers, family.pipeline)
        options = weight_options(dtype, None) | {"transformer": None}
        pipeline = load_whole(stock, model.path, device, text_on_host=offload, **options)
    parts = {"dtype": dtype, "pipeline": pipeline, "max_sequence_length": model.max_sequence_length}
    return family.policy_of(network, pipeline.scheduler, pipeline.vae.config, **parts)


def whole_tickets(batch: Any) -> tuple[RolloutRequest, ...]:
    """Returns the tickets of a batch. Raises ValueError for several requests, none, or another number of images."""
    if batch.num_reqs != 1:
        raise ValueError(f"one engine batch is one request's tickets, got {batch.num_reqs}: {batch.request_ids}")
    parameters = batch.sampling_params
    requests: tuple[RolloutRequest, ...] = (parameters.extra_args or {}).get(REQUEST, ())
    if not requests or not all(isinstance(request, RolloutRequest) for request in requests):
        raise ValueError(f"engine request {batch.request_id} carries no ticket")
    images = sum(len(request.images) for request in requests)
    if parameters.num_outputs_per_prompt != images:
        raise ValueError(
            f"one engine batch is whole tickets: request {batch.request_id} asks for "
            f"{parameters.num_outputs_per_prompt} images, its tickets have {images}"
        )
    return requests


def build_network(family: str, od_config: Any) -> nn.Module:
    """Returns vllm-omni's network of `family`, sized by the model's configuration, without weights."""
    from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

    kind = resolve_name(FAMILIES[family])
    settings = get_transformer_config_kwargs(od_config.tf_model_config, kind)
    engine_settings = {"od_config": od_config, "quant_config": od_config.quantization_config}
    accepted = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
    network = kind(**settings | {name: value for name, value in engine_settings.items() if name in accepted})
    if not hasattr(network, "stacked_params_mapping"):
        # The LoRA manager reads packed projections from here. Most networks set it while they load; FLUX.1's does not.
        packed: Mapping[str, Sequence[str]] = getattr(network, "packed_modules_mapping", {})
        network.stacked_params_mapping = [
            (f".{whole}", f".{part}") for whole, parts in packed.items() for part in parts
        ]
    return cast("nn.Module", network)


def as_in_diffusers(family: str, network: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Returns `network` with the call signature that the policy of `family` uses; `config` is that of diffusers."""
    return _VIEWS.get(family, _View)(network, config)


class _View(nn.Module):
    """View of a network whose signature is the same in both libraries (FLUX.1)."""

    def __init__(self, network: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.config = FrozenDict(config)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.network(*inputs, **named)


class _QwenImage(_View):
    def forward(self, *, encoder_hidden_states: Tensor, **named: Any) -> Any:
        """Adds each row's padded text length, which the rotary embedding of vllm-omni's network needs."""
        rows, length = encoder_hidden_states.shape[:2]
        return self.network(encoder_hidden_states=encoder_hidden_states, txt_seq_lens=[length] * rows, **named)


class _SD3(_View):
    def forward(self, *, return_dict: bool, **named: Any) -> tuple[Tensor]:
        """Returns a tuple: vllm-omni's network always returns diffusers' output class."""
        return (self.network(**named).sample,)


class _ZImage(_View):
    def forward(self, x: Sequence[Tensor], t: Tensor, texts: Sequence[Tensor], **named: Any) -> tuple[list[Tensor]]:
        """Runs the network once per padded text length, as vllm-omni's attends to more padding than the model's."""
        outputs: dict[int, Tensor] = {}
        lengths = [-(-len(text) // 32) for text in texts]
        for length in sorted(set(lengths)):
            rows = [row for row, row_length in enumerate(lengths) if row_length == length]
            picked = t if len(rows) == len(x) else t[torch.tensor(rows, device=t.device)]
            out, _ = self.network([x[row] for row in rows], picked, [texts[row] for row in rows])
            outputs |= dict(zip(rows, out, strict=True))
        return ([outputs[row] for row in range(len(x))],)


_VIEWS: dict[str, type[_View]] = {"qwen_image": _QwenImage, "sd3": _SD3, "z_image": _ZImage}
