"""Tests of policy-gradient losses and their gradients against an independent float64 implementation, row by row."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from tests.unit.algorithms.algorithm_cases import SIGMAS, Network, check_gradient, frozen, nudged, policy_gradient, rows
from tests.unit.algorithms.policy_networks import ADVANTAGES, STEPS, D, networks, ours, statistics


def reference_loss(name: str, batch: MicroBatch, networks: dict[str, Network], settings: dict[str, Any]) -> Tensor:
    """Sum over rows of the whole loss, written out per row with plain branches."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(STEPS)):
        A, eps = float(batch.advantages[row]), settings["clip_range"]
        clamped = max(-5.0, min(5.0, A))
        h = SIGMAS[STEPS[row]] - SIGMAS[STEPS[row] + 1]
        now, mean, std = statistics(networks["current"], batch, row, 0.8)
        with torch.no_grad():
            old, old_mean, _ = statistics(networks["proximal"], batch, row, 0.8)
            sampled, sampled_mean, _ = statistics(networks["behaviour"], batch, row, 0.8)
            ref_mean = statistics(networks["reference"], batch, row, 0.8)[1]
        k_old = (mean - old_mean).square().mean() / (2 * std**2)
        if name == "grpo_guard":
            rho = torch.exp((now - old + k_old) * std)
            low, high = 1 - eps, 1 + eps
            if settings.get("clip_unit") == "nats":
                low, high = 1 - eps * std / D, 1 + eps * std / D
            loss = torch.max(-clamped * rho, -clamped * rho.clamp(low, high)) / h
        elif name == "flow_dppo":
            rho = torch.exp(now - old)
            k = float(k_old) * (D if settings.get("clip_unit") == "nats" else 1)
            away = (rho > 1 and A > 0) or (rho < 1 and A < 0)
            loss = 0.0 * rho if k >= eps and away else -A * rho
        else:
            rho = torch.exp(now - old)
            low, high = 1 - eps, 1 + eps
            if settings.get("clip_unit") == "nats":
                low, high = math.exp(-eps / D), math.exp(eps / D)
            loss = torch.max(-clamped * rho, -clamped * rho.clamp(low, high))
        if settings.get("step_weight") == "variance":
            loss = loss * std**2
        if settings.get("correction") == "tis":
            loss = loss * min(math.exp(D * float(old - sampled)), settings["tis_cap"])
        if settings.get("correction") == "rollout_tis":
            recorded = float(batch.rollout_log_prob[row])
            loss = loss * min(math.exp(D * (float(old) - recorded)), settings["tis_cap"])
        if settings.get("correction") == "mask":
            distance = D * float((mean - sampled_mean).square().mean()) / (2 * std**2)
            away = (now > sampled and A > 0) or (now < sampled and A < 0)
            loss = 0.0 * loss if distance >= settings["correction_threshold"] and away else loss
        if settings.get("kl_form") == "proximal":
            loss = loss + settings["kl_coef"] * 0.5 * (now - old) ** 2
        elif settings.get("kl_coef"):
            k_ref = (mean - ref_mean).square().mean() / (2 * std**2)
            loss = loss + settings["kl_coef"] * (k_ref if settings["kl_form"] == "exact" else k_ref * h)
        total = total + loss
    return total


ENGINE_GAP = torch.linspace(-0.02, 0.02, len(STEPS))
"""What another engine would have recorded beside the log-probs of the behaviour policy."""

