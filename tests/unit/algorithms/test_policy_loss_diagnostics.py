"""Tests of the metrics and limits of policy-gradient losses: KL, clipping, gaps, masks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.algorithms.algorithm_cases import Network, frozen, policy_gradient, rows
from tests.unit.algorithms.policy_networks import ADVANTAGES, STEPS, networks, ours


def test_kl_forms() -> None:
    """code = exact · h for diffusion steps; for cps they agree. Zero where the weights are the reference's."""
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    h = (batch.sigma - batch.sigma_next).double()
    for sde_type, factor in (("sde", h), ("dance_sde", h), ("cps", torch.ones_like(h))):
        values = {}
        for form in ("code", "exact"):
            algorithm = policy_gradient(sde_type=sde_type, noise_level=0.8, kl_coef=1.0, kl_form=form)
            values[form] = ours(algorithm, batch, nets).metrics["kl"]
            same = ours(algorithm, batch, nets | {"reference": nets["current"]}).metrics["kl"]
            assert (same == 0.0).all() and (values[form] > 0.0).all()
        assert torch.allclose(values["code"], values["exact"] * factor)


def test_the_proximal_penalty_needs_no_reference_and_is_nothing_at_the_first_step() -> None:
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    algorithm = policy_gradient(noise_level=0.8, kl_coef=1.0, kl_form="proximal", updates_per_batch=2)
    plain = policy_gradient(noise_level=0.8)
    assert "reference" not in algorithm.needs and not algorithm.vanishes_at_zero
    parameters = list(nets["current"].parameters())
    first, without = (
        torch.autograd.grad(ours(a, batch, nets, proximal=None).loss.sum(), parameters) for a in (algorithm, plain)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, without, strict=True))
    later = ours(algorithm, batch, nets)
    assert (later.metrics["kl"] > 0.0).all()
    # The field's cps log-prob is enough for it: no density, so no step is too sharp.
    field = {"sde_type": "cps", "noise_level": 0.8, "kl_coef": 1.0, "kl_form": "proximal", "updates_per_batch": 2}
    assert not policy_gradient(**field).gaussian


def test_clip_in_nats_does_not_depend_on_resolution() -> None:
    """The same true log-ratio clips at every D, while a bound on the mean scale would not."""
    for tokens in (4, 64):
        batch = rows([1, 1], [1.0, 1.0], tokens=tokens)
        algorithm = policy_gradient(noise_level=0.8, clip_unit="nats", clip_range=0.66)
        current = algorithm.predict(batch, frozen(Network(3, 1)))
        nats = torch.tensor([0.65, 0.67], dtype=torch.float64)
        proximal = dict(current, log_prob=current["log_prob"] - nats / (tokens * 3))
        assert algorithm.loss(batch, current, {"proximal": proximal}).metrics["clip_fraction"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("fields", [{}, {"correction": "mask"}])
def test_log_prob_gap_compares_equal_forms(fields: dict[str, Any]) -> None:
    """The sampler records the field's cps form; the gap to the density is taken after converting it."""
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    recorder = policy_gradient(sde_type="cps", noise_level=0.8)
    recorded = recorder.predict(batch, frozen(nets["current"]))["log_prob"]
    batch = replace(batch, rollout_log_prob=recorded.float())
    output = ours(policy_gradient(sde_type="cps", noise_level=0.8, **fields), batch, nets, proximal=None)
    assert float(output.metrics["log_prob_gap"].max()) < 1e-6
    moved = replace(batch, rollout_log_prob=recorded.float() + 0.01)
    output = ours(policy_gradient(sde_type="cps", noise_level=0.8), moved, nets, proximal=None)
    assert output.metrics["log_prob_gap"].tolist() == pytest.approx([0.01] * 8, rel=1e-3)


def test_cps_weights_are_those_of_the_density_in_either_form() -> None:
    """Metrics of the true log-ratio must not depend on which log-prob the loss uses."""
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    field, density = (
        policy_gradient(sde_type="cps", noise_level=0.8, **fields) for fields in ({}, {"clip_unit": "nats"})
    )
    for algorithm in (field, density):
        algorithm.needs = ("proximal", "behaviour")
    assert not field.gaussian and density.gaussian
    one, two = (ours(algorithm, batch, nets).metrics["behaviour_log_ratio"] for algorithm in (field, density))
    assert torch.allclose(one, two, atol=1e-9)


def kept_by_sign(algorithm: Any, kl: float, *, images: int = 400) -> tuple[float, float]:
    """Shares of rows with A > 0 and A < 0 that keep their gradient; the policy has moved by `kl` nats per step."""
    generator = torch.Generator().manual_seed(29)
    batch = rows([1] * images, [1.0, -1.0] * (images // 2), tokens=64, channels=16)
    mean, shift, noise = (torch.randn(batch.latents.shape, generator=generator) for _ in range(3))
    std, elements = torch.full((images,), 0.5), batch.latents[0].numel()
    shift *= (2 * kl * 0.25 / shift.square().sum(dim=(1, 2), keepdim=True)).sqrt()
    sampled = mean + 0.5 * noise

    def predicted(center: torch.Tensor) -> dict[str, torch.Tensor]:
        log_prob = -(sampled - center).double().square().sum(dim=(1, 2)) / (2 * 0.25 * elements)
        return {"log_prob": log_prob, "mean": center, "std": std}

    metrics = algorithm.loss(batch, predicted(mean + shift), {"behaviour": predicted(mean)}).metrics
    assert metrics["behaviour_divergence"].mean() == pytest.approx(kl, rel=1e-3)
    shares = [float(metrics[f"kept_{sign}"].sum() / metrics[f"rows_{sign}"].sum()) for sign in ("positive", "negative")]
    return shares[0], shares[1]


def test_by_default_the_mask_keeps_what_bounded_updates_of_the_allowed_age_can_reach() -> None:
    """Two updates of 20 nats are 40 to 80 nats away, 10 to 20 in each of four noisy steps."""
    fields: dict[str, Any] = {"correction": "mask", "max_staleness": 2, "max_kl_per_update": 20.0}
    default = policy_gradient(**fields)
    assert default.threshold(1024) == 2 * 20.0 * 2**2 / 4
    for kl in (10.0, 20.0):
        assert kept_by_sign(default, kl) == (1.0, 1.0)
        positive, negative = kept_by_sign(policy_gradient(**fields, correction_threshold=0.66), kl)
        assert positive > 0.97 and negative < 0.1
    assert kept_by_sign(default, 50.0)[1] < 0.1
    twice = policy_gradient(**fields, updates_per_batch=2)
    assert twice.threshold(1024) == 2 * 20.0 * 5**2 / 4
