"""python docs/learn/drawings.py draws the pictures of docs/learn with the project's own steps and losses."""

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from async_flowrl.algorithms.advantage import compute_advantages
from async_flowrl.algorithms.flow_grpo import clipped_surrogate
from async_flowrl.algorithms.sde import transition
from async_flowrl.config.schema import AlgorithmConfig

IMAGES = Path(__file__).parents[1] / "images"
PLACES, WIDTH = (-2.0, 2.0), 0.35
"""The "images" of the toy are numbers near -2 or near 2: a mixture of two normal distributions of this width."""
STEPS, PATHS = 40, 60


def velocity(x: Tensor, sigma: float) -> Tensor:
    """E[eps - x0 | x] [n] at noise level sigma, exact for the mixture."""
    spread = (1 - sigma) ** 2 * WIDTH**2 + sigma**2
    means = torch.tensor([(1 - sigma) * place for place in PLACES])
    weights = torch.softmax(-((x[:, None] - means) ** 2) / (2 * spread), dim=1)
    residual = x[:, None] - means
    x0 = torch.tensor(PLACES) + (1 - sigma) * WIDTH**2 / spread * residual
    eps = sigma / spread * residual
    return (weights * (eps - x0)).sum(dim=1)


def paths(noise_level: float, seed: int) -> Tensor:
    """[STEPS + 1, PATHS] from noise to data: Euler steps where noise_level is 0, Flow-GRPO's noisy ones elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    sigmas = torch.linspace(1, 0, STEPS + 1)
    kind = "sde" if noise_level else "ode"
    x = torch.randn(PATHS, 1, generator=generator) if not noise_level else torch.zeros(PATHS, 1) + 0.3
    states = [x]
    for now, after in pairwise(sigmas):
        step = transition(
            x,
            velocity(x[:, 0], float(now))[:, None],
            now.expand(PATHS),
            after.expand(PATHS),
            sigma_after_first=sigmas[1],
            sde_type=kind if float(after) > 0 else "ode",
            noise_level=noise_level,
        )
        x = step.mean + step.std * torch.randn(PATHS, 1, generator=generator)
        states.append(x)
    return torch.cat(states, dim=1).T


def draw_paths() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    titles = ("ODE: the noise at the start decides everything", "SDE: one start, many endings")
    for axis, level, title in zip(axes, (0.0, 0.7), titles, strict=True):
        states = paths(level, seed=1)
        ends = states[-1] > 0
        for column in range(PATHS):
            axis.plot(states[:, column], color="tab:orange" if ends[column] else "tab:blue", alpha=0.4, linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("denoising step (left: noise, right: image)")
    axes[0].set_ylabel("x, a one-pixel image")
    save(figure, "learn_paths")


def draw_advantages() -> None:
    rewards = np.array([0.33, 0.33, 0.67, 0.0, 1.0, 0.33, 0.67, 0.33])
    (advantages,) = compute_advantages({"ocr": [rewards]}, AlgorithmConfig())
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8))
    names = [str(i) for i in range(len(rewards))]
    axes[0].bar(names, rewards, color="0.6")
    axes[0].axhline(rewards.mean(), color="black", linewidth=0.8, linestyle="--")
    axes[0].set_title("reward of each image of one prompt", fontsize=10)
    axes[1].bar(names, advantages, color=["tab:orange" if a > 0 else "tab:blue" for a in advantages])
    axes[1].axhline(0, color="black", linewidth=0.8)
    axes[1].set_title("advantage: (reward - mean) / std of the group", fontsize=10)
    for axis in axes:
        axis.set_xlabel("image")
    save(figure, "learn_advantages")


def draw_clip() -> None:
    ratio = torch.linspace(0.6, 1.4, 400, dtype=torch.float64)
    low, high = torch.full_like(ratio, 0.8), torch.full_like(ratio, 1.2)
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        surrogate = clipped_surrogate(ratio, torch.full_like(ratio, advantage), low, high)
        axis.plot(ratio, -surrogate.loss, color="black")
        axis.axvspan(0.8, 1.2, color="tab:green", alpha=0.1)
        axis.set_title(f"what is maximised, advantage {advantage:+.0f}", fontsize=10)
        axis.set_xlabel("ratio: new probability / old probability of a step")
    save(figure, "learn_clip")


def draw_modes() -> None:
    """Generation of 3 time units and training of 2 per step, on a pool each."""
    generation, training, steps = 3.0, 2.0, 4
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.0), sharex=True)
    for axis, staleness, title in zip(axes, (0, 1), ("sync: K = 0", "one_step_off: K = 1"), strict=True):
        trained: list[float] = []
        generated: list[float] = []
        for step in range(steps):
            needed = step - staleness - 1
            start = max(generated[-1] if generated else 0.0, trained[needed] if needed >= 0 else 0.0)
            generated.append(start + generation)
            begin = max(generated[-1], trained[-1] if trained else 0.0)
            trained.append(begin + training)
            age = min(step, staleness)
            bars = [
                (1, start, generation, f"step {step} (v{step - age})"),
                (0, begin, training, f"train {step}"),
            ]
            for row, left, width, text in bars:
                axis.barh(
                    row, width, left=left, color="tab:orange" if row else "tab:blue", edgecolor="white", alpha=0.8
                )
                axis.text(left + width / 2, row, text, ha="center", va="center", fontsize=8)
        axis.set_yticks([0, 1], ["trainer", "rollout"])
        axis.set_title(title, fontsize=10)
    axes[1].set_xlabel("time; white is an idle pool")
    save(figure, "learn_modes")


def save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    for draw in (draw_paths, draw_advantages, draw_clip, draw_modes):
        draw()


if __name__ == "__main__":
    main()
