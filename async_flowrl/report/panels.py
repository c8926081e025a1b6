"""Charts of a report: which curves each chart draws, and its help text. docs/metrics.md has the formulas."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LABELS = {
    "reward/mean": "reward",
    "reward/std": "over all images",
    "zero_std_ratio": "weighted sum",
    "clip_fraction": "clipped",
    "kl_per_update": "per update",
    "trust_region/raw_kl": "before the trust region",
    "kl": "to the reference",
}
"""Key of a curve → its label, if the key would not be clear."""
MAX_OTHERS = 60
"""Largest number of curves that are drawn although no chart in PANELS names them."""


@dataclass(frozen=True)
class Panel:
    """One chart: it draws all curves whose key matches a pattern; a pattern's first group, or the key, is the label."""

    id: str
    section: str
    title: str
    help: str
    patterns: tuple[str, ...]


PANELS = (
    Panel(
        "evaluated",
        "result",
        "Score of evaluations",
        "Mean over the evaluated prompts, the same initial noises each time; the band is the 95 % interval, its errors "
        "clustered by prompt; one that leaves the chart is wider than it. The number to compare runs by.",
        (r"evaluation:trained:(.+)",),
    ),
    Panel(
        "held_out",
        "evaluations",
        "Held-out terms",
        "Scores that nothing is trained on. One that falls while the trained reward rises: the reward is being hacked.",
        (r"evaluation:held_out:(.+)",),
    ),
    Panel(
        "diversity",
        "evaluations",
        "Diversity",
        "Mean distance of two images of one prompt. A fall means that they become alike.",
        (r"evaluation:diversity:(.+)",),
    ),
    Panel(
        "reward",
        "learning",
        "Training reward",
        "Mean weighted reward of a step's images: noisy samples, of versions up to max_staleness old. Steps that were "
        "skipped have no point.",
        (r"reward/mean",),
    ),
    Panel(
        "terms", "learning", "Reward by term", "Mean of each term, unweighted: which one moves.", (r"reward/(.+)/mean",)
    ),
    Panel(
        "spread",
        "learning",
        "Spread inside groups",
        "Mean over groups of the standard deviation inside the group: what a term teaches, as advantages come from "
        "differences inside groups alone.",
        (r"reward/(.+)/group_std", r"reward/(std)"),
    ),
    Panel(
        "flat",
        "learning",
        "Groups without spread",
        "Share of groups whose images all have the same score, so that nothing is learned from them. Near 1: solved, "
        "or collapsed to one value.",
        (r"(zero_std_ratio)", r"reward/(.+)/zero_std_ratio"),
    ),
    Panel(
        "clip",
        "update",
        "Clipped, and gradient kept",
        "Clipped: rows whose ratio was outside the clip. Kept: share of the gradient that survived clip and mask, by "
        "the age of the samples; below 0.8, staleness costs too much.",
        (r"(clip_fraction)", r"kept:(\d+)", r"(masked)"),
    ),
    Panel(
        "kl",
        "update",
        "KL per update",
        "How far one update moved the policy, in nats per image. Several times what it was at first: the same step "
        "moves the policy ever further; algorithm.max_kl_per_update bounds it.",
        (r"(kl_per_update)", r"(trust_region/raw_kl)", r"(kl)"),
    ),
    Panel(
        "trust",
        "update",
        "Trust region",
        "Share of the optimizer's step that the bound on the KL left. 1: it did not bind.",
        (r"(trust_region/scale)",),
    ),
    Panel(
        "snr",
        "update",
        "Gradient signal to noise",
        "Squared length of the gradient's signal over that of its noise, of either sign in single steps. An average "
        "below 0.01 over 50 steps: the weights walk at random.",
        (r"(gradient_snr)",),
    ),
    Panel(
        "gradient",
        "update",
        "Gradient norm",
        "Length of the whole gradient, before it is cut to trainer.max_grad_norm.",
        (r"(grad_norm)",),
    ),
    Panel(
        "loss",
        "update",
        "Loss",
        "Near 0 and of either sign for policy gradients: watch the reward instead.",
        (r"(loss)", r"(positive_loss)", r"(negative_loss)"),
    ),
    Panel(
        "gap",
        "staleness",
        "Gap between engines",
        "behaviour_gap: what rollout and trainer disagree by under the same weights, 1e-8 in float32 and up to 1e-3 in "
        "bfloat16. A jump: rollout did not use the weights it claims. log_prob_gap: age and engines together.",
        (r"(behaviour_gap)", r"(log_prob_gap)"),
    ),
    Panel(
        "staleness",
        "staleness",
        "Age of samples",
        "Step minus the version that made the images, at the trainer's door. Never above max_staleness.",
        (r"staleness/(mean)", r"staleness/(max)"),
    ),
    Panel(
        "ess",
        "staleness",
        "Effective sample size",
        "Share of the samples that importance weights would leave. Below one half, correct for staleness or lower it.",
        (r"(effective_sample_size)",),
    ),
    Panel(
        "busy",
        "time",
        "Busy share of each pool",
        "Share of each step in which a pool's workers worked. With placement=shared a ticket that waits for training "
        "counts, too: there the timeline says what was computed.",
        (r"pool/(.+)/busy",),
    ),
    Panel(
        "timing",
        "time",
        "Seconds of a step",
        "wait_rollout near 0: trainer-bound. Near step less update: rollout-bound. wait_ticket: with placement=shared, "
        "what steps with a limit on their KL waited for tickets.",
        (r"timing/(step|wait_rollout|wait_ticket|update|publish|activate)", r"timing/(score/.+)"),
    ),
    Panel("rate", "time", "Images per second", "Training images over the seconds of the step.", (r"(images_per_s)",)),
)  # fmt: skip

