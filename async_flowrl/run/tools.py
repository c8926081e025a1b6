"""Types of the functions that `async_flowrl.main` hands to a run, so that the run need not import planner or report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.run.hosts import CheckHosts
from async_flowrl.run.prepare import Prepared
from async_flowrl.training.messages import Layout

Predict = Callable[[Path], str | None]
"""Compares the finished run in a directory with its plan. Returns a sentence, or None if the run is too short."""
CheckDevices = Callable[[Config, Mapping[str, int]], Sequence[str]]
"""Compares the planned memory with the bytes of device memory by pool. Returns warnings or raises ConfigError."""
ChooseLayout = Callable[[Config, Mapping[str, int]], tuple[Layout, Sequence[str]]]
"""Decides what `auto` is in the trainer's layout, from bytes of device memory by pool. Returns it, and why."""
ForetellSteps = Callable[[Config, Path], str]
"""Predicts the step time from the earlier steps in a run's directory. Returns a sentence, or why there is none."""
ForetellMemory = Callable[[Config, Mapping[str, int]], str]
"""Predicts the memory of the processes, from bytes of device memory by pool. Returns a sentence, or why not."""
Preflight = Callable[[Prepared], Sequence[str]]
"""Checks the machines on which a run would start. Returns warnings or raises ConfigError."""
Report = Callable[[Path], object]
"""Writes report.html into a run's directory, from its files."""


@dataclass(frozen=True)
class Tools:
    """Functions that a run calls; the defaults do nothing."""

    predict: Predict = lambda run_directory: None
    check_devices: CheckDevices = lambda config, memory: ()
    foretell_steps: ForetellSteps = lambda config, run_directory: "no step time: started without planner"
    foretell_memory: ForetellMemory = lambda config, memory: "no memory: started without planner"
    choose_layout: ChooseLayout = lambda config, memory: (Layout.named(config.trainer), ())
    report: Report | None = None
    preflight: Preflight = lambda prepared: ()
    check_hosts: CheckHosts | None = None
