"""Metrics of each reward term, from the scores of a step's groups; step_metrics.py adds them to the step's line."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from async_flowrl.observability.evaluations import extra_means
from async_flowrl.types import Scores


def term_metrics(groups: Sequence[Scores]) -> dict[str, float]:
    """Returns metric name → value, for one Scores per group.

    Means of a term leave out the groups that lack it; `missing` counts these. `zero_std_ratio` is the share of groups
    whose images all have exactly the same score. A numeric extra of a term gets its mean, `reward/<term>/<extra>`.
    """
    by_term: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    missing: Counter[str] = Counter()
    for scores in groups:
        missing.update(scores.failed.keys())
        for name, values in scores.by_term.items():
            by_term[name].append(values)
    line: dict[str, float] = {}
    for name, each in by_term.items():
        flat = [value for values in each for value in values]
        line[f"reward/{name}/mean"] = float(np.mean(flat))
        line[f"reward/{name}/std"] = float(np.std(flat))
        line[f"reward/{name}/group_std"] = float(np.mean([np.std(values) for values in each]))
        line[f"reward/{name}/zero_std_ratio"] = sum(len(set(values)) == 1 for values in each) / len(each)
    line |= {f"reward/{name}/missing": count for name, count in sorted(missing.items())}
    means = extra_means(scores.extras for scores in groups)
    line |= {f"reward/{term}/{name}": mean for term, by_name in means.items() for name, mean in by_name.items()}
    return line | seconds_per_group(groups)


def seconds_per_group(groups: Sequence[Scores]) -> dict[str, float]:
    """Returns `timing/score/<term>`: seconds of a group's last call for the term in its worker, mean over groups."""
    took: dict[str, list[float]] = defaultdict(list)
    for scores in groups:
        last = {span.name: span.end - span.start for span in scores.spans if span.name.startswith("score/")}
        for name, seconds in last.items():
            took[f"timing/{name}"].append(seconds)
    return {key: float(np.mean(each)) for key, each in sorted(took.items())}
