"""Functions that the program gives to a run: the planner and the report are tools, which the run does not import."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.run.prepare import Prepared

Predict = Callable[[Path], str | None]
"""Compares a finished run's directory with a plan and returns the sentence about it, if there is one."""
CheckDevices = Callable[[Config, Mapping[str, int]], Sequence[str]]
"""Compares a configuration with bytes of device memory by pool: sentences to warn with, or ConfigError."""
ForetellSteps = Callable[[Config, Path], str]
"""The step time of a run from what earlier attempts left in its directory, in a sentence, or why it cannot be known."""
ForetellMemory = Callable[[Config, Mapping[str, int]], str]
"""What the processes will need of the devices, whose bytes are given by pool, or why it cannot be known."""
Preflight = Callable[[Prepared], Sequence[str]]
"""Looks at the machines that a run would start on: sentences to warn with, or ConfigError."""
Report = Callable[[Path], object]
"""Writes report.html into a run's directory, from its files."""


@dataclass(frozen=True)
class Tools:
    predict: Predict = lambda run_directory: None
    check_devices: CheckDevices = lambda config, memory: ()
    foretell_steps: ForetellSteps = lambda config, run_directory: "no step time: started without planner"
    foretell_memory: ForetellMemory = lambda config, memory: "no memory: started without planner"
    report: Report | None = None
    preflight: Preflight = lambda prepared: ()
