"""Values of an adapter, for its tests."""

from torch import Tensor

from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy


def snapshot(policy: QwenImagePolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}
