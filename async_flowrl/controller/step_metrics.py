"""StepStatistics makes the line of metrics.jsonl of one step, from its groups' rewards and its optimizer steps."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from async_flowrl.algorithms.diagnostics import sample_size, window_metrics
from async_flowrl.tickets.table import Ticket
from async_flowrl.training.messages import PartStats, UpdateStats, row_means
from async_flowrl.types import Scores


class StepStatistics:
    """Collects the groups and optimizer steps of a training step; `windowed`: the algorithm trains windows."""

    def __init__(self, step: int, *, windowed: bool = False) -> None:
        self.step, self.windowed = step, windowed
        self.rewards: dict[int, tuple[float, ...]] = {}  # Number of the group → one reward per image.
        self.scores: list[Scores] = []
        self.ages: list[int] = []  # Staleness of each ticket, in versions.
        # Number of groups whose advantages are all 0, and number of tickets of skipped groups.
        self.constant = self.skipped = 0
        self.updates: list[UpdateStats] = []  # Statistics of each optimizer step.

    def add_group(self, tickets: Sequence[Ticket], scores: Scores | None, advantages: Sequence[float]) -> None:
        """Adds a group, with one advantage per image; `scores` is None if `reward.on_error` skipped it."""
        if scores is None:
            self.skipped += len(tickets)
            return
        self.ages += [ticket.step - ticket.version for ticket in tickets]
        self.rewards[tickets[0].group] = scores.total
        self.constant += not any(advantages)
        self.scores.append(scores)

    def metrics(self) -> dict[str, float]:
        """Returns metric name → value; docs/metrics.md describes the names.

        Losses are means over the optimizer steps that were not skipped. A row is one image at one trained denoising
        step.
        """
        flat = [value for group in self.rewards.values() for value in group]
        line: dict[str, float] = {"step": self.step, "policy_version": self.step, "images": len(flat)}
        if flat:
            line["reward/mean"], line["reward/std"] = float(np.mean(flat)), float(np.std(flat))
            line["zero_std_ratio"] = self.constant / len(self.rewards)
            line["staleness/mean"], line["staleness/max"] = float(np.mean(self.ages)), max(self.ages)
        line |= term_metrics(self.scores)
        line |= self._means()
        for stats in self.updates:
            for age, (kept, total) in stats.kept.items():
                line[f"kept/{age}"] = line.get(f"kept/{age}", 0) + kept
                line[f"kept_of/{age}"] = line.get(f"kept_of/{age}", 0) + total
        if waits := [stats.waited for stats in self.updates if stats.waited is not None]:
            line["timing/wait_ticket"] = sum(waits)
        if self.skipped:
            line["tickets_skipped"] = self.skipped
        size = sample_size(line)
        line |= self._by_window()
        return line if size is None else line | {"effective_sample_size": size}

    def _means(self) -> dict[str, float]:
        ran = [stats.metrics for stats in self.updates if not stats.skipped]
        names = sorted({name for metrics in ran for name in metrics})
        return {name: float(np.mean([metrics[name] for metrics in ran if name in metrics])) for name in names}

    def _by_window(self) -> dict[str, float]:
        if not self.windowed:
            return {}
        parts: dict[int, list[PartStats]] = defaultdict(list)
        for part in (part for stats in self.updates for part in stats.parts):
            parts[part.group].append(part)
        return window_metrics(
            (of_group[0].window_start, self.rewards[group], row_means(of_group, 1)) for group, of_group in parts.items()
        )


def term_metrics(groups: Sequence[Scores]) -> dict[str, float]:
    """Returns the metrics of reward terms, for one Scores per group; means leave out groups that lack the term."""
    by_term: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    missing: Counter[str] = Counter()
    for scores in groups:
        missing.update(scores.failed.keys())
        for name, values in scores.by_term.items():
            by_term[name].append(values)
    line: dict[str, float] = {}
    for name, by_group in by_term.items():
        flat = [value for values in by_group for value in values]
        line[f"reward/{name}/mean"] = float(np.mean(flat))
        line[f"reward/{name}/std"] = float(np.std(flat))
        line[f"reward/{name}/group_std"] = float(np.mean([np.std(values) for values in by_group]))
        line[f"reward/{name}/zero_std_ratio"] = sum(len(set(values)) == 1 for values in by_group) / len(by_group)
    line |= {f"reward/{name}/missing": count for name, count in sorted(missing.items())}
    means = extra_means(scores.extras for scores in groups)
    line |= {f"reward/{term}/{name}": mean for term, by_name in means.items() for name, mean in by_name.items()}
    return line | seconds_per_group(groups)


def extra_means(groups: Iterable[Mapping[str, Mapping[str, Sequence[float | str]]]]) -> dict[str, dict[str, float]]:
    """Term → name of a numeric extra → its mean over the images of all `groups` (as `Scores.extras`) that have it."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for extras in groups:
        for term, by_name in extras.items():
            for name, extra in by_name.items():
                values[term, name] += [value for value in extra if not isinstance(value, str)]
    means: dict[str, dict[str, float]] = {}
    for (term, name), numbers in sorted(values.items()):
        if numbers:
            means.setdefault(term, {})[name] = float(np.mean(numbers))
    return means


def seconds_per_group(groups: Sequence[Scores]) -> dict[str, float]:
    """Returns `timing/score/<term>`: seconds of a group's last call for the term in its worker, mean over groups."""
    durations: dict[str, list[float]] = defaultdict(list)
    for scores in groups:
        last = {span.name: span.end - span.start for span in scores.spans if span.name.startswith("score/")}
        for name, seconds in last.items():
            durations[f"timing/{name}"].append(seconds)
    return {key: float(np.mean(values)) for key, values in sorted(durations.items())}
