"""Charts of a report: which curves each chart draws, and its help text. docs/metrics.md has the formulas."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Most curves that are drawn although no chart in PANELS names them.
MAX_OTHERS = 60


# Section → id of a chart → its title, its help text, and its curves: pattern of keys → label (see re.Match.expand).
PANELS: Mapping[str, Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "result": {
        "evaluated": (
            "Score of evaluations",
            "Mean over the evaluated prompts, the same initial noises each time, with its 95 % interval.",
            {"evaluation:trained:(.+)": r"\1"},
        ),
    },
    "evaluations": {
        "held_out": (
            "Held-out terms",
            "Nothing is trained on them. One that falls while the trained reward rises: the reward is being hacked.",
            {"evaluation:held_out:(.+)": r"\1"},
        ),
        "diversity": (
            "Diversity",
            "Mean distance of two images of one prompt. A fall means that they become alike.",
            {"evaluation:diversity:(.+)": r"\1"},
        ),
    },
    "learning": {
        "reward": (
            "Training reward",
            "Mean weighted reward of a step's images: noisy samples, of versions up to max_staleness old.",
            {"reward/mean": "reward"},
        ),
        "terms": ("Reward by term", "Mean of each term, unweighted: which one moves.", {"reward/(.+)/mean": r"\1"}),
        "spread": (
            "Spread inside groups",
            "Mean standard deviation inside a group: what a term teaches, as advantages come from it alone.",
            {"reward/(.+)/group_std": r"\1", "reward/std": "over all images"},
        ),
        "flat": (
            "Groups without spread",
            "Share of groups whose images all score the same. Near 1: solved, or collapsed to one value.",
            {"zero_std_ratio": "weighted sum", "reward/(.+)/zero_std_ratio": r"\1"},
        ),
    },
    "update": {
        "clip": (
            "Clipped, and gradient kept",
            "Clipped: rows outside the clip. Kept: share of the gradient by age; below 0.8, staleness costs too much.",
            {"clip_fraction": "clipped", r"kept:(\d+)": r"kept, \1 old", "masked": "masked"},
        ),
        "kl": (
            "KL per update",
            "How far one update moved the policy, in nats per image; algorithm.max_kl_per_update bounds it.",
            {"kl_per_update": "per update", "trust_region/raw_kl": "before the trust region", "kl": "to the reference"},
        ),
        "trust": (
            "Trust region",
            "Share of the optimizer's step that the bound on the KL left. 1: it did not bind.",
            {"trust_region/scale": "trust_region/scale"},
        ),
        "snr": (
            "Gradient signal to noise",
            "Of either sign in single steps. An average below 0.01 over 50 steps: the weights walk at random.",
            {"gradient_snr": "gradient_snr"},
        ),
        "gradient": (
            "Gradient norm",
            "Length of the whole gradient, before it is cut to trainer.max_grad_norm.",
            {"grad_norm": "grad_norm"},
        ),
        "loss": (
            "Loss",
            "Near 0 and of either sign for policy gradients: watch the reward instead.",
            {"loss": "loss", "positive_loss": "positive_loss", "negative_loss": "negative_loss"},
        ),
    },
    "staleness": {
        "gap": (
            "Gap between engines",
            "behaviour_gap: by what rollout and trainer disagree under the same weights, at most 1e-3 in bfloat16. A "
            "jump: rollout did not use the weights it claims. log_prob_gap: age and engines together.",
            {"behaviour_gap": "behaviour_gap", "log_prob_gap": "log_prob_gap"},
        ),
        "staleness": (
            "Age of samples",
            "Step minus the version that made the images, at the trainer's door. Never above max_staleness.",
            {"staleness/(mean)": r"\1", "staleness/(max)": r"\1"},
        ),
        "ess": (
            "Effective sample size",
            "Share of the samples that importance weights would leave. Below 0.5, correct for staleness or lower it.",
            {"effective_sample_size": "effective_sample_size"},
        ),
    },
    "time": {
        "busy": (
            "Busy share of each pool",
            "Share of each step in which workers worked; with placement=shared also that in which tickets waited.",
            {"pool/(.+)/busy": r"\1"},
        ),
        "timing": (
            "Seconds of a step",
            "wait_rollout near 0: trainer-bound. Near step less update: rollout-bound.",
            {r"timing/(step|wait_rollout|wait_ticket|update|publish|activate)": r"\1", "timing/(score/.+)": r"\1"},
        ),
        "memory": (
            "GPU memory",
            "GiB that PyTorch has reserved at most so far, in the pool's worker that has most.",
            {"memory/(.+)": r"\1"},
        ),
        "rate": (
            "Images per second",
            "Training images over the seconds of the step.",
            {"images_per_s": "images_per_s"},
        ),
    },
}

_EVALUATIONS = ("evaluation", "evaluation_before", "evaluation_baseline")
# First parts of keys (before "/") that get no chart of their own.
HIDDEN = ("step", "policy_version", "images", "kept", "kept_of", *_EVALUATIONS)


def panels_for(keys: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that have at least one of the curves `keys`, each with its `lines` (key and label of each curve)."""
    # Curves that no chart in PANELS names get further charts at the end.
    keys = sorted(set(keys))
    shown: list[dict[str, Any]] = []
    for section, panels in PANELS.items():
        for name, (title, text, curves) in panels.items():
            matches = [(re.fullmatch(pattern, key), label) for pattern, label in curves.items() for key in keys]
            lines = [{"key": match[0], "label": match.expand(label)} for match, label in matches if match]
            if lines and (name != "terms" or len(lines) > 1):
                shown.append({"id": name, "section": section, "title": title, "help": text, "lines": lines})
    drawn = {line["key"] for panel in shown for line in panel["lines"]}
    others: dict[str, list[str]] = {}
    for key in [key for key in keys if key not in drawn and key.split("/")[0] not in HIDDEN][:MAX_OTHERS]:
        others.setdefault(key.rsplit("/", 1)[0] if "/" in key else key, []).append(key)
    for number, (head, members) in enumerate(others.items()):
        lines = [{"key": key, "label": key.removeprefix(f"{head}/")} for key in members]
        shown.append({"id": f"other-{number}", "section": "other", "title": head, "help": "", "lines": lines})
    return shown
