"""Tests of the registry of algorithms: names, defaults and refusals."""

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.algorithms.diffusion_nft import ADVANTAGE_MODES, DiffusionNFT
from async_flowrl.algorithms.ema import OLD_POLICY_DECAYS
from async_flowrl.algorithms.flow_grpo import FlowGRPO
from async_flowrl.algorithms.registry import (
    BUILT_IN,
    FINAL,
    MEMBERS,
    NOISY,
    USED_BY,
    build_algorithm,
    check_schedule,
    resolve_correction,
    unused_field,
)
from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.schema import AlgorithmConfig, Config
from async_flowrl.config.settings import settings
from tests.unit.algorithms.algorithm_cases import build

GOOD: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "dance_grpo": {"sde_type": "dance_sde", "noise_level": 0.3},
    "mix_grpo": {"window": "sliding", "sde_window_size": 2},
    "grpo_guard": {},
    "flow_dppo": {},
    "diffusion_nft": {},
    "dpo": {"beta": 100.0},
}


class Blurred(FlowGRPO):
    """Predicts less than its trust region reads."""

    predicts = ("log_prob",)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_loss_reads_what_it_says_and_no_more(name: str) -> None:
    """With a configuration that asks for nothing besides, every other tensor of the prediction may be missing."""
    algorithm = build(name=name, **GOOD[name], kl_probe_images=0)
    batch = micro_batch()
    current = algorithm.predict(batch, lambda latents, sigma: 0.1 * latents)
    assert set(current) == set(algorithm.predicts)
    lean: Any = {key: value for key, value in current.items() if key in algorithm.reads}
    needed = [lean if wanted else None for wanted in (algorithm.needs_behaviour, algorithm.needs_reference)]
    assert torch.isfinite(algorithm.loss(batch, lean, lean, *needed).loss).all()
    if name == "flow_grpo":
        assert algorithm.reads == ("log_prob",)
        assert build(name=name, kl_coef=0.1, kl_probe_images=0).reads == ("log_prob", "mean", "std")


def micro_batch() -> MicroBatch:
    """Two rows of one step, a winner and a loser."""
    latents = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    return MicroBatch(
        latents=latents,
        next_latents=latents + 0.1,
        sigma=torch.full((2,), 0.7),
        sigma_next=torch.full((2,), 0.5),
        steps=torch.tensor([1, 1]),
        sigmas=torch.tensor([1.0, 0.7, 0.5, 0.0]),
        advantages=torch.tensor([1.0, -1.0]),
        positive=(True, False),
        rollout_log_prob=torch.zeros(2),
        seeds=(1, 2),
        age=0,
    )


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_name_builds_what_the_protocol_wants(name: str) -> None:
    algorithm = build(name=name, **GOOD[name])
    assert algorithm.name == name and all(hasattr(algorithm, member) for member in MEMBERS)
    assert algorithm.records == ("final" if name in ("diffusion_nft", "dpo") else "transitions")
    assert algorithm.group_local


def test_unknown_names_list_what_exists_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"dance_grpo, .*, mix_grpo, got 'flow_gpro'; did you mean 'flow_grpo'"):
        build(name="flow_gpro")


