"""The section `algorithm` of the configuration; docs/algorithms.md explains its losses and suitable values."""

from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.settings import setting

SDE_TYPES = ("sde", "dance_sde", "cps", "ode")


@dataclass
class AlgorithmConfig:
    """The loss that is trained, and which denoising steps are noisy and trained."""

    name: str = "flow_grpo"
    """Name of a built-in algorithm, or `pkg.module:attr` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for an algorithm of your own; the built-in ones use the fields below."""
    final_images: bool = False
    """true for an algorithm of your own that trains on final images, like diffusion_nft and dpo; denoising steps then
    add no noise."""
    sde_type: str = setting("sde", choices=SDE_TYPES)
    """Kind of noise in noisy denoising steps: sde (Flow-GRPO), dance_sde (DanceGRPO), cps (coefficients-preserving), or
    ode for no noise, which only algorithms on final images allow."""
    noise_level: float = setting(1.0, at_least=0)
    """Factor on the noise of a denoising step; for cps at most 1."""
    window: str = setting("none", choices=("none", "random", "sliding", "list", "fraction"))
    """Choice of the denoising steps that add noise and are trained. none: all but the last one. random, sliding:
    adjacent steps. list: steps of window_list. fraction: all but the last add noise, and a random share is trained."""
    sde_window_size: int | None = setting(None, at_least=1)
    """Denoising steps in the window. random and sliding need it; with list, null means all of window_list."""
    sde_window_range: tuple[int, int] | None = setting(None, pair=True)
    """Half-open range of denoising steps, by index, that may get noise; null = (0, num_inference_steps - 1)."""
    window_per: str = setting("group", choices=("group", "step"))
    """group: each group draws its own window. step: all groups of a training step share one."""
    window_interval: int = setting(25, at_least=1)
    """Training steps before a sliding window moves by one denoising step."""
    window_decay: str = setting("none", choices=("none", "linear", "exponential"))
    """Decay of window_interval for later positions of a sliding window (MixGRPO's variants); none keeps it constant."""
    window_interval_min: int = setting(1, at_least=1)
    """Training steps to which window_decay=linear reduces window_interval at the last step that may be noisy."""
    window_decay_start: int = 13
    """Denoising steps, by index, up to which window_decay=exponential keeps the whole window_interval."""
    window_decay_rate: float = setting(0.1, at_least=0)
    """Decay rate per denoising step after window_decay_start, with window_decay=exponential."""
    window_list: list[int] | None = None
    """Denoising steps, by index, from which window=list takes the noisy and trained ones."""
    timestep_fraction: float = setting(1.0, above=0, at_most=1)
    """Share of the noisy steps (with window=fraction) or of the noise levels (algorithms on final images) that is
    trained, drawn at random; 1 = all."""
    timestep_range: tuple[int, int] | None = setting(None, pair=True)
    """For algorithms on final images: half-open range of noise levels, by index from the noisiest, at which images may
    be trained; null = all levels. timestep_fraction is a share of this range."""
    same_initial_noise: bool = False
    """true: all images of a group start from the same noise (DanceGRPO) and differ only by the noise of later steps."""
    clip_range: float = setting(1e-4, above=0)
    """Bound of the probability ratio: how far it may leave 1 before its gradient is cut; for flow_dppo, the divergence
    at which a row is dropped. It has an effect from the second optimizer step of a batch on."""
    clip_unit: str = setting("mean", choices=("mean", "nats"))
    """mean: clip_range bounds the ratio of log-probs per latent element, as in published recipes. nats: it bounds the
    log-ratio of whole latents, so the same value suits any resolution."""
    step_weight: str = setting("none", choices=("none", "variance"))
    """variance: weight the loss of each denoising step by the variance of its noise. none: the last noisy steps, whose
    densities are the sharpest, dominate the gradient although they say least about the image."""
    max_kl_per_update: float | None = setting(None, above=0)
    """Nats per image, summed over the denoising steps, by which one optimizer step may move the policy (exact Gaussian
    KL, measured after the step). A longer step is scaled down. null = no limit; then every tenth step is measured."""
    kl_probe_images: int = setting(2, at_least=0)
    """Images of the lowest trained group (at most a micro-batch) on which this KL is measured, by two forward passes
    at every denoising step; 0 = not measured."""
    kl_coef: float = setting(0.0, at_least=0)
    """Coefficient of the KL penalty; 0 = none. Above 0, each batch needs a forward pass of the reference model."""
    kl_form: str = setting("code", choices=("code", "exact", "proximal"))
    """exact: the Gaussian KL to the reference, per latent element. code: the same times the step size (for cps equal to
    exact), as published coefficients assume. proximal: half the squared log-ratio to the weights at the start of the
    batch (MixGRPO), which needs no reference."""
    adv_clip_max: float = setting(5.0, above=0, infinite=True)
    """Advantages are clamped to plus or minus this value: standard deviations of the reward, or with normalise=none
    its own unit. flow_dppo does not clamp."""
    global_std: bool = False
    """Divide by the reward std of the whole batch instead of each group's. Needs hand_over=batch."""
    normalise: str = setting("std", choices=("std", "none"))
    """std: divide by the reward std. none: only subtract the mean (Dr.GRPO)."""
    zero_std_groups: str = setting("count", choices=("count", "drop"))
    """Groups whose images all have the same reward. count: they count in the mean over the rows of a step. drop: they
    are not trained at all, their KL neither, and the mean is over the rows that are (flow_grpo's code)."""
    combine: str = setting("sum", choices=("sum", "per_reward"))
    """With several rewards: sum adds the weighted rewards, then normalises; per_reward normalises each, then adds them
    with their weights."""
    correction: str | None = setting(None, choices=("none", "mask", "tis", "rollout_tis"))
    """Correction for images of older weights. none: nothing. mask: drops rows that moved too far from these weights.
    tis: truncated importance weights with respect to these weights. rollout_tis: the same with respect to the log-probs
    that the rollout recorded, which also corrects differences between the engines. null = none for max_staleness of at
    most 1, mask above."""
    correction_threshold: float | None = setting(None, above=0)
    """Nats per denoising step, for correction=mask: a row with at least this divergence from the behaviour policy is
    dropped if it would move further away. null = twice the mean step of the farthest policy that max_staleness updates
    of max_kl_per_update nats reach (of 0.3 nats per 1,024 latent numbers if that is null)."""
    tis_cap: float = setting(2.0, above=0)
    """Largest importance weight of tis and rollout_tis; larger ones are cut to it."""
    beta: float = setting(1.0, above=0)
    """For diffusion_nft the mixing coefficient, for dpo the inverse temperature."""
    advantage_mode: str = setting(
        "continuous", choices=("continuous", "positive_only", "negative_only", "one_only", "binary")
    )
    """For diffusion_nft: advantages as they are (continuous), only those of one sign, 1 for those above 0 and 0 for
    others (one_only), or only their signs (binary)."""
    old_policy_decay: str = setting("copy", choices=("copy", "half", "slow", "late"))
    """For diffusion_nft: share of the sampling policy that stays at the end of a batch, after n optimizer steps in all:
    copy (0), half (.5), slow (min(.001 n, .5)) or late (0 below 75, then min(.0075 (n - 75), .999))."""
    negate_reward: bool = False
    """For tests: train against the reward."""
    permute_advantages: bool = False
    """For tests: shuffle the advantages inside each group."""
