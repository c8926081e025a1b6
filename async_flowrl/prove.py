"""python -m async_flowrl.prove: one short run undisturbed, delayed, and killed; equal digests or exit code 1.

So are two shorter runs that train whole weights (tune=full), one of them killed.
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
WHOLE = ("tune=full", "trainer.learning_rate=1e-3", "model.tiny.layers=1", "model.tiny.heads=2", "total_steps=4")
MAX_RUN_SECONDS = 300.0
"""For any one of the runs."""


Case = Callable[[Path, Sequence[str]], str]
"""Makes a run in a folder, disturbs it, and returns its digest."""


class NotProven(RuntimeError):
    """A run failed, or the disturbance did not happen."""


def main(arguments: Sequence[str] | None = None) -> int:
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
    """Returns the digests of the runs by what was done to them: of a LoRA, or of what the overrides name, and of whole
    weights, which are left out where the overrides say what is trained, or cannot go with tune=full."""
    cases: dict[str, Case] = {
        "1 rollout worker, undisturbed": undisturbed,
        "3 rollout workers, random delays in every stage": delayed,
        "2 rollout workers, one killed -9; driver killed -9, resumed": killed,
        "2 trainer ranks, one killed -9": rank_killed,
    }
    whole: dict[str, Case] = {
        "full weights: 1 rollout worker, undisturbed": undisturbed,
        "full weights: 2 rollout workers, one killed -9": worker_killed,
    }
    found = [shown(cases, out, "run", overrides)]
    if any(override.startswith("tune=") for override in overrides):
        return found
    if reason := refusal([*WHOLE, *overrides]):
        sys.stdout.write(f"full weights are left out: {reason}\n")
        return found
    return [*found, shown(whole, out, "whole", [*WHOLE, *overrides])]


def refusal(overrides: Sequence[str]) -> str | None:
    """Returns why a run with these overrides would be refused; None if nothing stands against it."""
    try:
        check(compose_config("one_step_off", [*SHORT_RUN, *overrides]))
    except ConfigError as error:
        return str(error)
    return None


def shown(cases: Mapping[str, Case], out: Path, name: str, overrides: Sequence[str]) -> dict[str, str]:
    """Runs the cases in folders of that name and writes a line on each."""
    digests = {}
    for number, (title, case) in enumerate(cases.items()):
        began = time.monotonic()
        digests[title] = case(out / f"{name}_{number}", overrides)
        sys.stdout.write(f"{digests[title][:32]}  {title}  ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return digests


def undisturbed(folder: Path, overrides: Sequence[str]) -> str:
    finish(start(folder, overrides), folder)
    return digest(folder)


def delayed(folder: Path, overrides: Sequence[str]) -> str:
    delays = [f"debug.delays.{stage}=0.3" for stage in ("generate", "score", "update", "publish")]
    finish(start(folder, [*overrides, "rollout.num_workers=3", *delays]), folder)
    order = [event["ordinal"] for event in events(folder, "ticket") if event["state"] == "SCORING"]
    if order == sorted(order):
        raise NotProven("the delays never changed the order in which tickets were finished")
    return digest(folder)


def killed(folder: Path, overrides: Sequence[str]) -> str:
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
    run = start(folder, [*overrides, "rollout.num_workers=2", "debug.delays.generate=0.2"])
    victim = wait_for(run, folder, lambda: running_worker(folder, step=1), "a ticket of step 1 is RUNNING")
    os.kill(victim, signal.SIGKILL)
    finish(run, folder)
    if not events(folder, "fault"):
        raise NotProven("nobody noticed that a rollout worker died")
    return digest(folder)


def rank_killed(folder: Path, overrides: Sequence[str]) -> str:
    run = start(folder, [*overrides, "trainer.num_workers=2", "trainer.shard=none", "debug.delays.generate=0.2"])
    wait_for(run, folder, lambda: any(event["step"] == 4 for event in events(folder, "step")), "step 4 is done")
    pids = {event["worker"]: event["pid"] for event in events(folder, "worker")}
    os.kill(pids["trainer-0"], signal.SIGKILL)  # which sends the weights and writes the checkpoints
    finish(run, folder)
    if "trainer-0" not in {event["worker"] for event in events(folder, "fault")}:
        raise NotProven("nobody noticed that a trainer rank died")
    if events(folder, "rollback"):
        raise NotProven("the run went back to a checkpoint when one of two trainer ranks died")
    shares = Counter(event["worker"].split(".")[0] for event in events(folder, "fetched") if event["bytes"])
    if len(shares) < 2:
        raise NotProven(f"the trainer ranks did not share the groups: {dict(shares)}")
    return digest(folder)


def start(folder: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", "one_step_off", *SHORT_RUN]
    return subprocess.Popen(
        [*command, f"output_dir={folder}", *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(run: "subprocess.Popen[bytes]", folder: Path) -> None:
    _, errors = run.communicate(timeout=MAX_RUN_SECONDS)
    if run.returncode != 0:
        raise NotProven(f"{folder.name} ended with exit code {run.returncode}: {errors.decode()[-2000:]}")


def wait_for(run: "subprocess.Popen[bytes]", folder: Path, condition: Callable[[], Any], what: str) -> Any:
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
    """Pid of the rollout worker that now runs a ticket of `step` or later."""
    pids = {event["worker"]: event["pid"] for event in events(folder, "worker")}
    last = {event["ordinal"]: event for event in events(folder, "ticket") if event["kind"] == "train"}
    running = [event for event in last.values() if event["state"] == "RUNNING" and event["step"] >= step]
    return pids[running[-1]["worker"]] if running else None


def events(folder: Path, name: str) -> list[Event]:
    path = folder / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_digest"])


if __name__ == "__main__":
    raise SystemExit(main())
