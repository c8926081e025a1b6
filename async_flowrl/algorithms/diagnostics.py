"""Numbers for the log that are derived from rewards and from the means of the losses' metrics."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from async_flowrl.algorithms.correction import effective_sample_size
from async_flowrl.config.algorithm_schema import AlgorithmConfig

MIN_EFFECTIVE_SAMPLE_SIZE = 0.5
MIN_GRADIENT_KEPT = 0.8
SURVIVED_KL = 2e-3
"""Nats per latent element and update. On glyphs (1,024 elements) runs lived on at 1 nat per image and not at 3 to 4."""
BETTER_THAN = {"tis": "correction=mask", "rollout_tis": "engines that agree better (behaviour_gap)"}
"""Correction with importance weights → what to try where these leave little of the samples."""


@dataclass(frozen=True)
class WindowGroup:
    """One trained group: where its window starts, its rewards, and the means of its loss metrics."""

    start: int
    rewards: Sequence[float]
    metrics: Mapping[str, float]


def window_metrics(groups: Iterable[WindowGroup]) -> dict[str, float]:
    """`window/<start>/{reward_std,ratio_std,clip_fraction}`, means over the groups with that window.

    A reward std that grows with one start, or a ratio std far above the others', says that this window is the one that
    is too noisy or too sharp. ratio_std is the root mean square of ratio - 1.
    """
    by_start: dict[int, list[WindowGroup]] = defaultdict(list)
    for group in groups:
        by_start[group.start].append(group)
    line: dict[str, float] = {}
    for start, members in sorted(by_start.items()):
        line[f"window/{start}/reward_std"] = float(np.mean([np.std(member.rewards) for member in members]))
        squares = [m.metrics["ratio_deviation_squared"] for m in members if "ratio_deviation_squared" in m.metrics]
        if squares:
            line[f"window/{start}/ratio_std"] = float(np.sqrt(np.mean(squares)))
        clipped = [m.metrics["clip_fraction"] for m in members if "clip_fraction" in m.metrics]
        if clipped:
            line[f"window/{start}/clip_fraction"] = float(np.mean(clipped))
    return line


def sample_size(metrics: Mapping[str, float]) -> float | None:
    """Effective sample size of the importance weights as a share, from their means; None where there are none."""
    if "importance_weight" not in metrics:
        return None
    return effective_sample_size(metrics["importance_weight"], metrics["importance_weight_squared"])


def clip_of_means(config: AlgorithmConfig, elements: int) -> float | None:
    """`clip_range` on the scale of log-probs averaged over the `elements` of a latent; None where no ratio is clipped.

    (flow_dppo's is a divergence.)
    """
    if config.name == "flow_dppo":
        return None
    return config.clip_range / elements if config.clip_unit == "nats" else config.clip_range


def warnings(
    metrics: Mapping[str, float], *, correction: str, kept: float, clip: float | None = None, elements: int = 0
) -> list[str]:
    """Sentences about updates that do less, or other things, than they seem to.

    `kept`: share of the gradients that clip and mask leave; `clip`: see `clip_of_means`; `elements`: of a
    latent, 0 where no KL is to be judged.
    """
    sentences = []
    gap = metrics.get("behaviour_gap", 0.0)
    if clip is not None and gap >= clip:
        weights = (
            ", or weight rows with algorithm.correction=rollout_tis (mask and tis allow for the age of samples only)"
        )
        sentences.append(
            f"rollout and trainer disagree by {gap:.1e} on the log-probs of one policy (behaviour_gap), as much as the "
            f"{clip:.1e} by which algorithm.clip_range lets an update move them: let both pools compute alike "
            "(deterministic=true, one kind of GPU, rollout.compile as trainer.compile, model.attention_backend that "
            f"both have) or in model.dtype=float32{'' if correction == 'rollout_tis' else weights}"
        )
    size = sample_size(metrics)
    if correction in BETTER_THAN and size is not None and size < MIN_EFFECTIVE_SAMPLE_SIZE:
        sentences.append(
            f"importance weights have an effective sample size of {size:.2f}: {BETTER_THAN[correction]} or a smaller "
            "max_staleness would use the samples better"
        )
    survived = SURVIVED_KL * elements
    if elements and metrics.get("kl_per_update", 0.0) > survived:
        sentences.append(
            f"an update moved the policy by {metrics['kl_per_update']:.1f} nats per image (kl_per_update), more than "
            f"the {survived:.1f} up to which runs of a small model were stable, counted per latent element: set "
            "algorithm.max_kl_per_update, or take a smaller trainer.learning_rate"
        )
    if kept < MIN_GRADIENT_KEPT:
        sentences.append(
            f"only {kept:.2f} of the gradients survive clip and mask: a wider algorithm.clip_range or a smaller "
            "learning rate would use the samples better"
        )
    return sentences