CASES: list[tuple[str, dict[str, Any]]] = [
    ("flow_grpo", {"clip_range": 1e-3}),
    ("flow_grpo", {"clip_range": 0.05}),
    ("flow_grpo", {"clip_range": 0.012, "clip_unit": "nats"}),
    ("flow_grpo", {"clip_range": 0.05, "kl_coef": 0.04, "kl_form": "code"}),
    ("flow_grpo", {"clip_range": 0.05, "kl_coef": 0.04, "kl_form": "exact"}),
    ("flow_grpo", {"clip_range": 0.05, "correction": "tis", "tis_cap": 1.1}),
    ("flow_grpo", {"clip_range": 0.05, "correction": "mask", "correction_threshold": 3e-3}),
    ("flow_grpo", {"clip_range": 0.05, "step_weight": "variance", "kl_coef": 0.04, "kl_form": "exact"}),
    ("grpo_guard", {"clip_range": 2e-4, "step_weight": "variance"}),
    ("mix_grpo", {"clip_range": 1e-3, "window": "sliding", "sde_window_size": 2}),
    (
        "mix_grpo",
        {"clip_range": 0.05, "kl_coef": 40.0, "kl_form": "proximal", "window": "sliding", "sde_window_size": 2}
        | {"updates_per_batch": 2},
    ),
    ("grpo_guard", {"clip_range": 2e-4}),
    ("grpo_guard", {"clip_range": 0.05}),
    ("grpo_guard", {"clip_range": 5e-3, "clip_unit": "nats"}),
    ("grpo_guard", {"clip_range": 0.05, "correction": "tis", "tis_cap": 2.0, "kl_coef": 0.1, "kl_form": "code"}),
    ("flow_dppo", {"clip_range": 2e-4}),
    ("flow_dppo", {"clip_range": 1.0}),
    ("flow_dppo", {"clip_range": 2e-3, "clip_unit": "nats"}),
    ("flow_dppo", {"clip_range": 2e-4, "correction": "mask", "correction_threshold": 3e-3}),
    ("flow_grpo", {"clip_range": 0.05, "correction": "rollout_tis", "tis_cap": 1.1}),
    ("grpo_guard", {"clip_range": 0.05, "correction": "rollout_tis", "tis_cap": 1.5}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_value_and_gradient(name: str, settings: dict[str, Any]) -> None:
    algorithm = policy_gradient(name=name, noise_level=0.8, **settings)
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    recorded = algorithm.predict(batch, nets["behaviour"])["log_prob"].detach().float() + ENGINE_GAP
    batch = replace(batch, rollout_log_prob=recorded)
    output = ours(algorithm, batch, nets)
    assert output.loss.shape == (8,) and output.loss.dtype == torch.float32
    expected = reference_loss(name, batch, nets, settings)
    assert output.loss.double().sum().item() == pytest.approx(expected.item(), rel=2e-5, abs=2e-5)
    check_gradient(output.loss, expected, nets["current"], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("name", ["flow_grpo", "flow_dppo"])
def test_equal_weights_give_a_ratio_of_exactly_one(name: str, sde_type: str) -> None:
    algorithm = policy_gradient(name=name, sde_type=sde_type, noise_level=0.8, correction="mask")
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    nets["proximal"] = nets["behaviour"] = nets["current"]
    output = ours(algorithm, batch, nets)
    assert (output.metrics["ratio"] == 1.0).all()
    assert (output.metrics["behaviour_divergence"] == 0.0).all() and (output.metrics["importance_weight"] == 1.0).all()
    assert torch.equal(output.metrics["kept"], output.metrics["nonzero"])
    implicit = ours(algorithm, batch, nets, proximal=None)
    assert torch.equal(implicit.loss, output.loss)


def test_vanishing_at_zero_means_no_gradient() -> None:
    batch, nets = rows(STEPS, [0.0] * 8), networks()
    for name in ("flow_grpo", "grpo_guard", "flow_dppo"):
        algorithm = policy_gradient(name=name, noise_level=0.8)
        gradients = torch.autograd.grad(ours(algorithm, batch, nets).loss.sum(), list(nets["current"].parameters()))
        assert algorithm.vanishes_at_zero and all(not gradient.any() for gradient in gradients)
    assert not policy_gradient(kl_coef=0.1).vanishes_at_zero


def test_policy_coef_scales_the_surrogate_alone() -> None:
    """Not the KL to the reference, and not the teacher's."""
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    nets["teacher"] = nudged(nets["current"], 0.5, seed=9)
    fields: dict[str, Any] = {"noise_level": 0.8, "teachers": {"a": "x"}, "teacher_coef": 2.0, "kl_form": "exact"}
    half = policy_gradient(policy_coef=0.5, kl_coef=3.0, **fields)
    predictions = {name: half.predict(batch, network) for name, network in nets.items()}
    frozen = {name: predictions[name] for name in half.needs}
    output = half.loss(batch, predictions["current"], frozen)
    surrogate = policy_gradient(noise_level=0.8).loss(batch, predictions["current"], {"proximal": frozen["proximal"]})
    distances = 3.0 * output.metrics["kl"] + 2.0 * output.metrics["teacher_kl"]
    assert torch.allclose(output.loss.double(), 0.5 * surrogate.loss.double() + distances, rtol=1e-5)
    assert (output.metrics["kl"] > 0.0).all()


def test_kept_marks_exactly_the_rows_with_gradient() -> None:
    nets = networks()
    for name in ("flow_grpo", "grpo_guard", "flow_dppo"):
        algorithm = policy_gradient(
            name=name, noise_level=0.8, clip_range=3e-4, correction="mask", correction_threshold=3e-3
        )
        output = ours(algorithm, rows(STEPS, ADVANTAGES), nets)
        for row in range(8):
            (gradient,) = torch.autograd.grad(output.loss[row], [nets["current"].u], retain_graph=True)
            assert bool(output.metrics["kept"][row]) == bool(gradient.any()), (name, row)


def test_the_mask_looks_at_the_current_policy() -> None:
    """After some updates of a batch the distance to the sampler has grown, whatever the proximal policy's was."""
    batch, nets = rows(STEPS, ADVANTAGES), networks()
    nets |= {"proximal": nudged(nets["current"], 0.5, seed=8), "behaviour": nudged(nets["current"], 0.5, seed=8)}
    algorithm = policy_gradient(noise_level=0.8, clip_range=1e6, correction="mask", correction_threshold=3e-3)
    metrics = ours(algorithm, batch, nets).metrics
    assert (metrics["behaviour_divergence"] > 0).all() and float(metrics["masked"].sum()) > 0
    assert (metrics["importance_weight"] == 1.0).all(), "weights are about the proximal policy"


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


def test_by_default_the_mask_keeps_what_bounded_updates_of_the_allowed_age_can_reach() -> None:
    """Two updates of 20 nats are up to 80 nats away, 20 in each of four noisy steps; with two a batch, five are."""
    fields: dict[str, Any] = {"correction": "mask", "max_staleness": 2, "max_kl_per_update": 20.0}
    assert policy_gradient(**fields).threshold(1024) == 2 * 20.0 * 2**2 / 4
    assert policy_gradient(**fields, updates_per_batch=2).threshold(1024) == 2 * 20.0 * 5**2 / 4
