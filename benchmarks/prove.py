"""Command `python -m benchmarks.prove` (`make prove`): shows that disturbances do not change the trained weights.

The same short run is made several times: undisturbed, with random delays, and with processes killed. So are
a shorter run that trains whole weights (tune=full), and one in which each of two trainer ranks has a share of them
(trainer.shard=full). The command compares the digests of the trained weights; its exit code is 0 if they are equal, and
1 if they differ or if a run failed.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.observability.events import Event, read_events
from benchmarks.disturbed import Disturbance

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
    "total_steps=6",
)
"""Further overrides of the runs that train whole weights."""
SHARES = ("trainer.num_workers=2", "trainer.shard=full", "trainer.micro_batch_size=2")
"""Overrides with which each of two trainer ranks has a share of the whole weights, and parts of each group to train."""
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    parser.add_argument("overrides", nargs="*", help="configuration overrides for all runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        try:
            digests_of_families = [run_cases(family, out) for family in families(options.overrides)]
        except NotProven as error:
            sys.stderr.write(f"not proven: {error}\n")
            return 1
    equal = all(len(set(digests.values())) == 1 for digests in digests_of_families)
    sys.stdout.write("proven: the digests are equal\n" if equal else "NOT proven: the digests differ\n")
    return 0 if equal else 1


@dataclass(frozen=True)
class Family:
    """The runs whose trained weights must have one digest."""

    title: str
    """Begins the lines of its runs; empty for the runs that the overrides describe, by default those of a LoRA."""
    folder: str
    """Begins the names of their folders."""
    overrides: Sequence[str]
    cases: Mapping[str, Case]
    """Title → case."""


def families(overrides: Sequence[str]) -> list[Family]:
    """Returns the family of the run that the overrides describe, and those of runs with whole weights.

    The latter are left out if the overrides set `tune`. Each is left out, with a line that says why, if a run of it
    would be refused with these overrides.
    """
    first = Family("", "run", overrides, on_one_rank(killed) | {"2 trainer ranks, one killed -9": rank_killed})
    if any(override.startswith("tune=") for override in overrides):
        return [first]
    accepted = [first]
    for family in whole_weights(overrides):
        try:
            check(compose_config("one_step_off", [*SHORT_RUN, *family.overrides]))
            accepted.append(family)
        except ConfigError as error:
            sys.stdout.write(f"{family.title} are left out: {error}\n")
    return accepted


def on_one_rank(kill: Case) -> dict[str, Case]:
    """Returns title → case, for runs with a single trainer rank."""
    return {
        "1 rollout worker, undisturbed": undisturbed,
        "3 rollout workers, random delays in every stage": delayed,
        "2 rollout workers, one killed -9; driver killed -9, resumed": kill,
    }


def whole_weights(overrides: Sequence[str]) -> list[Family]:
    """Returns the families of runs with whole weights: all of them on one trainer rank, and in shares on two."""
    alone = on_one_rank(partial(killed, victim_step=1, checkpoint=3))
    in_shares: dict[str, Case] = {
        "undisturbed": undisturbed,
        "2 rollout workers, delays, one trainer rank killed -9": share_killed,
    }
    full = [*FULL_WEIGHTS_RUN, *overrides]
    return [
        Family("full weights", "whole", full, alone),
        Family("full weights in shares of 2 ranks", "shares", [*full, *SHARES], in_shares),
    ]


def run_cases(family: Family, out: Path) -> dict[str, str]:
    """Makes the runs of a family and writes one line on each; returns title → digest.

    Their folders are `out`/run_0, `out`/run_1 and so on, with the family's own name in place of `run`.
    """
    digests = {}
    for number, (case_title, case) in enumerate(family.cases.items()):
        title = f"{family.title}: {case_title}" if family.title else case_title
        began = time.monotonic()
        digests[title] = case(out / f"{family.folder}_{number}", family.overrides)
        sys.stdout.write(f"{digests[title][:32]}  {title}  ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return digests


def undisturbed(folder: Path, overrides: Sequence[str]) -> str:
    """Case without a disturbance."""
    finish(start(folder, overrides), folder)
    return digest(folder)


def delayed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which random delays change the order in which tickets are finished."""
    delays = [f"disturb.{stage}=0.3" for stage in ("generate", "score", "update", "publish")]
    finish(start(folder, [*overrides, "rollout.num_workers=3", *delays]), folder)
    order = [event["ordinal"] for event in events(folder, "ticket") if event["state"] == "SCORING"]
    if order == sorted(order):
        raise NotProven("the delays never changed the order in which tickets were finished")
    at = {(event["version"], event["state"]): event["time"] for event in events(folder, "version")}
    late = Disturbance(publish=0.3)
    for version in [version for version, state in at if state == "acknowledged" and version > 0]:
        if at[version, "acknowledged"] - at[version, "staged"] < late.delay("publish", "publish", version):
            raise NotProven(f"version {version} was published without its delay")
    return digest(folder)


