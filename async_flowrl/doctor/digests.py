"""Digests of the same work, made N times in one process; check `determinism` starts several such processes.

python -m async_flowrl.doctor.digests SETTING OUT --rounds N [--deterministic]

The work is what the trainer and the rollout compute, in bfloat16 and in float32, at the sizes of the setting.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from async_flowrl.config.schema import Config
from async_flowrl.config.sections.trainer import TrainerConfig
from async_flowrl.doctor.model import configuration, model_overrides
from async_flowrl.doctor.setting import Setting
from async_flowrl.policies.base import Policy
from async_flowrl.policies.kernels import repeatable_kernels
from async_flowrl.policies.lora import add_lora, lora_modules, lora_parameters
from async_flowrl.policies.registry import DTYPES, load_policy, resolve_model
from async_flowrl.seeds import derive, generator
from async_flowrl.tickets.request import sampling
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.types import ByteArray

ROWS = 4
"""Images in a batch."""
Work = Callable[[], Sequence[Tensor]]
"""Function that computes tensors from inputs that are equal in every call; its results are digested."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m async_flowrl.doctor.digests")
    parser.add_argument("setting", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args(arguments)
    if given.deterministic:
        repeatable_kernels()
    digests = all_digests(Setting.read(given.setting), torch.device("cuda", 0), given.rounds)
    given.out.write_text(json.dumps(digests), encoding="utf-8")
    return 0


def all_digests(setting: Setting, device: torch.device, rounds: int) -> dict[str, list[str]]:
    """Returns `<work> in <dtype>` → one digest per round, or, instead of a digest, why a kernel refused."""
    digests: dict[str, list[str]] = {}
    for name, dtype in DTYPES.items():
        work = {**products(setting, dtype, device), **of_the_model(setting, name, device)}
        for what, compute in work.items():
            digests[f"{what} in {name}"] = [digest(compute) for _ in range(rounds)]
        del work
    return digests


def digest(compute: Work) -> str:
    """Returns XXH3-128 over the bytes of all results, in order; "refused: …" if a kernel has no deterministic form."""
    try:
        results = compute()
    except RuntimeError as error:
        if "determinis" not in str(error).lower():
            raise
        return f"refused: {str(error).splitlines()[0]}"
    taken = xxhash.xxh3_128()
    for result in results:
        bytes_of: ByteArray = result.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        taken.update(bytes_of.data)
    return taken.hexdigest()


def drawn(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns standard normal values that depend only on the name and the shape, so they are equal in every process."""
    return torch.randn(list(shape), generator=generator(derive(0, "doctor", name))).to(device, dtype)


def products(setting: Setting, dtype: torch.dtype, device: torch.device) -> dict[str, Work]:
    """Returns matrix products, and attention forward and backward, with the model's shapes."""
    heads = setting.sizes.heads
    tokens = (setting.sizes.resolution // 16) ** 2
    a, b = (drawn(name, (ROWS * tokens, 128 * heads), dtype, device) for name in ("a", "b"))
    query, key, value, above = (drawn(n, (ROWS, heads, tokens, 128), dtype, device) for n in ("q", "k", "v", "dy"))

    def matmul() -> Sequence[Tensor]:
        return a @ b.T, a.T @ b

    def attention() -> Sequence[Tensor]:
        q, k, v = (each.clone().requires_grad_() for each in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), above)]

    return {"matrix product": matmul, "attention": attention}


def of_the_model(setting: Setting, dtype: str, device: torch.device) -> dict[str, Work]:
    """Returns a LoRA layer and a network of one block, forward and backward, and an optimizer step on its LoRA."""
    config = configuration(setting, *model_overrides(setting, dtype=dtype, layers=1))
    policy = load_policy(resolve_model(config.model), dtype=dtype, device="cpu", parts="transformer")
    add_lora(policy.transformer, config.lora, policy, config.seed)
    for name, parameter in lora_parameters(policy.transformer).items():
        parameter.data.copy_(drawn(name, parameter.shape, torch.float32, torch.device("cpu")) * 0.02)
    parameters = FlatParameters(lora_parameters(policy.transformer), device)
    policy.transformer.to(device)
    return {
        "LoRA layer": lora_layer(policy, DTYPES[dtype], device),
        "network": network(config, policy, parameters, device),
        "optimizer step": optimizer_step(config.trainer, parameters),
    }


def lora_layer(policy: Policy, dtype: torch.dtype, device: torch.device) -> Work:
    """Returns the work of the first adapted layer on a batch of image tokens, forward and backward."""
    layer = next(iter(lora_modules(policy.transformer).values()))
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    width = int(next(iter(layer.parameters())).shape[-1])
    x = drawn("x", (ROWS * 256, width), dtype, device)

    def compute() -> Sequence[Tensor]:
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        return [out, *torch.autograd.grad(out.float().square().sum(), [inputs, *weights])]

    return compute


def network(config: Config, policy: Policy, parameters: FlatParameters, device: torch.device) -> Work:
    """Returns the work of one velocity and of the gradient of the LoRA."""
    how = sampling(config)
    latents = drawn("latents", (ROWS, *policy.latent_shape(how.resolution)), torch.float32, device)
    prompt = {name: drawn(name, each.shape, each.dtype, device) for name, each in text(policy)}
    sigma = torch.full((ROWS,), 0.5, device=device)

    def compute() -> Sequence[Tensor]:
        parameters.gradients.zero_()
        velocity = policy.velocity(latents, sigma, prompt, None, how)
        velocity.square().mean().backward()  # type: ignore[no-untyped-call]
        return velocity, parameters.gradients.clone()

    return compute


def text(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Names of a prompt's conditioning, with tensors on the meta device that give the shapes."""
    shapes = policy.conditioning_shapes()  # type: ignore[attr-defined]
    yield from ((name, torch.zeros(shape, device="meta")) for name, shape in shapes.items())


def optimizer_step(config: TrainerConfig, parameters: FlatParameters) -> Work:
    """Returns the work of a gradient norm, clipping and one AdamW step, from equal weights and with empty moments."""
    start = parameters.snapshot()
    gradient = drawn("gradient", start.shape, torch.float32, start.device)

    def compute() -> Sequence[Tensor]:
        parameters.load(start)
        optimizer = Optimizer(config, parameters)
        parameters.gradients.copy_(gradient)
        optimizer.step(config.learning_rate, optimizer.gradient_norm())
        return [parameters.snapshot()]

    return compute


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the answer is written; a hang while autograd's threads end does not concern this check
