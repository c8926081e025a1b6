"""Tests of the policy-gradient estimators against the exact gradient of a linear-Gaussian flow."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms.policy_gradient import PolicyGradient
from tests.unit.algorithms.algorithm_cases import policy_gradient
from tests.unit.algorithms.algorithm_referee import (
    BEHAVIOUR,
    CURRENT,
    OTHER,
    SIGMAS,
    D,
    coefficients,
    deviations,
    estimate,
    per_step_target,
)

LAND, MISS = 4.0, 15.0
SDE = {"sde_type": "sde", "noise_level": 0.7}
DANCE = {"sde_type": "dance_sde", "noise_level": 0.5}
CPS = {"sde_type": "cps", "noise_level": 0.8}
STD = torch.tensor([coefficients(i, "sde", 0.7)[2] for i in range(4)], dtype=torch.float64)
CPS_STD = torch.tensor([coefficients(i, "cps", 0.8)[2] for i in range(4)], dtype=torch.float64)
STEP_SIZE = torch.tensor([SIGMAS[i] - SIGMAS[i + 1] for i in range(4)], dtype=torch.float64)
MEAN_OVER_D = torch.full((4,), float(D), dtype=torch.float64)


def unclipped(**fields: Any) -> PolicyGradient:
    """An algorithm whose clips and caps never bind, with advantages that are only centred."""
    clamp = {} if fields.get("name") == "flow_dppo" else {"adv_clip_max": 1e6}
    wide = {"normalise": "none", **clamp, "clip_range": 1e6, "tis_cap": 1e9}
    return cast("PolicyGradient", policy_gradient(**{**wide, **fields}))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        (SDE, MEAN_OVER_D),
        (DANCE, MEAN_OVER_D),
        (DANCE | {"name": "dance_grpo", "window": "fraction"}, MEAN_OVER_D),
        (SDE | {"name": "mix_grpo", "window": "sliding", "sde_window_size": 2}, MEAN_OVER_D),
        (CPS | {"clip_unit": "nats"}, MEAN_OVER_D),
        # The field's cps log-prob is 2 std² times the density's: the same gradient after dividing step by step.
        (CPS, MEAN_OVER_D / (2 * CPS_STD**2)),
        (SDE | {"name": "flow_dppo"}, MEAN_OVER_D),
        (CPS | {"name": "flow_dppo"}, MEAN_OVER_D),
        # GRPO-Guard weighs each step by std / h.
        (SDE | {"name": "grpo_guard"}, MEAN_OVER_D * STEP_SIZE / STD),
    ],
    ids=["sde", "dance_sde", "dance_grpo", "mix_grpo", "cps-density", "cps-field", "dppo", "dppo-cps", "guard"],
)
def test_on_policy_estimators_land(fields: dict[str, Any], scale: Tensor) -> None:
    algorithm = unclipped(**fields)
    config = algorithm.config
    exact = per_step_target(CURRENT, CURRENT, config.sde_type, config.noise_level).sum(dim=0)
    estimated = estimate(algorithm, current=CURRENT, sampler=CURRENT, behaviour=None, scale=scale)
    assert deviations(estimated, exact) < LAND


@pytest.mark.parametrize("fields", [SDE, DANCE, CPS], ids=["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("name", ["flow_grpo", "flow_dppo"])
def test_stale_estimators_with_correction_land(name: str, fields: dict[str, Any]) -> None:
    algorithm = unclipped(**fields, name=name, correction="tis")
    exact = per_step_target(CURRENT, BEHAVIOUR, fields["sde_type"], fields["noise_level"]).sum(dim=0)
    estimated = estimate(algorithm, current=CURRENT, sampler=BEHAVIOUR, behaviour=BEHAVIOUR, scale=MEAN_OVER_D)
    assert deviations(estimated, exact) < LAND


@pytest.mark.extended
@pytest.mark.parametrize("fields", [SDE, DANCE, CPS], ids=["sde", "dance_sde", "cps"])
def test_stale_estimators_with_weights_to_the_recorded_log_probs_land(fields: dict[str, Any]) -> None:
    """`rollout_tis` needs no prediction of the behaviour policy: what the sampler recorded is enough."""
    algorithm = unclipped(**fields, correction="rollout_tis")
    assert "behaviour" not in algorithm.needs
    exact = per_step_target(CURRENT, BEHAVIOUR, fields["sde_type"], fields["noise_level"]).sum(dim=0)
    estimated = estimate(algorithm, current=CURRENT, sampler=BEHAVIOUR, behaviour=None, scale=MEAN_OVER_D)
    assert deviations(estimated, exact) < LAND


@pytest.mark.extended
@pytest.mark.parametrize("fields", [SDE, DANCE, CPS], ids=["sde", "dance_sde", "cps"])
@pytest.mark.parametrize("wrong", [None, OTHER, CURRENT], ids=["uncorrected", "halfway", "current"])
def test_stale_estimators_without_the_right_correction_miss(wrong: Any, fields: dict[str, Any]) -> None:
    exact = per_step_target(CURRENT, BEHAVIOUR, fields["sde_type"], fields["noise_level"]).sum(dim=0)
    density = {"clip_unit": "nats"} if fields is CPS else {}
    algorithm = unclipped(**fields, **({"correction": "none"} | density if wrong is None else {"correction": "tis"}))
    estimated = estimate(algorithm, current=CURRENT, sampler=BEHAVIOUR, behaviour=wrong, scale=MEAN_OVER_D)
    assert deviations(estimated, exact) > MISS


def test_flipped_sign_misses() -> None:
    exact = per_step_target(CURRENT, CURRENT, "sde", 0.7).sum(dim=0)
    flipped = unclipped(**SDE, negate_reward=True)
    estimated = estimate(flipped, current=CURRENT, sampler=CURRENT, behaviour=None, scale=MEAN_OVER_D)
    assert deviations(estimated, exact) > MISS
    assert deviations(estimated, -exact) < LAND
