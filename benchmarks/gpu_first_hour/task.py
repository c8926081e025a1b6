"""The process of one stage: python -m benchmarks.gpu_first_hour.task PLACE ANSWER WORK SECONDS [key=value ...].

A stage is a function of a Task. It says lines; each is written to ANSWER (a JSON list) at once, so that a crash, a hang
or a full device loses nothing that was measured before. The exit code is 1 if a line was not ok or an error ended it.
Stages run programs with a time limit (`run_within`), and nothing that such a program has started outlives it, in
whatever session it is.
"""

import faulthandler
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil

GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_ROUNDS = 5
"""Number of searches for processes that were started while others were killed."""
RESERVE_SECONDS = 15.0
"""Seconds before the stage's own limit at which the last program that it starts is ended."""


@dataclass
class Task:
    """What a stage has: a folder to write to, time, and the settings that the user gave."""

    answer: Path
    work: Path
    until: float
    """Value of time.monotonic() at which the stage should be done."""
    words: Sequence[str] = ()
    """Settings `key=value` for the stages at full size."""
    said: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, what: str, *, ok: bool | None = None, **figures: Any) -> None:
        """Adds one line to the answer. `ok` is a verdict, None for a measurement without one."""
        line = {"what": what, **({} if ok is None else {"ok": ok}), **figures}
        with self._lock:
            self.said.append(line)
            partial = self.answer.with_suffix(".partial")
            partial.write_text(json.dumps(self.said, indent=1), encoding="utf-8")
            partial.replace(self.answer)
        print(json.dumps(line), flush=True)

    @property
    def left(self) -> float:
        """Seconds that the stage has left."""
        return self.until - time.monotonic()

    def program(self, name: str, command: Sequence[str], most: float, environment: Mapping[str, str]) -> str | None:
        """Runs a program for at most `most` seconds; returns None, or why it failed. Its log is WORK/logs/NAME.log."""
        log = self.work / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        most = min(most, self.left)
        if most <= 0:
            return "no time was left"
        code, left_over = run_within([sys.executable, *command], most, log, {**os.environ, **environment})
        if code == 0 and not left_over:
            return None
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = f"not done within {most:.0f} s" if code is None else f"exit code {code}"
        return "; ".join([why, f"left over: {', '.join(left_over) or 'nothing'}", *lines[-1:]])[:400]

    def train(
        self, name: str, *words: str, most: float = float("inf"), prefix: Sequence[str] = (), **environment: str
    ) -> dict[str, Any] | None:
        """Trains one_step_off with the settings `words` in a process of its own and says what came out.

        `prefix` are arguments of Python before the program. Returns its summary; None if it failed. A run that trained
        on the CPU beside a card is not ok.
        """
        from async_flowrl.cli.benchmark import NOTHING_BUT_TRAINING
        from benchmarks.gpu_first_hour.sizes import real_card

        file = re.sub(r"\W+", "_", name)
        folder = self.work / "runs" / file
        shutil.rmtree(folder, ignore_errors=True)
        program = prefix or ("-m", "async_flowrl.main")
        given = (*NOTHING_BUT_TRAINING, "console=lines", "save.every=0", *words, f"output_dir={folder}")
        began = time.monotonic()
        failed = self.program(file, [*program, "--config-name", "one_step_off", *given], most, environment)
        seconds = round(time.monotonic() - began, 1)
        if failed is not None:
            self.say(name, ok=False, failed=failed, seconds=seconds)
            return None
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = sorted(line["timing/step"] for line in lines if "timing/step" in line)
        sync = {key: summary["sync"].get(key) for key in ("transport", "publishes", "fallbacks", "member_busy")}
        said = (self.work / "logs" / f"{file}.log").read_text(errors="replace").splitlines()
        device = next((line.split(",")[0] for line in reversed(said) if line.startswith("devices ")), "not known")
        figures = {"step_seconds": steps[len(steps) // 2], "mfu": summary.get("mfu"), "sync": sync, "device": device}
        good = None if not real_card() else "GPU" in device
        self.say(name, ok=good, digest=summary["weights_digest"], seconds=seconds, **figures)
        return summary

    def equal(self, what: str, summaries: Mapping[str, Mapping[str, Any] | None], *, equal: bool = True) -> None:
        """Says whether the weights of all runs are equal, or with `equal=False` all different."""
        digests = {name: summary["weights_digest"] if summary else "failed" for name, summary in summaries.items()}
        kinds = len(set(digests.values()))
        good = kinds == (1 if equal else len(digests)) and "failed" not in digests.values()
        self.say(what, ok=good, digests={name: digest[:16] for name, digest in digests.items()})


def run_within(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> tuple[int | None, tuple[str, ...]]:
    """Runs a command until it ends or `seconds` are over; its output and errors are appended to `log`.

    Returns the exit code, negative for a signal and None if the limit ended it, and the names of the processes that
    were still there and were killed.
    """
    mark = f"GPU_FIRST_HOUR_{secrets.token_hex(8)}"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**environment, mark: "1"}, cwd=cwd, start_new_session=True
        )
    code = None
    try:
        code = process.wait(max(seconds, 0.0))
        psutil.wait_procs(marked(mark), GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        left_over = end_marked(mark)
        process.wait()
    return code, left_over


def end_marked(mark: str) -> tuple[str, ...]:
    """Kills every process whose environment has the variable `mark`, and its descendants; returns their names."""
    killed: list[str] = []
    for _ in range(_ROUNDS):
        found = marked(mark)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                killed.append(process.name())
                process.kill()
        psutil.wait_procs(found, GRACE_SECONDS)
        if not found:
            break
    return tuple(killed)


def marked(mark: str) -> list[psutil.Process]:
    """Returns the living processes with the variable `mark` in their environment, and their descendants."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and mark in process.environ():
                found |= {process, *process.children(recursive=True)}
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def main(arguments: Sequence[str]) -> int:
    """Runs the stage. SIGTERM, sent when the time is over, writes the stack of every thread to the log."""
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    place, answer, work, seconds, *words = arguments
    until = time.monotonic() + float(seconds) - RESERVE_SECONDS
    task = Task(Path(answer), Path(work), until, words)
    try:
        stage: Callable[[Task], None] = resolve_name(place)
        stage(task)
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:600]
        task.say("error", ok=False, kind=type(error).__name__, error=said)
    return int(any(line.get("ok") is False for line in task.said))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is written; threads of autograd or NCCL that hang at the end do not concern the stage
