"""The tiny Qwen-Image model for tests, with an adapter that changes its output, and requests for it."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_flowrl.config.schema import LoraConfig, ModelConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.seeds import derive, generator
from async_flowrl.types import TRAIN, Prompt, RolloutRequest, Sampling

RED = Prompt(0, "red red red red")


def tiny_policy(*, parts: str = "all", dtype: str = "float32") -> QwenImagePolicy:
    policy = load_policy(resolve_model(ModelConfig(dtype=dtype)), dtype=dtype, device="cpu", parts=parts)
    assert isinstance(policy, QwenImagePolicy)
    return policy


def adapted_policy(
    *, config: LoraConfig | None = None, parts: str = "all", dtype: str = "float32", strength: float = 0.3
) -> QwenImagePolicy:
    """Returns the policy with a LoRA whose B is random instead of zero, so that it changes the output."""
    policy = tiny_policy(parts=parts, dtype=dtype)
    add_lora(policy.transformer, config or LoraConfig(8, 16.0), policy, seed=0)
    randomise(lora_parameters(policy.transformer), strength)
    return policy


def randomise(parameters: Mapping[str, Tensor], strength: float = 0.3) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            if ".lora_B." in name:
                parameter.copy_(strength * torch.randn(parameter.shape, generator=generator(derive(1, name))))


def sampling(*, cfg: float = 1.0, steps: int = 6, sde_type: str = "sde", noise_level: float = 1.0) -> Sampling:
    return Sampling(32, steps, cfg, 0.0, "a grey, dull and blurry picture", sde_type, noise_level)


def request(
    n: int = 4,
    *,
    how: Sampling | None = None,
    noise_steps: tuple[int, ...] = (0, 1, 2, 3, 4),
    train_steps: tuple[int, ...] | None = None,
    kind: str = TRAIN,
    prompt: Prompt = RED,
) -> RolloutRequest:
    return RolloutRequest(
        kind=kind,
        ordinal=0,
        step=0,
        group=0,
        version=2,
        prompt=prompt,
        images=tuple(range(n)),
        initial_seeds=tuple(derive(7, "initial", i) for i in range(n)),
        noise_seeds=tuple(derive(7, "noise", i) for i in range(n)),
        noise_steps=noise_steps,
        train_steps=noise_steps if train_steps is None else train_steps,
        sampling=how or sampling(),
    )


def token_ids(text: str, system: str | None = None) -> list[int]:
    """Returns the token ids of `text` inside the model's prompt template; `system` replaces the template's own."""
    tokenizer, template = _tokenizer()
    if system is not None:
        template = template.replace(template.split("system\n")[1].split("<|im_end|>")[0], system)
    return list(tokenizer(template.replace("{}", text)).input_ids)


@cache
def _tokenizer() -> tuple[Any, str]:
    """The tokenizer of the model, and its prompt template."""
    pipeline = tiny_policy().whole("tokenise")
    return pipeline.tokenizer, str(pipeline.prompt_template_encode)


def tensors(conditioning: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in conditioning.items()}


def save_lora(folder: Path, transformer: nn.Module, *, alpha: float) -> Path:
    """Writes the LoRA of a transformer as diffusers' file and returns its path."""
    return lora_file.write(folder, lora_parameters(transformer), alpha=alpha)
