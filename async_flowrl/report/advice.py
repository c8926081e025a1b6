"""Warnings of a run for its report, each with advice; the advice repeats the table in docs/metrics.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.reward_bound import reward_bound
from async_flowrl.observability.summary import warnings_of
from async_flowrl.report.records import Records

RECENT_STEPS = 50
"""Number of last steps over which a metric is averaged."""


@dataclass(frozen=True)
class Rule:
    """Warns if `holds` is true for the mean of the metric `key` over the last RECENT_STEPS steps.

    `text` is a template with {value} and {steps}, `todo` the advice, `panel` the id of the chart that shows the metric.
    """

    key: str
    holds: Callable[[float], bool]
    text: str
    todo: str
    panel: str


RULES = (
    Rule(
        "zero_std_ratio",
        lambda share: share > 0.5,
        "In {value:.0%} of the groups of the last {steps} steps all images had the same score: nothing was learned "
        "from them.",
        "If all scores are high, the task is solved: use harder prompts. If the images of a prompt have become alike, "
        "the model has collapsed, and equal scores give no gradient that could repair it: go back to an earlier "
        "checkpoint and set algorithm.max_kl_per_update.",
        "flat",
    ),
    Rule(
        "gradient_snr",
        lambda ratio: ratio < 0.01,
        "Over the last {steps} steps the gradient was mostly noise: its signal-to-noise ratio (gradient_snr) was "
        "{value:.2g} on average.",
        "Use more images per step, algorithm.same_initial_noise=true, earlier denoising steps (algorithm.window), "
        "fewer lora.targets, or a smaller learning rate that falls.",
        "snr",
    ),
    Rule(
        "trust_region/scale",
        lambda scale: scale < 0.3,
        "The limit algorithm.max_kl_per_update shortened the updates of the last {steps} steps to {value:.0%} of their "
        "length on average.",
        "You can leave it so. A smaller learning rate makes Adam's momentum match the updates that are really applied.",
        "trust",
    ),
    Rule(
        "effective_sample_size",
        lambda share: share < 0.5,
        "Importance weights reduced the effective sample size to {value:.0%} over the last {steps} steps.",
        "Use a smaller max_staleness or learning rate, or algorithm.correction=mask.",
        "ess",
    ),
)
MIN_STEPS = {"gradient_snr": 50, "zero_std_ratio": 5, "trust_region/scale": 20}
"""Metric → number of steps that must have a value before its rule is applied; 1 for the others."""


def advice_for(run: Records, evaluations: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """All warnings of a run: that rewards limited its speed, from evaluations, from its records, then from RULES.

    Each has `text`, `todo` (advice, may be ""), `panel` (id of the chart that shows it, or None) and `level`, "alarm"
    or "warning". `evaluations` is the result of `evaluations_of`.
    """
    advice: list[dict[str, Any]] = []
    if (sentence := reward_bound(run.workers, run.window)) is not None:
        advice.append({"text": sentence, "todo": "", "panel": "busy", "level": "warning"})
    for sentence in (evaluations or {}).get("alarms", []):
        todo = "save.best keeps the best version; evaluate.on_hacking=stop ends such a run."
        advice.append({"text": sentence, "todo": todo, "panel": "held_out", "level": "alarm"})
    for sentence in (evaluations or {}).get("notices", []):
        todo = "Look at the images; where variety matters, a smaller learning rate or an earlier version keeps more."
        advice.append({"text": sentence, "todo": todo, "panel": "diversity", "level": "warning"})
    told = {each["text"] for each in advice}
    recorded = [*run.summary.get("failed", []), *run.summary.get("warnings", warnings_of(run.metrics))]
    plain = [{"text": s, "todo": "", "panel": None, "level": "warning"} for s in recorded if s not in told]
    return [*advice, *plain, *filter(None, (_applied(rule, run.metrics) for rule in RULES))]


def _applied(rule: Rule, metrics: Sequence[Metrics]) -> dict[str, Any] | None:
    known = [line[rule.key] for line in metrics if line.get(rule.key) is not None][-RECENT_STEPS:]
    if len(known) < MIN_STEPS.get(rule.key, 1) or not rule.holds(value := fmean(known)):
        return None
    text = rule.text.format(value=value, steps=len(known))
    return {"text": text, "todo": rule.todo, "panel": rule.panel, "level": "warning"}
