"""Tests of the registry of algorithms: names, defaults and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from async_flowrl.algorithms.diffusion_nft import DiffusionNFT
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
from async_flowrl.config.schema import AlgorithmConfig, Config
from tests.unit.algorithms.algorithm_cases import build, final_rows

GOOD: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "dance_grpo": {"sde_type": "dance_sde", "noise_level": 0.3},
    "mix_grpo": {"window": "sliding", "sde_window_size": 2},
    "grpo_guard": {},
    "flow_dppo": {},
    "diffusion_nft": {},
    "dpo": {"beta": 100.0},
    "awm": {},
    "vgrpo": {},
    "dgpo": {},
    "crd": {},
    "direct_align": {},
}


TAUGHT: dict[str, Any] = {"teachers": {"a": "a.safetensors"}, "teacher_coef": 1.0}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_loss_reads_what_it_says_and_no_more(name: str) -> None:
    """With a configuration that asks for nothing besides, every other tensor of the prediction may be missing."""
    algorithm = build(name=name, **GOOD[name], kl_probe_images=0)
    batch = replace(final_rows(2, 1, [1.0, -1.0]), score=lambda latents: latents.flatten(1).mean(dim=1))
    current = algorithm.predict(batch, lambda latents, sigma: 0.1 * latents)
    assert set(current) == set(algorithm.predicts)
    lean: Any = {key: value for key, value in current.items() if key in algorithm.reads}
    others = dict.fromkeys(algorithm.needs, lean)
    if terms := getattr(algorithm, "group_terms", None):
        batch = replace(batch, group_means=terms(batch, lean, others))
    assert torch.isfinite(algorithm.loss(batch, lean, others).loss).all()
    if name == "flow_grpo":
        assert algorithm.reads == ("log_prob",)
        assert build(name=name, kl_coef=0.1, kl_probe_images=0).reads == ("log_prob", "mean", "std")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_name_builds_what_the_protocol_wants(name: str) -> None:
    algorithm = build(name=name, **GOOD[name])
    assert algorithm.name == name and all(hasattr(algorithm, member) for member in MEMBERS)
    assert algorithm.records == ("final" if name in FINAL else "transitions")
    assert algorithm.group_local


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
    assert ("behaviour" in algorithm.needs) == (resolved != "none")


class Mine(FlowGRPO):
    name = "mine"
    uses = "any text"  # which has a meaning on final images only

    def __init__(self, config: AlgorithmConfig, *, correction: str, strength: float = 1.0) -> None:
        super().__init__(config, correction=correction)
        self.strength = strength


def test_own_algorithm_by_path() -> None:
    algorithm: Any = build(name=f"{__name__}:Mine", options={"strength": 3.0}, correction="mask")
    assert isinstance(algorithm, Mine) and algorithm.strength == 3.0 and "behaviour" in algorithm.needs


class Misspelt(DiffusionNFT):
    name = "on_images"


def function(config: AlgorithmConfig, *, correction: str) -> Misspelt:
    return Misspelt(config, correction=correction)


@pytest.mark.parametrize(
    ("member", "names", "named"),
    [
        ("uses", ("references",), "'references'; did you mean 'reference'"),
        ("predicts", ("velocity", "noisd"), "'noisd'; did you mean 'noised'"),
        ("predicts", "velocity", "`predicts` of an algorithm must be a tuple"),
        ("uses", "reference", "`uses` of an algorithm must be a tuple"),
    ],
)
def test_an_own_algorithm_may_name_only_predictions_that_there_are(
    member: str, names: tuple[str, ...] | str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misspelt, member, names)
    for factory in ("Misspelt", "function"):
        with pytest.raises(ValueError, match=named):
            build(name=f"{__name__}:{factory}", final_images=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "dgpo", "clip_range": 0.01}, "average_decay"),
        ({"name": "crd", "reference_cfg_scale": 4.5, "kl_coef": 0.1}, "anchor"),
        ({"name": "awm", "average_decay": "quick"}, "average_coef=0,"),
        ({"name": "crd", "anchor": "average", "average_decay": None}, "anchor=average"),
        ({"reference_every": 2}, "kl_coef=0 "),
        (
            {"teachers": {"a": "x"}, "teacher_coef": 1.0, "policy_coef": 0.0, "zero_std_groups": "drop"},
            "zero_std_groups",
        ),
    ],
)
def test_settings_that_a_comparison_would_ignore_or_break_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.{named}"):
        build(**fields)


def test_no_more_images_of_a_group_train_than_it_has() -> None:
    build_algorithm(Config(group_size=4, algorithm=AlgorithmConfig(train_images_per_group=4)))
    with pytest.raises(ValueError, match=r"algorithm\.train_images_per_group=5.*group_size=4"):
        build_algorithm(Config(group_size=4, algorithm=AlgorithmConfig(train_images_per_group=5)))


def test_a_teacher_needs_steps_with_a_density() -> None:
    """The last noisy cps step has std 0.016, and a KL between such narrow Gaussians is extreme."""
    sigmas = torch.tensor([1.0, 0.5, 0.05, 0.0])
    fields: dict[str, Any] = {"sde_type": "cps", "noise_level": 0.2, "max_kl_per_update": None}
    check_schedule(AlgorithmConfig(**fields), sigmas, max_staleness=1)
    with pytest.raises(ValueError, match=r"std 0\.0155"):
        check_schedule(AlgorithmConfig(**fields, **TAUGHT), sigmas, max_staleness=1)


OTHER: dict[str, Any] = {
    "sde_type": "cps", "noise_level": 0.5, "window": "random", "sde_window_size": 2, "sde_window_range": (0, 3),
    "window_interval": 3, "window_decay": "linear", "window_interval_min": 2,
    "window_decay_start": 5, "window_decay_rate": 0.2, "window_list": [1], "clip_range": 0.2, "clip_unit": "nats",
    "step_weight": "variance", "max_kl_per_update": 1.0, "kl_probe_images": 3, "kl_form": "exact", "correction": "mask",
    "correction_threshold": 0.5, "tis_cap": 3.0, "timestep_range": (0, 3), "kl_coef": 0.1, "adv_clip_max": 3.0,
    "beta": 0.5, "advantage_mode": "binary", "old_policy_decay": "half", "zero_std_groups": "drop",
    "timestep_stratified": True, "adv_clip": "tanh", "error_weight": "ghuber", "average_decay": "half",
    "average_coef": 0.1, "reference_every": 5,
    "teachers": {"a": "a.safetensors"}, "teacher_coef": 0.5, "policy_coef": 0.0,
    "anchor": "average", "reference_cfg_scale": 4.5, "train_images_per_group": 2,
}  # fmt: skip
"""Field → another value than its default."""


@pytest.mark.parametrize("name", [*NOISY, *FINAL])
def test_a_field_that_an_algorithm_does_not_use_is_refused_by_name(name: str) -> None:
    """Every pair of the table; what is used is refused, if at all, for another reason."""
    for field, value in OTHER.items():
        config = replace(AlgorithmConfig(name=name), **{**GOOD[name], field: value})
        refusal = unused_field(config)
        assert (refusal is None) == (name in USED_BY[field]), field
        if refusal is not None:
            assert f"algorithm.{field}=" in refusal and name in refusal
            with pytest.raises(ValueError, match=rf"algorithm\.{field}|timestep_range"):
                build_algorithm(Config(algorithm=config))
