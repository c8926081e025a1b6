"""The section `algorithm` of the configuration; docs/algorithms.md explains its losses and suitable values.

docs/write_configuration.py copies the field texts to docs/configuration.md.
"""

from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.settings import setting

SDE_TYPES = ("sde", "dance_sde", "cps", "ode")


@dataclass
class AlgorithmConfig:
    """How rewards become gradients, and which denoising steps are noisy and trained."""

    name: str = "flow_grpo"
    """Registered name, or `pkg.module:attr` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for an algorithm of your own; the built-in ones use the fields below."""
    final_images: bool = False
    """An algorithm of your own trains on final images: it samples without noise, like diffusion_nft and dpo."""
    sde_type: str = setting("sde", choices=SDE_TYPES)
    """How noise enters a denoising step: sde (Flow-GRPO), dance_sde (DanceGRPO), cps (coefficients-preserving), or ode
    for none, which only algorithms on final images can train with."""
    noise_level: float = setting(1.0, at_least=0)
    """Factor on the noise of a step; for cps at most 1."""
    window: str = setting("none", choices=("none", "random", "sliding", "list", "fraction"))
    """Which denoising steps get noise and are trained: none (all but the last), random or sliding (adjacent steps),
    list (steps of window_list), fraction (noise everywhere, a random share trained)."""
    sde_window_size: int | None = setting(None, at_least=1)
    """Denoising steps in the window; random and sliding need it, list takes all of window_list where it is null."""
    sde_window_range: tuple[int, int] | None = setting(None, pair=True)
    """Half-open range of denoising steps, by index, that may get noise; null = (0, num_inference_steps - 1)."""
    window_per: str = setting("group", choices=("group", "step"))
    """Whether each group draws its own window, or all groups of a training step share one."""
    window_interval: int = setting(25, at_least=1)
    """sliding: updates before the window moves by one."""
    window_decay: str = setting("none", choices=("none", "linear", "exponential"))
    """sliding: how the interval shrinks at later places (MixGRPO's variants); none keeps it."""
    window_interval_min: int = setting(1, at_least=1)
    """linear decay: updates of the interval that would be reached at the last step that may be noisy."""
    window_decay_start: int = 13
    """exponential decay: index, in denoising steps, of the window's start up to which the interval stays whole."""
    window_decay_rate: float = setting(0.1, at_least=0)
    """exponential decay: rate per denoising step beyond it."""
    window_list: list[int] | None = None
    """list: the denoising steps, by index, that may be noisy and trained."""
    timestep_fraction: float = setting(1.0, above=0, at_most=1)
    """Share of the noisy steps (fraction) or of the schedule's levels (algorithms on final images) that is trained,
    drawn at random; 1 = all."""
    timestep_range: tuple[int, int] | None = setting(None, pair=True)
    """Algorithms on final images: half-open range of the schedule's noise levels, by index from the noisiest on, at
    which images may be trained; null = all of them. timestep_fraction is then the share of these."""
    same_initial_noise: bool = False
    """All images of a group start from one noise (DanceGRPO), so that only the noise of the steps tells them apart."""
    clip_range: float = setting(1e-4, above=0)
    """Trust region of one batch: how far the probability ratio may leave 1 before its gradient is cut; for flow_dppo,
    the divergence at which a row is dropped. Acts from the second optimizer step of a batch on."""
    clip_unit: str = setting("mean", choices=("mean", "nats"))
    """mean: bounds the ratio of mean log-probs (published recipes); nats: the true log-ratio, at any resolution."""
    step_weight: str = setting("none", choices=("none", "variance"))
    """variance: weighs each denoising step's surrogate by the variance of its noise. Without, the last noisy steps,
    whose densities are the sharpest, make most of the gradient's norm and say least about the image."""
    max_kl_per_update: float | None = setting(None, above=0)
    """Nats per image, summed over the denoising steps, by which one optimizer step may move the policy: its trust
    region (exact Gaussian KL, measured after it). A longer one is scaled down. null = measured at every tenth only."""
    kl_probe_images: int = setting(2, at_least=0)
    """Images of the first trained group, a micro-batch at most, on which that KL is measured: two forward passes at
    every denoising step; 0 = none."""
    kl_coef: float = setting(0.0, at_least=0)
    """Coefficient of the KL penalty; 0 = none. Above 0 each batch costs a forward pass of the reference model."""
    kl_form: str = setting("code", choices=("code", "exact", "proximal"))
    """code: without sqrt(h), as the published coefficients assume. exact: the Gaussian KL per latent element.
    proximal: half the squared log-ratio to the weights at the start of the batch (MixGRPO), without a reference."""
    adv_clip_max: float = setting(5.0, above=0, infinite=True)
    """Advantages are clamped to plus or minus this: standard deviations of the reward, or its own scale with
    normalise=none. flow_dppo does not clamp."""
    global_std: bool = False
    """Divide by the reward std of the whole batch instead of the group's. Needs batch hand-over."""
    normalise: str = setting("std", choices=("std", "none"))
    """std: divide by the reward std. none: only subtract the mean (Dr.GRPO)."""
    combine: str = setting("sum", choices=("sum", "per_reward"))
    """Several rewards: sum (weighted, then normalised) or per_reward (each normalised, then summed)."""
    correction: str | None = setting(None, choices=("none", "mask", "tis", "rollout_tis"))
    """What is done about samples of older weights: none; mask, which drops rows that moved too far; tis, truncated
    importance weights to those weights; rollout_tis, to the log-probs that the rollout recorded, so that differences
    between the engines count, too. null = none for max_staleness of at most 1, mask above."""
    correction_threshold: float = setting(0.66, above=0)
    """mask: nats per denoising step of divergence from the behaviour policy; rows at or above it that move further away
    are dropped."""
    tis_cap: float = setting(2.0, above=0)
    """tis, rollout_tis: largest importance weight; larger ones are cut to it."""
    beta: float = setting(1.0, above=0)
    """diffusion_nft: mixing coefficient; dpo: inverse temperature."""
    advantage_mode: str = setting(
        "continuous", choices=("continuous", "positive_only", "negative_only", "one_only", "binary")
    )
    """diffusion_nft: which advantages count: all as they are, those of one sign, 1 for those above 0, or only signs."""
    old_policy_decay: str = setting("copy", choices=("copy", "half", "slow", "late"))
    """diffusion_nft: share of the sampling policy that stays after update n: copy (0), half (.5), slow
    (min(.001 n, .5)) or late (0 below 75, then min(.0075 (n - 75), .999))."""
    negate_reward: bool = False
    """Falsifier for tests: train against the reward."""
    permute_advantages: bool = False
    """Falsifier for tests: shuffle the advantages inside each group."""
