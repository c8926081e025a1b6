"""Names and shapes of the network, known without its weights: what the adapter and the base weights look like."""

from dataclasses import dataclass
from typing import cast

import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from async_flowrl.config.schema import Config
from async_flowrl.policies.loading import quiet
from async_flowrl.policies.lora import targeted_modules
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import DTYPES, ResolvedModel


@dataclass(frozen=True)
class NetworkPlan:
    """Shapes by layout name: of the adapter's tensors and of the base weights."""

    adapter: dict[str, tuple[int, ...]]
    base: dict[str, tuple[int, ...]]


def network_plan(folder: str, config: Config) -> NetworkPlan:
    """Raises ValueError where `lora.targets` names no layer of the network."""
    with quiet(), torch.device("meta"):
        described = QwenImageTransformer2DModel.load_config(folder, subfolder="transformer")
        network = cast("nn.Module", QwenImageTransformer2DModel.from_config(described))
    policy = QwenImagePolicy(network, None, side=1, dtype=DTYPES[config.model.dtype])
    adapter: dict[str, tuple[int, ...]] = {}
    for name in targeted_modules(network, config.lora, policy):
        layer = cast("nn.Linear", network.get_submodule(name))
        adapter[f"{name}.lora_A.weight"] = (config.lora.rank, layer.in_features)
        adapter[f"{name}.lora_B.weight"] = (layer.out_features, config.lora.rank)
    return NetworkPlan(adapter, {name: tuple(p.shape) for name, p in network.named_parameters()})


def local_folder(model: ResolvedModel) -> str:
    """The model as a folder at exactly its revision: vllm-omni would take the hub's newest."""
    if model.revision is None:
        return model.path
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model.path, revision=model.revision))
