"""Runs that are started on a pretended node, and helpers to read their output and files."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration import runs
from tests.nodes.node_processes import end_tree
from tests.nodes.pretended_nodes import Node

TINY = (*runs.TINY, *runs.WHOLE, "checkpoint_engine.setup_seconds=20", "deadlines.load=120")
LIMIT = 300.0
"""Time limit of each wait for a run, in seconds."""
HEADLESS = 60.0
"""Time limit for the end of a run that has lost Ray's head, in seconds."""


@dataclass
class RunOnNodes:
    """A run that has been started; `root` is its run directory."""

    root: Path
    process: "subprocess.Popen[str]"

    def after_step(self, step: int, seconds: float = LIMIT) -> None:
        """Waits until a step is trained. Raises AssertionError, with the run's output, if the run ends before."""
        self.wait_for(lambda: self.last_step >= step, f"step {step}", seconds)

    def wait_for(self, true: Callable[[], bool], what: str, seconds: float = LIMIT) -> None:
        """Waits until `true()` is true.

        Raises AssertionError, which names `what`, if the run ends before or after `seconds` seconds.
        """
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"ended before {what}:\n{self.printed}"
            assert time.monotonic() < end, f"no {what} within {seconds:g} s"
            time.sleep(0.1)

    def finish(self, code: int = 0, seconds: float = LIMIT) -> str:
        """Waits for the end of the run and returns its output.

        Raises AssertionError for another exit code or if the run hangs.
        """
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            end_tree(self.process)
            raise AssertionError(f"the run hangs:\n{self.printed}") from None
        assert self.process.returncode == code, self.printed
        return self.printed

    @property
    def printed(self) -> str:
        return self.root.with_suffix(".txt").read_text()

    @property
    def last_step(self) -> int:
        return max((int(line["step"]) for line in runs.Run(self.root).metrics if "step" in line), default=0)

    @property
    def events(self) -> list[dict[str, Any]]:
        return runs.Run(self.root).events

    @property
    def digest(self) -> str:
        return runs.Run(self.root).digest

    @property
    def log(self) -> str:
        return (self.root / "logs" / "controller.log").read_text()

    def nodes_of(self, pool: str) -> set[str]:
        """Returns the addresses of the nodes on which the pool's workers were started."""
        return {e["node"] for e in self.events if e["event"] == "worker" and e["worker"].startswith(pool)}

    @property
    def trained(self) -> list[tuple[int, int]]:
        """(step, ordinal) of every trained ticket, without those that a return to a checkpoint has undone."""
        found: list[tuple[int, int]] = []
        for event in self.events:
            if event["event"] == "rollback":
                found = [one for one in found if one[0] < event["step"]]
            elif event["event"] == "ticket" and event["kind"] == "train" and event["state"] == "TRAINED":
                found.append((event["step"], event["ordinal"]))
        return found


def start(driver: Node, root: Path, *overrides: str, **environment: str) -> RunOnNodes:
    """Starts a run with the normal command on the node `driver`, on the Ray cluster of that node."""
    words = ["--config-name", "one_step_off", *TINY, "runtime.address=auto", f"output_dir={root}", *overrides]
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".txt").open("w") as printed:
        program = [sys.executable, "-m", "benchmarks.disturbed", *words]
        return RunOnNodes(root, driver.start(*program, stdout=printed, **environment))
