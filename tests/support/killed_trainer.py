"""Trainer ranks that SIGKILL themselves in given phases of a step: each kill once in a run, in whatever process."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from async_flowrl.seeds import derive
from async_flowrl.shared.shared_worker import SharedTrainer, SharedWorker
from async_flowrl.training.trainer_worker import TrainerWorker

PHASES: Mapping[str, tuple[str, ...]] = {
    "micro-batch": ("train",),
    "sum": ("add_up",),
    "optimizer step": ("take_step",),
    "publishing": ("sender.stage", "sender.policy.seal"),
    "copy": ("kept_state",),
}
"""Phase → the calls of a trainer rank that it consists of. Copy and publishing happen on the first rank only."""
GATHERING: Mapping[str, tuple[str, ...]] = {"gathering": ("sender.gather",)}
"""The same of ranks that have some rows of every tensor each."""
ON_FIRST = ("publishing", "copy")
DEFAULT_SECONDS = 0.02
"""Taken for the length of a call that has not been made in this process."""


@dataclass(frozen=True)
class Kill:
    """One death: at a share of the duration of the phase, in its first call from version `step` on."""

    step: int
    rank: int
    phase: str
    share: float


def drawn(seed: int, name: str, *, ranks: int, each: int = 2, apart: int = 2) -> list[Kill]:
    """Draws `each` kills of every phase in a random order, `apart` steps from one to the next."""
    draw = random.Random(derive(seed, "kills", name))
    phases = [phase for phase in PHASES for _ in range(each)]
    draw.shuffle(phases)
    return [
        Kill(1 + apart * place, 0 if phase in ON_FIRST else draw.randrange(ranks), phase, draw.random())
        for place, phase in enumerate(phases)
    ]


class Killer:
    """Ends this process as a list of kills says, and notes each before in a file, which tells later processes of it."""

    def __init__(self, kills: Sequence[Kill], notes: Path, rank: int) -> None:
        self._kills, self._notes, self._rank = kills, notes, rank
        self._seconds: dict[str, float] = {}

    def next_kill(self) -> Kill | None:
        done = len(self._notes.read_text().splitlines()) if self._notes.exists() else 0
        return self._kills[done] if done < len(self._kills) else None

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """The body is a call of a phase: it ends within, or right after it, if its time has come."""
        kill = self.next_kill()
        due = kill is not None and kill.rank == self._rank and kill.phase == name and step >= kill.step
        over = threading.Event()
        if due and kill is not None:
            after = kill.share * self._seconds.get(name, DEFAULT_SECONDS)
            threading.Thread(target=self._die, args=(kill, over, after), daemon=True).start()
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
        if due:
            over.set()
            time.sleep(60)  # The thread kills the process.

    def _die(self, kill: Kill, over: threading.Event, after: float) -> None:
        over.wait(after)
        with self._notes.open("a") as notes:
            notes.write(f"{kill.step} {kill.rank} {kill.phase}\n")
            notes.flush()
            os.fsync(notes.fileno())
        os.kill(os.getpid(), signal.SIGKILL)


def watched(trainer: TrainerWorker, killer: Killer) -> None:
    """Puts the phases around the calls of a trainer rank; those of its sender once it has one."""

    def around(owner: Any, name: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            with killer.phase(phase, trainer.versions.newest):
                return inner(*args, **kwargs)

        setattr(owner, name, call)

    load = trainer.load

    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        told = load(*args, **kwargs)
        for phase, names in (PHASES | GATHERING).items():
            for path in names:
                owner: Any = trainer
                *parts, name = path.split(".")
                for part in parts:
                    owner = getattr(owner, part, None)
                if hasattr(owner, name):
                    around(owner, name, phase)
        return told

    trainer.load = loading  # type: ignore[method-assign]


PROGRAM = """
import sys
from pathlib import Path
from async_flowrl import main
from tests.support.killed_trainer import Kill
given = dict(kills={kills!r}, notes=Path({notes!r}))
sys.exit(main.main({{
    "async_flowrl.training.trainer_worker:TrainerWorker": ("tests.support.killed_trainer:KilledTrainer", given),
    "async_flowrl.shared.shared_worker:SharedWorker": ("tests.support.killed_trainer:KilledShared", given),
}}))
"""


def run_killed(kills: Sequence[Kill], folder: Path, *words: str, seconds: float) -> list[str]:
    """A whole run with these deaths, which must end well: what was noted of them, line by line."""
    notes = folder.with_name("kills")
    command = [sys.executable, "-c", PROGRAM.format(kills=kills, notes=str(notes)), "--config-name", "one_step_off"]
    words = (*words, f"output_dir={folder}")
    ended = subprocess.run([*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=seconds)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    return notes.read_text().splitlines()


class KilledTrainer(TrainerWorker):
    def __init__(self, *given: Any, kills: Sequence[Kill], notes: Path, **options: Any) -> None:
        super().__init__(*given, **options)
        watched(self, Killer(kills, notes, self.index))


class KilledShared(SharedWorker):
    """Rank and rollout worker in one process, which dies as its trainer rank does."""

    trainer: SharedTrainer

    def __init__(self, *given: Any, kills: Sequence[Kill], notes: Path, **options: Any) -> None:
        super().__init__(*given, **options)
        watched(self.trainer, Killer(kills, notes, self.trainer.index))
