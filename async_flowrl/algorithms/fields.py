"""The table of the fields of the section `algorithm` that not every built-in algorithm uses.

A field without an effect must keep its default, so that no setting is ignored in silence. An algorithm of your own may
use all of them.
"""

from collections.abc import Mapping
from dataclasses import fields

from async_flowrl.config.schema import AlgorithmConfig

NOISY = ("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo")
"""Algorithms that train on noisy denoising steps; for the others denoising adds no noise."""
FINAL = ("diffusion_nft", "dpo")
USED_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("sde_type", "noise_level", "window", "sde_window_size", "sde_window_range", "window_per"),
            *("window_interval", "window_decay", "window_interval_min", "window_decay_start", "window_decay_rate"),
            *("window_list", "clip_range", "clip_unit", "step_weight", "max_kl_per_update", "kl_probe_images"),
            *("kl_form", "correction", "correction_threshold", "tis_cap"),
        ),
        NOISY,
    ),
    "timestep_range": FINAL,
    "kl_coef": (*NOISY, "diffusion_nft"),
    "adv_clip_max": ("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "diffusion_nft"),
    "beta": FINAL,
    "advantage_mode": ("diffusion_nft",),
    "old_policy_decay": ("diffusion_nft",),
}
"""Field → the built-in algorithms that use it; fields that all of them use are left out."""
SAYS_NOTHING = {"sde_type": "ode", "correction": "none", "kl_probe_images": 0}
"""Field → another value than its default that says no more than that it has no effect."""


def unused_field(config: AlgorithmConfig) -> str | None:
    """Returns a sentence on the first field that is set and that the algorithm does not use; None if there is none."""
    if config.name not in (*NOISY, *FINAL):
        return None
    defaults = AlgorithmConfig()
    for member in fields(config):
        value, used_by = getattr(config, member.name), USED_BY.get(member.name)
        if used_by is None or config.name in used_by or value == getattr(defaults, member.name):
            continue
        if member.name in SAYS_NOTHING and value == SAYS_NOTHING[member.name]:
            continue
        return (
            f"algorithm.{member.name}={value} has no effect with {config.name}: leave it out; "
            f"{', '.join(used_by)} {'uses' if len(used_by) == 1 else 'use'} it"
        )
    return None
