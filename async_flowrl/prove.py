"""Command `python -m async_flowrl.prove` (`make prove`): shows that disturbances do not change the trained weights.

The same short run is made several times: undisturbed, with random delays, and with processes killed. A shorter run that
trains whole weights (tune=full) is made undisturbed and with a rollout worker killed. The command compares the digests
of the trained weights; its exit code is 0 if they are equal, and 1 if they differ or if a run failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.observability.events import Event, read_events

SHORT_RUN = (
    "total_steps=10",
    "save.every=3",
    "evaluate.before_training=false",
    "evaluate.images_per_prompt=2",
    "console=quiet",
    "monitor.report=false",
)
"""Overrides of all runs."""
FULL_WEIGHTS_RUN = (
    "tune=full",
    "trainer.learning_rate=1e-3",
    "model.tiny.layers=1",
    "model.tiny.heads=2",
    "total_steps=4",
)
"""Further overrides of the runs that train whole weights."""
MAX_RUN_SECONDS = 300.0
"""Upper limit for the duration of a single run, in seconds."""


Case = Callable[[Path, Sequence[str]], str]
"""Function that makes a run in a folder with overrides, disturbs it, and returns the digest of its weights.

It raises NotProven if the run fails or if the disturbance does not happen.
"""


class NotProven(RuntimeError):
    """A run failed, or the disturbance that was to be tested did not happen."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command on `arguments` (None: those of the process) and returns the exit code, 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m async_flowrl.prove", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        try:
            families = prove(out, options.overrides)
        except NotProven as error:
            sys.stderr.write(f"not proven: {error}\n")
            return 1
    equal = all(len(set(digests.values())) == 1 for digests in families)
    sys.stdout.write("proven: the digests are equal\n" if equal else "NOT proven: the digests differ\n")
    return 0 if equal else 1


def prove(out: Path, overrides: Sequence[str]) -> list[dict[str, str]]:
    """Makes all runs in folders below `out` and returns one mapping, title of the run → digest, for each kind of run.

    The first mapping is of the run that the overrides describe, by default that of a LoRA. The second is of runs of
    whole weights. It is left out if the overrides set `tune`, or if a run with tune=full would be refused with them.
    Raises NotProven as the cases do.
    """
    cases: dict[str, Case] = {
        "1 rollout worker, undisturbed": undisturbed,
        "3 rollout workers, random delays in every stage": delayed,
        "2 rollout workers, one killed -9; driver killed -9, resumed": killed,
        "2 trainer ranks, one killed -9": rank_killed,
    }
    full_weights: dict[str, Case] = {
        "full weights: 1 rollout worker, undisturbed": undisturbed,
        "full weights: 2 rollout workers, one killed -9": worker_killed,
    }
    digests = [run_cases(cases, out, "run", overrides)]
    if any(override.startswith("tune=") for override in overrides):
        return digests
    if reason := refusal([*FULL_WEIGHTS_RUN, *overrides]):
        sys.stdout.write(f"full weights are left out: {reason}\n")
        return digests
    return [*digests, run_cases(full_weights, out, "whole", [*FULL_WEIGHTS_RUN, *overrides])]


def refusal(overrides: Sequence[str]) -> str | None:
    """Returns the reason why a run with these overrides would be refused, or None if it would be accepted."""
    try:
        check(compose_config("one_step_off", [*SHORT_RUN, *overrides]))
    except ConfigError as error:
        return str(error)
    return None


