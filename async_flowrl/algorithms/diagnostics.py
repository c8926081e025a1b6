"""Diagnostics of a training step: metrics per window, and warnings for the log, from rewards and the losses' metrics.

The controller calls it after every training step.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from async_flowrl.config.schema import AlgorithmConfig

MIN_EFFECTIVE_SAMPLE_SIZE = 0.5
MIN_GRADIENT_KEPT = 0.8
# Largest quotient of the shares of kept gradients of good and of bad images without a warning.
MAX_KEPT_BY_SIGN = 1.5
# Largest KL of an update, in nats per latent element, without a warning. In the glyphs example (1,024 elements), runs
# with 1 nat per image were stable, and runs with 3 to 4 nats were not.
MAX_QUIET_NATS_PER_ELEMENT = 2e-3
# `algorithm.correction` with importance weights → the advice if the effective sample size is small.
BETTER_THAN = {"tis": "correction=mask", "rollout_tis": "engines that agree better (behaviour_gap)"}


def window_metrics(groups: Iterable[tuple[int, Sequence[float], Mapping[str, float]]]) -> dict[str, float]:
    """Returns `window/<start>/{reward_std,ratio_std,clip_fraction}`: per first trained step, means over its groups.

    A group is its first trained step, its rewards, and means over its rows of the metrics of `loss`.
    """
    # ratio_std is the root mean square of (ratio - 1). A window whose values are far above those of the others has too
    # much noise, or so little that its densities are too sharp.
    by_start: dict[int, list[tuple[Sequence[float], Mapping[str, float]]]] = defaultdict(list)
    for start, rewards, metrics in groups:
        by_start[start].append((rewards, metrics))
    line: dict[str, float] = {}
    for start, members in sorted(by_start.items()):
        line[f"window/{start}/reward_std"] = float(np.mean([np.std(rewards) for rewards, _ in members]))
        if squares := [metrics[key] for _, metrics in members if (key := "ratio_deviation_squared") in metrics]:
            line[f"window/{start}/ratio_std"] = float(np.sqrt(np.mean(squares)))
        if clipped := [metrics[key] for _, metrics in members if (key := "clip_fraction") in metrics]:
            line[f"window/{start}/clip_fraction"] = float(np.mean(clipped))
    return line


def sample_size(metrics: Mapping[str, float]) -> float | None:
    """Returns the effective sample size (mean w)² / mean(w²) of importance weights w, a share in (0, 1], or None."""
    if "importance_weight" not in metrics:
        return None
    mean = metrics["importance_weight"]
    return mean * mean / metrics["importance_weight_squared"]


def clip_of_means(config: AlgorithmConfig, elements: int) -> float | None:
    """Returns `clip_range` as a difference of log-probs per latent element; `elements` is the number of these."""
    # Returns None for flow_dppo, whose clip_range bounds a divergence and not the ratio.
    if config.name == "flow_dppo":
        return None
    return config.clip_range / elements if config.clip_unit == "nats" else config.clip_range


def warnings(
    metrics: Mapping[str, float],
    *,
    correction: str,
    kept: float,
    clip: float | None = None,
    elements: int = 0,
    guidance: float = 1.0,
) -> list[str]:
    """Returns one sentence per problem that the metrics of a training step show, with advice; usually none.

    `kept` is the share of gradients that clip and mask leave, `clip` the value of `clip_of_means`, `elements` the
    number of latent elements, or 0 to leave out the check of `kl_per_update`, and `guidance` the scale w of u + w (c -
    u).
    """
    sentences = []
    gap = metrics.get("behaviour_gap", 0.0)
    if clip is not None and gap >= clip:
        by_weights = ", or weight rows with algorithm.correction=rollout_tis (mask and tis allow for age only)"
        sentences.append(
            f"rollout and trainer disagree by {gap:.1e} on the log-probs of one policy (behaviour_gap), as much as the "
            f"{clip:.1e} by which algorithm.clip_range lets an update move them: let both pools compute alike "
            "(deterministic=true, one kind of GPU, rollout.compile as trainer.compile, model.attention_backend that "
            f"both have) or in model.dtype=float32{'' if correction == 'rollout_tis' else by_weights}"
            + (f"; rollout.true_cfg_scale={guidance:g} widens it several times" if guidance > 1 else "")
        )
    size = sample_size(metrics)
    if correction in BETTER_THAN and size is not None and size < MIN_EFFECTIVE_SAMPLE_SIZE:
        sentences.append(
            f"importance weights have an effective sample size of {size:.2f}: {BETTER_THAN[correction]} or a smaller "
            "max_staleness would use the samples better"
        )
    bound = MAX_QUIET_NATS_PER_ELEMENT * elements
    if elements and metrics.get("kl_per_update", 0.0) > bound:
        sentences.append(
            f"an update moved the policy by {metrics['kl_per_update']:.4g} nats per image (kl_per_update), more than "
            f"the {bound:.4g} up to which runs of a small model were stable, counted per latent element: set "
            "algorithm.max_kl_per_update, or take a smaller trainer.learning_rate"
        )
    shares = [metrics[key] for sign in ("positive", "negative") if (key := f"gradient_kept/{sign}") in metrics]
    if len(shares) == 2 and max(shares) > MAX_KEPT_BY_SIGN * min(shares):
        sentences.append(
            f"clip and mask keep {shares[0]:.0%} of the gradients of images better than their group and "
            f"{shares[1]:.0%} of the others, so training is one-sided: set a larger algorithm.correction_threshold, or "
            "a smaller max_staleness, algorithm.max_kl_per_update or trainer.learning_rate"
        )
    if kept < MIN_GRADIENT_KEPT:
        sentences.append(
            f"only {kept:.2f} of the gradients survive clip and mask: a wider algorithm.clip_range or a smaller "
            "learning rate would use the samples better"
        )
    return sentences
