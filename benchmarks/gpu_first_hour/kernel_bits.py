"""Stage `kernels`: with deterministic=true each kind of work gives the same bits twice, and in a second process.

The work is what trainer and rollout compute, in bfloat16 and in float32: attention, addmm, a convolution of the VAE,
the network with its LoRA, AdamW, and the exact sum of gradients.
"""

import gc
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from async_flowrl.cli.doctor import software
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.policies.kernels import repeatable_kernels
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import DTYPES, load_policy, resolve_model
from async_flowrl.seeds import derive, generator
from async_flowrl.tickets.request import sampling
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.types import ByteArray
from benchmarks.gpu_first_hour.sizes import HEAD_DIM, Sizes, one_block, sizes_here
from benchmarks.gpu_first_hour.task import Task
from separation.node import free_memory
from separation.ray_internals import gpus_here

ROWS, TEXT_TOKENS = 4, 128
"""Images in a batch, and tokens of a prompt."""
Work = Callable[[], Sequence[Tensor]]
"""Function that computes tensors from inputs that are equal in every call."""


def kernels(task: Task) -> None:
    """Says versions and machine, then for each kind of work whether its bits repeat. A refused kernel is not ok."""
    machine = {"cores": os.cpu_count(), "memory": free_memory(), "shm": shutil.disk_usage("/dev/shm").free}
    machine["locked_memory"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    seen = {"torch": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())], "ray": gpus_here()}
    task.say("machine", software=software(), machine=machine, cards=seen)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        elsewhere = other.submit(all_digests, task.work, 1)
        twice = all_digests(task.work, 2)
        beside = elsewhere.result()
    for name, digests in twice.items():
        everywhere = sorted({*digests, *beside[name]})
        again = "refused" not in everywhere[-1] and len(everywhere) == 1
        task.say(name, ok=again, **({} if again else {"twice": digests, "other process": beside[name]}))


def all_digests(work: Path, rounds: int) -> dict[str, list[str]]:
    """Returns `<work> in <dtype>` → one digest per round, with deterministic kernels on the first device."""
    repeatable_kernels()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes_here()
    digests: dict[str, list[str]] = {}
    for name, dtype in DTYPES.items():
        for part in (single_kernels, of_the_model):
            for what, compute in part(work, sizes, name, dtype, device).items():
                digests[f"{what} in {name}"] = [digest(compute) for _ in range(rounds)]
            gc.collect()
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
        bytes_of: ByteArray = result.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        taken.update(bytes_of.data)
    return taken.hexdigest()


def drawn(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns standard normal values that depend only on the name and the shape, so they are equal in every process."""
    return torch.randn(list(shape), generator=generator(derive(0, "first hour", name))).to(device, dtype)


def single_kernels(_: Path, sizes: Sizes, name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Work]:
    """Returns the work of single kernels with the model's shapes."""
    tokens, width = (sizes.resolution // 16) ** 2, HEAD_DIM * sizes.heads
    make, channels = partial(drawn, dtype=dtype, device=device), 96 if sizes.full else 8
    bias, rows, weights = make("b", (1, width)), make("x", (ROWS * tokens, width)), make("w", (width, width))
    shape = (ROWS, sizes.heads, tokens + TEXT_TOKENS, HEAD_DIM)
    query, key, value, above = (make(each, shape) for each in ("q", "k", "v", "dy"))
    picture = make("image", (1, channels, 1, sizes.resolution, sizes.resolution))
    filters = make("filters", (channels, channels, 3, 3, 3))

    def attention() -> Sequence[Tensor]:
        q, k, v = (each.clone().requires_grad_() for each in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), above)]

    return {
        "attention, forward and backward": attention,
        "addmm": lambda: [torch.addmm(bias, rows, weights.T), rows.T @ rows],
        "convolution of the VAE": lambda: [nn.functional.conv3d(picture, filters, padding=1)],
        "int64 sum": lambda: [(rows.double() * 2**20).to(torch.int64).sum(0)],
    }


def of_the_model(work: Path, sizes: Sizes, name: str, dtype: torch.dtype, device: torch.device) -> Mapping[str, Work]:
    """Returns a network of one block with its LoRA, forward and backward, and AdamW's step on the LoRA."""
    words = [f"model.dtype={name}", "rollout.true_cfg_scale=1", "output_dir=none"]
    config: Config = compose_config("one_step_off", [*one_block(work, sizes), *words])
    policy: Any = load_policy(resolve_model(config.model), dtype=name, device=str(device), parts="transformer")
    add_lora(policy.transformer, config.lora, policy, config.seed)
    for key, parameter in lora_parameters(policy.transformer).items():
        parameter.data.copy_(0.02 * drawn(key, parameter.shape, torch.float32, parameter.device))
    parameters = FlatParameters(lora_parameters(policy.transformer), device)
    how = sampling(config)
    latents = drawn("latents", (ROWS, *policy.latent_shape(how.resolution)), torch.float32, device)
    shapes = policy.conditioning_shapes()
    prompt = {key: drawn(key, shape, torch.float32, device) for key, shape in shapes.items()}
    sigma = torch.full((ROWS,), 0.5, device=device)
    start = parameters.snapshot()
    gradient = drawn("gradient", start.shape, torch.float32, device)

    def network() -> Sequence[Tensor]:
        parameters.gradients.zero_()
        velocity = policy.velocity(latents, sigma, prompt, None, how)
        velocity.square().mean().backward()
        return velocity, parameters.gradients.clone()

    def optimizer_step() -> Sequence[Tensor]:
        parameters.load(start)
        optimizer = Optimizer(config.trainer, parameters)
        parameters.gradients.copy_(gradient)
        optimizer.step(config.trainer.learning_rate, optimizer.gradient_norms())
        return [parameters.snapshot()]

    return {"network with a LoRA": network, "fused AdamW": optimizer_step}
