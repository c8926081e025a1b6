"""Monitor: passes metrics and images of a running training to its views, i.e. console, TensorBoard and W&B."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from async_flowrl.config.schema import MonitorConfig
from async_flowrl.observability.trackers import ALIASES, Sample, Tensorboard, Wandb

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Interface of a view; Monitor explains the methods."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Passes steps, evaluations and pictures on to each view that is switched on.

    A view that raises an exception is switched off, with a warning and an entry in `failures`; the run goes on. The
    methods may be called from several threads.
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
        """`folder` is the run directory, `settings` the resolved configuration, `display` the console's view."""
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
        """Passes on the metrics of a finished step, under the names of metrics.jsonl."""
        self._each(lambda sink: sink.log(step, metrics))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Passes on the metrics of an evaluation, under the names of metrics.jsonl without the prefix `evaluation/`."""
        self._each(lambda sink: sink.evaluation(version, metrics))

    def image(self, path: Path, version: int) -> None:
        """Passes on the picture grid of an evaluation, a PNG file."""
        self._each(lambda sink: sink.image(path, version))

    def samples(self, version: int, samples: Sequence[Sample]) -> None:
        """Passes on single images of an evaluation, in the order of the prompts."""
        self._each(lambda sink: sink.samples(version, samples))

    def close(self) -> None:
        """Closes all views; may be called more than once."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, work: Callable[[Sink], None]) -> None:
        with self._turn:
            for sink in list(self._sinks):
                try:
                    work(sink)
                except Exception as error:  # a view must not end the run, e.g. when the network fails
                    self._sinks.remove(sink)
                    name = type(sink).__name__.lower()
                    self.failures.append(f"monitor {name}: {type(error).__name__}: {error}")
                    logger.warning("the monitor %s is switched off: %s: %s", name, type(error).__name__, error)
