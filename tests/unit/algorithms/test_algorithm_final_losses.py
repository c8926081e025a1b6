"""Tests of DiffusionNFT and DPO against independent implementations: losses, random draws, fixed points."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, detached, draw
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import AlgorithmConfig, Config, RewardTerm
from async_flowrl.training.forward_passes import means_of_levels
from tests.support.peer_losses import CASES, EXPECTED, IMAGES, LEVELS, REWARDS, WEIGHTS, inputs
from tests.unit.algorithms.algorithm_cases import SIGMAS, Network, build, check_gradient, final_rows, frozen, nudged


def nft_reference(batch: MicroBatch, nets: dict[str, Network], settings: dict[str, Any]) -> Tensor:
    """Sum over rows, float64, from the draws and the paper's formulas."""
    noise, _ = draw(batch, batch.seeds)
    total = torch.zeros((), dtype=torch.float64)
    beta, bound = settings.get("beta", 1.0), settings.get("adv_clip_max", 5.0)
    for row in range(len(batch.seeds)):
        x0, t = batch.latents[row].double(), SIGMAS[int(batch.steps[row])]
        xt = (1 - t) * x0 + t * noise[row].double()
        v, old, ref = (
            torch.tanh(xt @ nets[name].w.double() + t * nets[name].u.double())
            for name in ("current", "old", "reference")
        )
        old, ref = old.detach(), ref.detach()
        A = max(-bound, min(bound, float(batch.advantages[row])))
        mode = settings.get("advantage_mode", "continuous")
        A = {
            "continuous": A,
            "positive_only": max(A, 0.0),
            "negative_only": min(A, 0.0),
            "one_only": 1.0 if A > 0 else 0.0,
            "binary": float(np.sign(A)),
        }[mode]
        r = min(1.0, max(0.0, A / bound / 2 + 0.5))
        parts = []
        for u in (beta * v + (1 - beta) * old, (1 + beta) * old - beta * v):
            d = (xt - t * u) - x0
            parts.append((d.square() / max(float(d.detach().abs().mean()), 1e-5)).mean())
        total = total + (r * parts[0] + (1 - r) * parts[1]) / beta * bound
        total = total + settings.get("kl_coef", 0.0) * (v - ref).square().mean()
    return total


def nets() -> dict[str, Network]:
    current = Network(3, seed=1)
    return {"current": current, "old": nudged(current, 0.1, seed=3), "reference": nudged(current, 0.2, seed=4)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1},
        {"beta": 0.5, "adv_clip_max": 2.0},
        {"kl_coef": 0.3},
        *({"advantage_mode": mode} for mode in ("positive_only", "negative_only", "one_only", "binary")),
    ],
)
def test_nft_value_and_gradient(settings: dict[str, Any]) -> None:
    algorithm = build(name="diffusion_nft", **settings)
    assert not algorithm.vanishes_at_zero, "off the old policy an advantage of 0 pulls back"
    batch, networks = final_rows(4, 2, [1.0, -1.5, 0.0, 9.0]), nets()
    by_name = {"behaviour": networks["old"], "reference": networks["reference"]}
    others = {name: algorithm.predict(batch, frozen(by_name[name])) for name in algorithm.needs}
    output = algorithm.loss(batch, algorithm.predict(batch, networks["current"]), others)
    expected = nft_reference(batch, networks, settings)
    assert output.loss.shape == (8,) and output.loss.dtype == torch.float32
    assert output.loss.double().sum().item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradient(output.loss, expected, networks["current"], rtol=1e-3, atol=1e-4)


