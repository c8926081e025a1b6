"""Types of the functions that `async_flowrl.main` hands to a run, so that the run need not import planner or report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_flowrl.config.schema import Config
from async_flowrl.run.hosts import CheckHosts
from async_flowrl.run.prepare import Prepared
from async_flowrl.training.messages import Layout

CheckDevices = Callable[[Config, Mapping[str, int]], Sequence[str]]
"""Compares the planned memory with the bytes of device memory by pool. Returns warnings or raises ConfigError."""
ChooseLayout = Callable[[Config, Mapping[str, int]], tuple[Layout, Sequence[str]]]
"""Decides what `auto` is in the trainer's layout, from bytes of device memory by pool. Returns it, and why."""
Preflight = Callable[[Prepared], Sequence[str]]
"""Checks the machines on which a run would start. Returns warnings or raises ConfigError."""
Report = Callable[[Path], object]
"""Writes report.html into a run's directory, from its files."""


@dataclass(frozen=True)
class Tools:
    """Functions that a run calls; the defaults do nothing."""

    check_devices: CheckDevices = lambda config, memory: ()
    choose_layout: ChooseLayout = lambda config, memory: (Layout.named(config.trainer), ())
    report: Report | None = None
    preflight: Preflight = lambda prepared: ()
    check_hosts: CheckHosts | None = None