def killed(folder: Path, overrides: Sequence[str], *, victim_step: int = 2, checkpoint: int = 6) -> str:
    """Case in which a rollout worker is killed, and later the driver; the run is then resumed from a checkpoint.

    The worker runs a ticket of step `victim_step` or later; the driver has just written the checkpoint `checkpoint`.
    """
    run = start(folder, [*overrides, "rollout.num_workers=2", "disturb.generate=0.2"])
    victim = wait_for(
        run, folder, lambda: running_worker(folder, step=victim_step), f"a ticket of step {victim_step} is RUNNING"
    )
    os.kill(victim, signal.SIGKILL)
    wait_for(run, folder, lambda: bool(events(folder, "fault")), "the controller noticed the death")
    wait_for(run, folder, lambda: is_written(folder, checkpoint), f"checkpoint {checkpoint} is written")
    run.send_signal(signal.SIGKILL)
    run.wait()
    finish(start(folder, [*overrides, "rollout.num_workers=2", "resume=auto"]), folder)
    if not any(event["step"] == checkpoint for event in events(folder, "rollback")):
        raise NotProven(f"the resumed run did not start from checkpoint {checkpoint}")
    return digest(folder)


def rank_killed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which the first of two trainer ranks is killed; the run must go on without the checkpoint."""
    run = start(folder, [*overrides, "trainer.num_workers=2", "trainer.shard=none", "disturb.generate=0.2"])
    wait_for(run, folder, lambda: any(event["step"] == 4 for event in events(folder, "step")), "step 4 is done")
    back = kill_rank(run, folder, "trainer-0")  # This rank sends the weights and writes the checkpoints.
    if len(back) != 1 or back[0] < 4:
        raise NotProven(f"the run went back to step {back} when one of two trainer ranks died after step 4")
    shares = Counter(event["worker"].split(".")[0] for event in events(folder, "fetched") if event["bytes"])
    if len(shares) < 2:
        raise NotProven(f"the trainer ranks did not share the groups: {dict(shares)}")
    return digest(folder)


def share_killed(folder: Path, overrides: Sequence[str]) -> str:
    """Case in which one of two trainer ranks that have a share of the weights each is killed.

    Nobody else has its share, so the run must go back to a checkpoint.
    """
    delays = [f"disturb.{stage}=0.3" for stage in ("generate", "update")]
    run = start(folder, [*overrides, "rollout.num_workers=2", *delays])
    wait_for(run, folder, lambda: is_written(folder, 3), "checkpoint 3 is written")
    if kill_rank(run, folder, "trainer-1") != [3]:
        raise NotProven("the run did not go back to checkpoint 3 when a trainer rank with a share of the weights died")
    return digest(folder)


def kill_rank(run: "subprocess.Popen[bytes]", folder: Path, rank: str) -> list[int]:
    """Kills a trainer rank and waits for the end of the run; returns the steps to which the run went back.

    Raises NotProven if the run has not noticed it.
    """
    os.kill(pids(folder)[rank], signal.SIGKILL)
    finish(run, folder)
    if rank not in {event["worker"] for event in events(folder, "fault")}:
        raise NotProven("the run has no event of the trainer rank's death")
    return [event["step"] for event in events(folder, "rollback")]


def pids(folder: Path) -> dict[str, int]:
    """Returns worker → process id."""
    return {event["worker"]: event["pid"] for event in events(folder, "worker")}


def start(folder: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Starts a run in `folder` as a process of its own and returns that process."""
    command = [sys.executable, "-m", "benchmarks.disturbed", "--config-name", "one_step_off", *SHORT_RUN]
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


def is_written(folder: Path, checkpoint: int) -> bool:
    """Returns True if the run has written this checkpoint."""
    return (folder / "checkpoints" / f"step_{checkpoint}").exists()


def running_worker(folder: Path, *, step: int) -> int | None:
    """Returns the process id of a rollout worker that runs a training ticket of `step` or later, or None."""
    last = {event["ordinal"]: event for event in events(folder, "ticket") if event["kind"] == "train"}
    running = [event for event in last.values() if event["state"] == "RUNNING" and event["step"] >= step]
    return pids(folder)[running[-1]["worker"]] if running else None


def events(folder: Path, name: str) -> list[Event]:
    """Returns the run's events of that name in the order of their writing; empty if the run has written none."""
    path = folder / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def digest(folder: Path) -> str:
    """Returns the digest of the trained weights from the run's summary."""
    return str(json.loads((folder / "summary.json").read_text())["weights_digest"])


if __name__ == "__main__":
    raise SystemExit(main())
