"""Cost of the algorithms' code in an update of the tiny model: `python tests/unit/algorithms/algorithm_cost.py`.

For each algorithm, one forward and backward pass over 80 rows with the network, and the same with a network that costs
nothing (one multiplication). The ratio is the share of everything that is not the network; medians, one thread.
"""

import statistics
from time import perf_counter

import torch
from torch import Tensor

from async_flowrl.algorithms.base import Algorithm, MicroBatch, Velocity
from async_flowrl.algorithms.registry import BUILT_IN, build_algorithm
from async_flowrl.config.schema import AlgorithmConfig, Config, LoraConfig, ModelConfig
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import add_lora
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.types import Sampling

STEPS, SAMPLES, REPEATS = 6, 16, 5
FIELDS = {
    "dance_grpo": {"sde_type": "dance_sde", "noise_level": 0.3},
    "mix_grpo": {"window": "random", "sde_window_size": 5},
}


def rows(policy: Policy, algorithm: Algorithm) -> MicroBatch:
    torch.manual_seed(0)
    sigmas = policy.sigmas(STEPS, 32)
    samples = 2 if algorithm.name == "dpo" else SAMPLES
    steps = torch.arange(STEPS - 1).repeat_interleave(samples)
    latents = torch.randn(len(steps), *policy.latent_shape(32))
    return MicroBatch(
        latents=latents,
        next_latents=latents + 0.1 * torch.randn_like(latents),
        sigma=sigmas[steps],
        sigma_next=sigmas[steps + 1],
        steps=steps,
        sigmas=sigmas,
        advantages=torch.tensor([1.0, -1.0]).repeat(len(steps) // 2),
        positive=(True, False) * (len(steps) // 2),
        rollout_log_prob=torch.zeros(len(steps)),
        seeds=tuple(range(len(steps))),
        age=1,
    )


def seconds(algorithm: Algorithm, batch: MicroBatch, velocity: Velocity) -> float:
    """Median of the live pass with everything beside it that is not a network pass."""
    fixed = {name: value.detach() for name, value in algorithm.predict(batch, velocity).items()}
    reference = fixed if algorithm.needs_reference else None
    behaviour = fixed if algorithm.needs_behaviour else None
    found = []
    for _ in range(REPEATS):
        began = perf_counter()
        current = algorithm.predict(batch, velocity)
        algorithm.loss(batch, current, None, behaviour, reference).loss.mean().backward()
        found.append(perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    torch.set_num_threads(1)
    policy = load_policy(resolve_model(ModelConfig()), dtype="float32", device="cpu", parts="all")
    add_lora(policy.transformer, LoraConfig(8, 16.0), policy, seed=0)
    encoded = policy.encode(["red red red red"])[0]
    conditioning = {name: torch.from_numpy(value) for name, value in encoded.items()}
    sampling = Sampling(32, STEPS, 1.0, 0.0, " ", "sde", 1.0)
    weight = torch.ones((), requires_grad=True)

    def network(x: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(x, sigma, conditioning, None, sampling)

    for name in sorted(BUILT_IN):
        config = Config(algorithm=AlgorithmConfig(name=name, **FIELDS.get(name, {})))
        config.rollout.num_inference_steps = STEPS
        algorithm = build_algorithm(config)
        batch = rows(policy, algorithm)
        whole, own = seconds(algorithm, batch, network), seconds(algorithm, batch, lambda x, sigma: weight * x)
        print(f"{name:14s} update {1e3 * whole:7.2f} ms, algorithm {1e3 * own:6.3f} ms, {100 * own / whole:5.2f} %")


if __name__ == "__main__":
    main()