HIDDEN = {"step", "policy_version", "images", "kept", "kept_of", "evaluation", "evaluation_before"} | {
    "evaluation_baseline"
}
"""First parts of keys (before "/") that get no chart of their own."""


def panels_for(keys: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that have at least one of the curves `keys`, each with its `lines` (key and label of each curve).

    Curves that no chart in PANELS names get further charts at the end.
    """
    left = sorted(set(keys))
    shown = []
    for panel in PANELS:
        lines = _lines(panel.patterns, left)
        if panel.id == "terms" and len(lines) < 2:
            continue
        if lines:
            shown.append({**_said(panel), "lines": lines})
    return shown + _others(left, {line["key"] for panel in shown for line in panel["lines"]})


def _said(panel: Panel) -> dict[str, Any]:
    return {name: value for name, value in asdict(panel).items() if name != "patterns"}


def _lines(patterns: Sequence[str], keys: Sequence[str]) -> list[dict[str, str]]:
    lines, taken = [], set()
    for pattern in patterns:
        for key in keys:
            if key not in taken and (match := re.fullmatch(pattern, key)):
                taken.add(key)
                lines.append({"key": key, "label": match[1] if match.groups() else key})
    for line in lines:
        line["label"] = LABELS.get(line["key"], line["label"])
        if line["key"].startswith("kept:"):
            line["label"] = f"kept, {line['label']} old"
    return lines


def _others(keys: Sequence[str], taken: set[str]) -> list[dict[str, Any]]:
    left = [key for key in keys if key not in taken and key.split("/")[0] not in HIDDEN][:MAX_OTHERS]
    heads: dict[str, list[str]] = {}
    for key in left:
        heads.setdefault(key.rsplit("/", 1)[0] if "/" in key else key, []).append(key)
    return [
        {
            "id": f"other-{number}",
            "section": "other",
            "title": head,
            "help": "",
            "lines": [{"key": key, "label": key.removeprefix(f"{head}/")} for key in members],
        }
        for number, (head, members) in enumerate(heads.items())
    ]