@pytest.mark.parametrize(
    ("staleness", "given", "resolved"),
    [
        (0, None, "none"),
        (1, None, "none"),
        (2, None, "mask"),
        (5, None, "mask"),
        (2, "none", "none"),
        (1, "tis", "tis"),
    ],
)
def test_default_correction(staleness: int, given: str | None, resolved: str) -> None:
    assert resolve_correction(AlgorithmConfig(correction=given), staleness) == resolved
    algorithm = build(correction=given, max_staleness=staleness)
    assert algorithm.needs_behaviour == (resolved != "none")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "grpo_guard", "sde_type": "cps", "noise_level": 0.8},
            "grpo_guard is derived for .*sde only, got cps",
        ),
        ({"name": "grpo_guard", "sde_type": "dance_sde"}, "got dance_sde"),
        ({"name": "dance_grpo"}, "dance_grpo needs algorithm.sde_type=dance_sde, got sde"),
        ({"name": "mix_grpo"}, "mix_grpo needs algorithm.window=sliding or random, got none"),
        ({"sde_type": "ode"}, "needs noisy steps"),
        ({"noise_level": 0.0}, "needs noisy steps"),
        ({"sde_type": "cps", "noise_level": 1.2}, r"\[0, 1\] for cps"),
        ({"noise_level": -0.1}, "noise_level must be at least 0"),
        ({"noise_level": float("nan")}, "noise_level must be a finite number"),
        ({"sde_type": "cpss"}, "did you mean 'cps'"),
        ({"clip_unit": "nat"}, "did you mean 'nats'"),
        ({"kl_form": "exakt"}, "did you mean 'exact'"),
        ({"correction": "masks"}, "did you mean 'mask'"),
        ({"clip_range": 0.0}, r"^algorithm\.clip_range must be above 0, got 0\.0$"),
        ({"clip_range": float("nan")}, r"^algorithm\.clip_range must be a finite number, got nan$"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0"),
        ({"tis_cap": -1.0}, "tis_cap"),
        ({"correction_threshold": 0.0}, "correction_threshold"),
        ({"beta": 0.0, "name": "dpo"}, "beta"),
        ({"name": "diffusion_nft", "correction": "mask"}, "algorithm.correction=mask has no effect with diffusion_nft"),
        ({"name": "dpo", "correction": "tis"}, "correction=tis has no effect with dpo"),
        ({"old_policy_decay": "slow"}, "old_policy_decay=slow has no effect with flow_grpo.*; diffusion_nft uses it"),
        ({"name": "diffusion_nft", "old_policy_decay": "fast"}, "old_policy_decay must be one of copy, half, late"),
        ({"name": "diffusion_nft", "advantage_mode": "binari"}, "did you mean 'binary'"),
        ({"global_std": True, "hand_over": "stream"}, "global_std needs hand_over=batch"),
        ({"window": "random"}, "sde_window_size"),
        ({"options": {"strength": 1}}, "options are for algorithms of your own, got {'strength': 1} for flow_grpo"),
        ({"kl_coef": 0.1, "kl_form": "proximal"}, "needs trainer.updates_per_batch of at least 2, got 1"),
        ({"name": "dpo", "kl_coef": 0.1}, "algorithm.kl_coef=0.1 has no effect with dpo"),
        ({"name": "diffusion_nft", "adv_clip_max": float("inf")}, "adv_clip_max=inf would make every loss"),
        (
            {"name": f"{__name__}:Blurred"},
            r"the loss of .*Blurred reads mean, std of a prediction.*predict gives log_prob",
        ),
        ({"normalise": "mean"}, "normalise must be one of none, std"),
        ({"combine": "sums"}, "did you mean 'sum'"),
        ({"adv_clip_max": 0.0}, "adv_clip_max must be above 0"),
        ({"adv_clip_max": float("nan")}, "adv_clip_max must be above 0, got nan"),
        ({"window": "slidng"}, "did you mean 'sliding'"),
        ({"window_per": "batch"}, "window_per must be one of group, step"),
        ({"window_decay": "linearr"}, "did you mean 'linear'"),
        ({"window_decay_rate": -0.1}, "decay_rate must be at least 0"),
        ({"window_interval": 0}, "window_interval must be at least 1"),
        ({"window_interval_min": 0}, "interval_min must be at least 1"),
        ({"timestep_fraction": 0.0}, "timestep_fraction must be above 0 and at most 1, got 0"),
        (
            {"timestep_range": (0, 3)},
            "algorithm.timestep_range is for final images, flow_grpo trains on noisy steps",
        ),
        (
            {"name": "diffusion_nft", "timestep_range": (50, 99)},
            r"timestep_range must have some of \(0, \d+\), .*got \(50, 99\)",
        ),
        ({"name": "diffusion_nft", "timestep_range": (3, 3)}, r"got \(3, 3\)"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(**fields)
    assert "\n" not in str(caught.value)


def test_every_choice_of_a_formula_has_one() -> None:
    choices = {key: set(rule.choices) for key, _, rule in settings(AlgorithmConfig())}
    assert choices["advantage_mode"] == set(ADVANTAGE_MODES)
    assert choices["old_policy_decay"] == set(OLD_POLICY_DECAYS)


def test_streaming_works_with_group_statistics() -> None:
    assert build(hand_over="stream").group_local
    assert not build(global_std=True).group_local


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("own_algorithms")

    class Mine(FlowGRPO):
        name = "mine"

        def __init__(self, config: AlgorithmConfig, *, correction: str, strength: float = 1.0) -> None:
            super().__init__(config, correction=correction)
            self.strength = strength

    class NoBehaviour(Mine):
        def __init__(self, config: AlgorithmConfig, *, correction: str) -> None:
            super().__init__(config, correction="none")

    class Half:
        def __init__(self, config: AlgorithmConfig, *, correction: str) -> None:
            self.name = "half"

    class OnImages(DiffusionNFT):
        name = "on_images"

    module.OnImages = OnImages  # type: ignore[attr-defined]
    module.Mine, module.NoBehaviour, module.Half = Mine, NoBehaviour, Half  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_algorithms", module)
    return module


def test_own_algorithm_by_path(own: types.ModuleType) -> None:
    algorithm: Any = build(name="own_algorithms:Mine", options={"strength": 3.0}, correction="mask")
    assert isinstance(algorithm, own.Mine) and algorithm.strength == 3.0 and algorithm.needs_behaviour


@pytest.mark.usefixtures("own")
def test_own_algorithm_on_final_images() -> None:
    """Said in the configuration, because the rollout's requests are made without importing anything."""
    config = {"name": "own_algorithms:OnImages", "max_staleness": 2}
    assert build(**config, final_images=True).records == "final"
    window = draw_window(
        AlgorithmConfig(name="own_algorithms:OnImages", final_images=True),
        num_inference_steps=5,
        seed=0,
        step=0,
        group=0,
    )
    assert window.noise_steps == ()
    with pytest.raises(ValueError, match=r"records 'final', so algorithm\.final_images must be true"):
        build(**config)
    with pytest.raises(ValueError, match=r"records 'transitions', so algorithm\.final_images must be false"):
        build(final_images=True)


@pytest.mark.usefixtures("own")
def test_own_algorithm_refusals() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'Mine'"):
        build(name="own_algorithms:Mime")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError: No module named 'nowhere'"):
        build(name="nowhere:Mine")
    with pytest.raises(ValueError, match=r"is not an algorithm: it lacks records, .*loss"):
        build(name="own_algorithms:Half")
    with pytest.raises(ValueError, match=r"no behaviour term, so max_staleness=2 needs algorithm.correction=none"):
        build(name="own_algorithms:NoBehaviour", max_staleness=2)
    assert build(name="own_algorithms:NoBehaviour", correction="none", max_staleness=2).name == "mine"
    assert build(name="own_algorithms:NoBehaviour", max_staleness=0).name == "mine"


SD3 = torch.tensor((1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0))


@pytest.mark.parametrize(
    "fields", [{"kl_coef": 0.1}, {"correction": "tis"}, {"clip_unit": "nats"}, {"name": "flow_dppo"}]
)
def test_schedules_with_sharp_cps_steps_are_refused_where_a_density_is_used(fields: dict[str, Any]) -> None:
    config = AlgorithmConfig(**{"sde_type": "cps", "noise_level": 0.8} | fields)
    check_schedule(replace(config, sde_window_range=(0, 8)), SD3, max_staleness=1)
    with pytest.raises(ValueError, match=r"std 0\.0085"):
        check_schedule(config, SD3, max_staleness=1)
    with pytest.raises(ValueError, match=r"std 0\.0085"):
        check_schedule(replace(config, window="list", window_list=[8, 1]), SD3, max_staleness=1)


def test_sharp_cps_steps_are_trained_where_no_density_is_used() -> None:
    config = AlgorithmConfig(sde_type="cps", noise_level=0.8)
    check_schedule(config, SD3, max_staleness=1)
    with pytest.raises(ValueError, match=r"std 0\.0085"):
        check_schedule(config, SD3, max_staleness=2)


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft"])
def test_schedules_must_be_schedules(name: str) -> None:
    with pytest.raises(ValueError, match="strictly"):
        check_schedule(AlgorithmConfig(name=name), torch.tensor([1.0, 0.5, 0.5, 0.0]), max_staleness=0)


def test_levels_near_one_matter_to_noisy_sde_steps_alone() -> None:
    near = torch.tensor([1.0, 0.9995, 0.5, 0.0])
    check_schedule(AlgorithmConfig(name="diffusion_nft"), near, max_staleness=0)
    with pytest.raises(ValueError, match=r"0\.999"):
        check_schedule(AlgorithmConfig(), near, max_staleness=0)


OTHER: dict[str, Any] = {
    "sde_type": "cps", "noise_level": 0.5, "window": "random", "sde_window_size": 2, "sde_window_range": (0, 3),
    "window_per": "step", "window_interval": 3, "window_decay": "linear", "window_interval_min": 2,
    "window_decay_start": 5, "window_decay_rate": 0.2, "window_list": [1], "clip_range": 0.2, "clip_unit": "nats",
    "step_weight": "variance", "max_kl_per_update": 1.0, "kl_probe_images": 3, "kl_form": "exact", "correction": "mask",
    "correction_threshold": 0.5, "tis_cap": 3.0, "timestep_range": (0, 3), "kl_coef": 0.1, "adv_clip_max": 3.0,
    "beta": 0.5, "advantage_mode": "binary", "old_policy_decay": "half", "zero_std_groups": "drop",
}  # fmt: skip
"""Field → another value than its default."""


@pytest.mark.parametrize("name", [*NOISY, *FINAL])
@pytest.mark.parametrize("field", sorted(OTHER))
def test_a_field_that_an_algorithm_does_not_use_is_refused_by_name(name: str, field: str) -> None:
    """Every pair of the table; what is used is refused, if at all, for another reason."""
    config = replace(AlgorithmConfig(name=name), **{**GOOD[name], field: OTHER[field]})
    refusal = unused_field(config)
    assert (refusal is None) == (name in USED_BY[field])
    if refusal is not None:
        assert f"algorithm.{field}=" in refusal and name in refusal
        with pytest.raises(ValueError, match=rf"algorithm\.{field}|timestep_range"):
            build_algorithm(Config(algorithm=config))


def test_the_table_names_every_field_and_algorithm_that_there_is() -> None:
    assert USED_BY.keys() == OTHER.keys() and {*NOISY, *FINAL} == BUILT_IN.keys()
    assert all(getattr(AlgorithmConfig(), field) != value for field, value in OTHER.items())