def test_noise_is_standard_and_mixed_at_the_rows_levels() -> None:
    batch = final_rows(1, 1, [1.0], tokens=2)
    many = replace(
        batch,
        latents=batch.latents.expand(4000, -1, -1),
        sigma=torch.linspace(0.1, 1.0, 4000),
        seeds=tuple(range(4000)),
    )
    noise, noised = draw(many, many.seeds)
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 1) < 0.03
    t = many.sigma.reshape(-1, 1, 1)
    assert torch.allclose(noised, (1 - t) * many.latents + t * noise)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_dpo_value_and_gradient(levels: int, beta: float) -> None:
    algorithm, networks = build(name="dpo", beta=beta), nets()
    batch = final_rows(2, levels, [0.8, -1.2])
    reference = {"reference": algorithm.predict(batch, frozen(networks["reference"]))}
    output = algorithm.loss(batch, algorithm.predict(batch, networks["current"]), reference)
    noise, _ = draw(batch, list(batch.seeds[:levels]) * 2)
    total = torch.zeros((), dtype=torch.float64)
    for level in range(levels):
        gains = []
        for row in (level, levels + level):
            x0, eps, t = batch.latents[row].double(), noise[level].double(), SIGMAS[int(batch.steps[row])]
            xt = (1 - t) * x0 + t * eps
            e, e_ref = (
                (torch.tanh(xt @ nets_.w.double() + t * nets_.u.double()) - (eps - x0)).square().mean()
                for nets_ in (networks["current"], networks["reference"])
            )
            gains.append(e - e_ref.detach())
        total = total + 2 * torch.log1p(torch.exp(beta / 2 * (gains[0] - gains[1])))
    assert output.loss.shape == (2 * levels,)
    assert torch.equal(output.loss[:levels], output.loss[levels:]), "both rows carry the pair's loss"
    assert output.loss.sum().item() == pytest.approx(total.item(), rel=1e-4)
    check_gradient(output.loss, total, networks["current"], rtol=1e-2, atol=1e-3)


def vgrpo_reference(
    batch: MicroBatch, nets_: dict[str, Network], *, levels: int, clip: float, eta: float | None, kl: float
) -> Tensor:
    """Sum over rows, float64, as the paper writes it: errors of x0_hat, one ratio per image."""
    noise, _ = draw(batch, batch.group_seeds)
    total = torch.zeros((), dtype=torch.float64)
    for image in range(len(batch.seeds) // levels):
        surrogates, penalty = {"current": [], "proximal": []}, 0.0
        for row in range(image * levels, (image + 1) * levels):
            x0, s = batch.latents[row].double(), SIGMAS[int(batch.steps[row])]
            xs = (1 - s) * x0 + s * noise[row].double()
            clean = {
                name: xs - s * torch.tanh(xs @ nets_[name].w.double() + s * nets_[name].u.double())
                for name in surrogates
            }
            for name, predicted in clean.items():
                error = predicted - x0
                surrogates[name].append((error.square() / error.abs().mean().detach()).mean())
            penalty = penalty + kl * (clean["current"] - clean["proximal"].detach()).square().mean()
        new, old = (torch.stack(surrogates[name]).mean() for name in ("current", "proximal"))
        ratio, A = torch.exp(old.detach() - new), float(batch.advantages[image * levels])
        A = eta * float(np.tanh(A / eta)) if eta is not None else max(-5.0, min(5.0, A))
        total = total + penalty - levels * torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return total


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({}, {"clip": 0.01, "eta": None, "kl": 0.0}),
        ({"adv_clip": "tanh", "adv_clip_max": 3.0}, {"clip": 0.01, "eta": 3.0, "kl": 0.0}),
        ({"clip_range": 5e-4, "kl_coef": 0.3}, {"clip": 5e-4, "eta": None, "kl": 0.3}),
    ],
)
def test_vgrpo_value_and_gradient(settings: dict[str, Any], reference: dict[str, Any]) -> None:
    algorithm = build(name="vgrpo", updates_per_batch=2, forward=None, **{"clip_range": 0.01, **settings})
    batch, networks = final_rows(4, 3, [1.0, -1.5, 0.2, 9.0]), nets()
    networks["proximal"] = nudged(networks["current"], 0.01, seed=5)
    old = {"proximal": algorithm.predict(batch, frozen(networks["proximal"]))}
    output = algorithm.loss(batch, algorithm.predict(batch, networks["current"]), old)
    expected = vgrpo_reference(batch, networks, levels=3, **reference)
    assert output.loss.sum().item() == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < float(output.metrics["clip_fraction"].mean()) < 1 or reference["clip"] == 0.01
    check_gradient(output.loss, expected, networks["current"], rtol=1e-5, atol=1e-5)