def run_cases(cases: Mapping[str, Case], out: Path, name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Makes the runs of the cases and writes one line on each; returns title → digest.

    `cases` is title → case. Their folders are `out`/`name`_0, `out`/`name`_1 and so on.
    """
    digests = {}
    for number, (title, case) in enumerate(cases.items()):
        began = time.monotonic()
        digests[title] = case(out / f"{name}_{number}", overrides)
        sys.stdout.write(f"{digests[title][:32]}  {title}  ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return digests


def undisturbed(folder: Path, overrides: Sequence[str]) -> str:
    """Case without a disturbance."""
    finish(start(folder, overrides), folder)
    return digest(folder)


def delayed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which random delays change the order in which tickets are finished."""
    delays = [f"debug.delays.{stage}=0.3" for stage in ("generate", "score", "update", "publish")]
    finish(start(folder, [*overrides, "rollout.num_workers=3", *delays]), folder)
    order = [event["ordinal"] for event in events(folder, "ticket") if event["state"] == "SCORING"]
    if order == sorted(order):
        raise NotProven("the delays never changed the order in which tickets were finished")
    return digest(folder)


def killed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which a rollout worker is killed, and later the driver; the run is then resumed from checkpoint 6."""
    run = start(folder, [*overrides, "rollout.num_workers=2", "debug.delays.generate=0.2"])
    victim = wait_for(run, folder, lambda: running_worker(folder, step=2), "a ticket of step 2 is RUNNING")
    os.kill(victim, signal.SIGKILL)
    wait_for(run, folder, lambda: bool(events(folder, "fault")), "the controller noticed the death")
    wait_for(run, folder, lambda: (folder / "checkpoints" / "step_6").exists(), "checkpoint 6 is written")
    run.send_signal(signal.SIGKILL)
    run.wait()
    finish(start(folder, [*overrides, "rollout.num_workers=2", "resume=auto"]), folder)
    if not any(event["step"] == 6 for event in events(folder, "rollback")):
        raise NotProven("the resumed run did not start from checkpoint 6")
    return digest(folder)


def worker_killed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which a rollout worker is killed."""
    run = start(folder, [*overrides, "rollout.num_workers=2", "debug.delays.generate=0.2"])
    victim = wait_for(run, folder, lambda: running_worker(folder, step=1), "a ticket of step 1 is RUNNING")
    os.kill(victim, signal.SIGKILL)
    finish(run, folder)
    if not events(folder, "fault"):
        raise NotProven("the run has no event of the rollout worker's death")
    return digest(folder)


def rank_killed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which the first of two trainer ranks is killed; the run must go on without the checkpoint."""
    run = start(folder, [*overrides, "trainer.num_workers=2", "trainer.shard=none", "debug.delays.generate=0.2"])
    wait_for(run, folder, lambda: any(event["step"] == 4 for event in events(folder, "step")), "step 4 is done")
    pids = {event["worker"]: event["pid"] for event in events(folder, "worker")}
    os.kill(pids["trainer-0"], signal.SIGKILL)  # This rank sends the weights and writes the checkpoints.
    finish(run, folder)
    if "trainer-0" not in {event["worker"] for event in events(folder, "fault")}:
        raise NotProven("the run has no event of the trainer rank's death")
    if events(folder, "rollback"):
        raise NotProven("the run went back to a checkpoint when one of two trainer ranks died")
    shares = Counter(event["worker"].split(".")[0] for event in events(folder, "fetched") if event["bytes"])
    if len(shares) < 2:
        raise NotProven(f"the trainer ranks did not share the groups: {dict(shares)}")
    return digest(folder)


def start(folder: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Starts a run in `folder` as a process of its own and returns that process."""
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", "one_step_off", *SHORT_RUN]
    return subprocess.Popen(
        [*command, f"output_dir={folder}", *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(run: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Waits for the end of a run. Raises NotProven with the end of its error output if its exit code is not 0."""
    _, errors = run.communicate(timeout=MAX_RUN_SECONDS)
    if run.returncode != 0:
        raise NotProven(f"{folder.name} ended with exit code {run.returncode}: {errors.decode()[-2000:]}")


def wait_for(run: "subprocess.Popen[bytes]", folder: Path, condition: Callable[[], Any], what: str) -> Any:
    """Waits until `condition` returns something true, and returns that; `what` says in words what is waited for.

    Raises NotProven if the run ends before, or after MAX_RUN_SECONDS.
    """
    deadline = time.monotonic() + MAX_RUN_SECONDS
    while time.monotonic() < deadline:
        if result := condition():
            return result
        if run.poll() is not None:
            raise NotProven(f"{folder.name} ended before {what}")
        time.sleep(0.02)
    run.kill()
    raise NotProven(f"{folder.name}: {MAX_RUN_SECONDS:g} s passed before {what}")


def running_worker(folder: Path, *, step: int) -> int | None:
    """Returns the process id of a rollout worker that runs a training ticket of `step` or later, or None."""
    pids = {event["worker"]: event["pid"] for event in events(folder, "worker")}
    last = {event["ordinal"]: event for event in events(folder, "ticket") if event["kind"] == "train"}
    running = [event for event in last.values() if event["state"] == "RUNNING" and event["step"] >= step]
    return pids[running[-1]["worker"]] if running else None


def events(folder: Path, name: str) -> list[Event]:
    """Returns the run's events of that name in the order of their writing; empty if the run has written none."""
    path = folder / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def digest(folder: Path) -> str:
    """Returns the digest of the trained weights from the run's summary."""
    return str(json.loads((folder / "summary.json").read_text())["weights_digest"])


if __name__ == "__main__":
    raise SystemExit(main())
