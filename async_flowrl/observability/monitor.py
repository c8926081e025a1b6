"""Live views of a run: its console, TensorBoard and W&B, as `console` and the configuration group `monitor` say."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from async_flowrl.config.schema import MonitorConfig
from async_flowrl.observability.trackers import ALIASES, Sample, Tensorboard, Wandb

logger = logging.getLogger(__name__)


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
        self,
        config: MonitorConfig,
        folder: Path,
        *,
        name: str,
        settings: Mapping[str, Any],
        display: Sink | None = None,
    ) -> None:
        """`settings` is the resolved configuration; `display` is the console's view, which is open already."""
        self.failures: list[str] = []
        self._turn = threading.Lock()
        self._sinks: list[Sink] = []
        if display is not None:
            self._sinks.append(display)
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