def test_vgrpo_needs_all_levels_of_an_image_from_the_second_optimizer_step_on() -> None:
    assert build(name="vgrpo", forward=1).needs == ("proximal",)
    with pytest.raises(ValueError, match="timesteps_per_forward=null"):
        build(name="vgrpo", updates_per_batch=2, forward=1)
    with pytest.raises(ValueError, match="kl_coef"):
        build(name="vgrpo", kl_coef=0.3)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["diffusion_nft", "dpo", "awm", "vgrpo", "dgpo", "crd"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_training_moves_the_right_way_and_the_wrong_way(name: str, sign: float) -> None:
    """Images near +1 are good: the flow's own x0 prediction moves towards them, or away when negated."""
    torch.manual_seed(0)
    beta = {"diffusion_nft": 1.0, "dpo": 10.0, "dgpo": 10.0, "crd": 1.0}
    algorithm: Any = build(name=name, **({"beta": beta[name]} if name in beta else {}))
    network, reference = Network(3, seed=1), Network(3, seed=1)
    base = final_rows(2, 5, [sign, -sign])
    goal = torch.cat([torch.ones(5, 4, 3), -torch.ones(5, 4, 3)])
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for step in range(40):
        batch = replace(base, latents=goal, next_latents=goal, seeds=tuple(range(10 * step, 10 * step + 10)))
        batch = replace(batch, group_seeds=batch.seeds[:5] * 2)
        fixed = algorithm.predict(batch, frozen(reference))
        others, current = dict.fromkeys(algorithm.needs, fixed), algorithm.predict(batch, network)
        others.pop("proximal", None)  # Each step is the first of its batch.
        if hasattr(algorithm, "group_terms"):
            terms = algorithm.group_terms(batch, detached(current), others)
            batch = replace(batch, group_means=means_of_levels(batch, terms))
        loss = algorithm.loss(batch, current, others).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, sigma = torch.randn(500, 4, 3), torch.full((500,), 0.9)
    predicted = [(x - 0.9 * net(x, sigma)).mean() for net in (network, reference)]
    assert sign * float(predicted[0] - predicted[1]) > 0.05


ALL: dict[str, Any] = json.loads(EXPECTED.read_text())
RECORDED = ALL["cases"]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_peer(case: str) -> None:
    name, ours, _ = CASES[case]
    algorithm: Any = build(name=name, **ours)
    batch, networks = inputs()
    current = algorithm.predict(batch, networks["current"])
    others = {needed: algorithm.predict(batch, frozen(networks[needed])) for needed in algorithm.needs}
    if hasattr(algorithm, "group_terms"):
        terms = algorithm.group_terms(batch, detached(current), others)
        batch = replace(batch, group_means=means_of_levels(batch, terms))
    output = algorithm.loss(batch, current, others)
    losses, gradients = RECORDED[case]
    assert output.loss.reshape(IMAGES, LEVELS).mean(dim=0).tolist() == pytest.approx(losses, rel=1e-5, abs=1e-6)
    got = torch.autograd.grad(output.loss.sum() / IMAGES, list(networks["current"].parameters()))
    for value, expected in zip(got, map(torch.tensor, gradients), strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_gdpo_advantages_are_those_of_the_peer() -> None:
    algorithm = build(combine="gdpo")
    assert not algorithm.group_local
    rewards = {name: [np.array(group) for group in groups] for name, groups in REWARDS.items()}
    found = np.concatenate(algorithm.advantages(rewards, weights=WEIGHTS))
    assert found == pytest.approx(ALL["gdpo"], abs=1e-5) and found.std() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="hand_over=batch"):
        build(combine="gdpo", hand_over="stream")


def test_gdpo_needs_every_reward_of_a_group() -> None:
    config = Config(algorithm=AlgorithmConfig(combine="gdpo"), hand_over="batch")
    config.reward.terms = {"color": RewardTerm(), "judge": RewardTerm(required=False)}
    with pytest.raises(ValueError, match=r"reward\.terms\.judge\.required=true"):
        build_algorithm(config)
