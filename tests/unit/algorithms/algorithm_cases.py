"""Small micro-batches and networks for tests of losses."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.algorithms.base import Algorithm, MicroBatch, Velocity
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.check import check
from async_flowrl.config.schema import AlgorithmConfig, Config

SIGMAS = (1.0, 0.9, 0.75, 0.55, 0.3, 0.0)


def build(
    *,
    max_staleness: int = 1,
    hand_over: str = "batch",
    updates_per_batch: int = 1,
    forward: int | None = 1,
    **fields: Any,
) -> Algorithm:
    """The algorithm, refused as a run would refuse it."""
    config = Config(max_staleness=max_staleness, hand_over=hand_over, algorithm=AlgorithmConfig(**fields))
    config.trainer.updates_per_batch, config.trainer.timesteps_per_forward = updates_per_batch, forward
    config.rollout.num_inference_steps = len(SIGMAS) - 1
    check(config)
    return build_algorithm(config)


def policy_gradient(**fields: Any) -> Any:
    return cast("Any", build(**fields))


class Network(nn.Module):
    """v = tanh(x W + s u), float64 or float32; small enough to differentiate numerically."""

    def __init__(self, channels: int, seed: int, scale: float = 0.3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(scale * torch.randn(channels, channels, generator=generator))
        self.u = nn.Parameter(scale * torch.randn(channels, generator=generator))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return torch.tanh(x @ self.w + sigma.reshape(-1, 1, 1) * self.u)


def nudged(network: Network, size: float, seed: int) -> Network:
    """A copy with other weights, `size` away."""
    channels = network.u.numel()
    other, direction = Network(channels, 0), Network(channels, seed, scale=1.0)
    with torch.no_grad():
        for target, base, step in zip(other.parameters(), network.parameters(), direction.parameters(), strict=True):
            target.copy_(base + size * step)
    return other


def check_gradient(loss: Tensor, expected: Tensor, network: Network, *, rtol: float, atol: float) -> None:
    """The gradients of both are the same, `atol` relative to the largest element of each tensor."""
    parameters = list(network.parameters())
    got, wanted = (torch.autograd.grad(value.sum(), parameters) for value in (loss, expected))
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=rtol, atol=atol * float(other.abs().max()))


def frozen(network: Network) -> Velocity:
    return lambda x, sigma: network(x, sigma).detach()


def rows(steps: list[int], advantages: list[float]) -> MicroBatch:
    """Rows whose x' lies within a plausible distance of x."""
    generator = torch.Generator().manual_seed(0)
    index, sigmas = torch.tensor(steps), torch.tensor(SIGMAS)
    latents = torch.randn(len(steps), 4, 3, generator=generator)
    return MicroBatch(
        latents=latents,
        next_latents=latents + 0.5 * torch.randn(latents.shape, generator=generator),
        sigma=sigmas[index],
        sigma_next=sigmas[index + 1],
        steps=index,
        sigmas=sigmas,
        advantages=torch.tensor(advantages),
        positive=tuple(value > 0 for value in advantages),
        rollout_log_prob=torch.zeros(len(steps)),
        seeds=tuple(range(100, 100 + len(steps))),
        age=1,
    )


def final_rows(
    samples: int, levels: int, advantages: list[float], *, tokens: int = 4, channels: int = 3, seed: int = 0
) -> MicroBatch:
    """Rows of an algorithm that trains on final images: each sample `levels` times, at the last steps."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(samples, tokens, channels, generator=generator).repeat_interleave(levels, dim=0)
    last = len(SIGMAS) - 1
    index = torch.arange(last - levels, last).repeat(samples)
    sigmas = torch.tensor(SIGMAS)
    return MicroBatch(
        latents=latents,
        next_latents=latents,
        sigma=sigmas[index],
        sigma_next=sigmas[index + 1],
        steps=index,
        sigmas=sigmas,
        advantages=torch.tensor(advantages).repeat_interleave(levels),
        positive=tuple(value > 0 for value in advantages for _ in range(levels)),
        rollout_log_prob=torch.zeros(samples * levels),
        seeds=tuple(range(500, 500 + samples * levels)),
        age=1,
        group_seeds=tuple(range(900, 900 + levels)) * samples,
    )
