"""Live views of a run: the progress line, TensorBoard and W&B, as the configuration group `monitor` says."""

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from async_flowrl.config.schema import MonitorConfig
from async_flowrl.observability.trackers import ALIASES, Sample, Tensorboard, Wandb

logger = logging.getLogger(__name__)

AVERAGED_STEPS = 20
"""Steps over which seconds per step and the time left are measured."""
MIN_LINE_SECONDS = 5.0
"""Between two lines of text, where there is no terminal."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Passes steps, evaluations and pictures on to each view that is switched on.

    A view that raises is switched off, with a warning, and named in `failures`: it ends no run. Steps and evaluations
    may come from two threads.
    """

    def __init__(
        self, config: MonitorConfig, folder: Path, *, name: str, total_steps: int, settings: Mapping[str, Any]
    ) -> None:
        """`settings` is the resolved configuration."""
        self.failures: list[str] = []
        self._turn = threading.Lock()
        self._sinks: list[Sink] = []
        if config.progress:
            self._sinks.append(Display(total_steps))
        if config.tensorboard:
            self._sinks.append(Tensorboard(folder / "tensorboard", ALIASES[config.metric_aliases]))
        if config.wandb:
            self._sinks.append(Wandb(config, name, folder, settings))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a finished step, by the names of metrics.jsonl."""
        self._each(lambda sink: sink.log(step, metrics))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Means over the images of an evaluation of a policy version, by the names behind `evaluation/`."""
        self._each(lambda sink: sink.evaluation(version, metrics))

    def image(self, path: Path, version: int) -> None:
        """The picture grid of an evaluation."""
        self._each(lambda sink: sink.image(path, version))

    def samples(self, version: int, samples: Sequence[Sample]) -> None:
        """Images of an evaluation, one by one, in the order of the prompts."""
        self._each(lambda sink: sink.samples(version, samples))

    def close(self) -> None:
        """Again does nothing."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, work: Callable[[Sink], None]) -> None:
        with self._turn:
            for sink in list(self._sinks):
                try:
                    work(sink)
                except Exception as error:  # a view's own trouble, a network's for example
                    self._sinks.remove(sink)
                    name = type(sink).__name__.lower()
                    self.failures.append(f"monitor {name}: {type(error).__name__}: {error}")
                    logger.warning("the monitor %s is switched off: %s: %s", name, type(error).__name__, error)


class Display:
    """A live line on a terminal; elsewhere (a file, CI) a plain line every few seconds."""

    def __init__(
        self, total_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._clock = total_steps, clock
        self._console = console or Console()
        self._ends: deque[float] = deque([clock()], maxlen=AVERAGED_STEPS + 1)
        self._shown = float("-inf")
        self._skipped = 0
        self._without: Counter[str] = Counter()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        if self._console.is_terminal:
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = self._clock()
        self._ends.append(now)
        text = self._text(step, metrics)
        self._progress.update(self._task, completed=step + 1, description=text)
        due = now - self._shown >= MIN_LINE_SECONDS or step + 1 == self._total
        if due and not self._console.is_terminal:
            self._console.print(f"step {step + 1}/{self._total} | {text}", soft_wrap=True, highlight=False)
            self._shown = now

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        what = f"version {version}"
        if any(name.startswith("baseline/") for name in metrics):
            what, metrics = "the baseline", {name.removeprefix("baseline/"): x for name, x in metrics.items()}
        parts = [f"reward {_with_change(metrics, 'reward')}"]
        held_out = [name.removesuffix("/mean") for name in metrics if re.fullmatch("held_out/[^/]+/mean", name)]
        parts += [f"{name.replace('held_out/', 'held-out ')} {_with_change(metrics, name)}" for name in held_out]
        self._console.print(f"evaluation of {what}: {', '.join(parts)}", highlight=False, soft_wrap=True)

    def image(self, path: Path, version: int) -> None:
        """Pictures are in the run directory; a line of text has no room for them."""

    def samples(self, version: int, samples: Sequence[Sample]) -> None:
        """Likewise."""

    def close(self) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def _text(self, step: int, metrics: Mapping[str, Any]) -> str:
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        lost = metrics.get("tickets_skipped")
        self._skipped += int(lost or 0)
        for key, value in metrics.items():
            if value and (missing := re.fullmatch("reward/([^/]+)/missing", key)):
                self._without[missing[1]] += int(value)
        parts = [
            f"reward {_number(metrics.get('reward/mean'))}",
            *([f"{self._skipped} tickets skipped"] if self._skipped else []),
            *(f"{count} groups without {term}" for term, count in self._without.items()),
            f"staleness {_number(metrics.get('staleness/mean'), '.2g')}",
            f"{seconds:.2f} s/step",
            f"ETA {_duration(seconds * (self._total - step - 1))}",
        ]
        return " | ".join(parts)


def _number(value: Any, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _with_change(metrics: Mapping[str, float], name: str) -> str:
    """A mean, and in brackets what it has changed by since the first evaluation, with its standard error."""
    changed, error = metrics.get(f"{name}/change"), metrics.get(f"{name}/change_stderr")
    text = _number(metrics.get(f"{name}/mean"))
    if changed is None:
        return text
    return f"{text} ({changed:+.3g}{'' if error is None else f' ± {error:.2g}'})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
