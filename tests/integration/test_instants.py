"""SIGKILL of trainer ranks on Ray at instants that a seed draws: in each phase of a step twice, in one run."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from async_flowrl.cli.verify import verify
from benchmarks.prove import SHORT_RUN, digest, events, finish, start
from tests.support.killed_trainer import PHASES, drawn

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("KILL_SEED", "0"))
"""Another seed draws other instants: KILL_SEED=$RANDOM pytest -m slow tests/integration/test_instants.py."""
STEPS = 24
MAX_SECONDS = 900.0
RUN = """
import sys
from pathlib import Path
from async_flowrl import main
from tests.support.killed_trainer import drawn
given = dict(kills=drawn({seed}, {name!r}, ranks={ranks}), notes=Path({notes!r}))
sys.exit(main.main({{
    "async_flowrl.training.trainer_worker:TrainerWorker": ("tests.support.killed_trainer:KilledTrainer", given),
    "async_flowrl.shared.shared_worker:SharedWorker": ("tests.support.killed_trainer:KilledShared", given),
}}))
"""


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("none", 2, ("trainer.shard=none",)),
        ("hybrid", 4, ("trainer.shard=hybrid", "trainer.shard_size=2")),
        ("shared", 2, ("placement=shared", "rollout.num_workers=2")),
    ],
)
def test_ten_kills_of_trainer_ranks(tmp_path: Path, name: str, ranks: int, settings: tuple[str, ...]) -> None:
    calm, folder, notes = tmp_path / "calm", tmp_path / "run", tmp_path / "kills"
    own = [f"total_steps={STEPS}", f"trainer.num_workers={ranks}", "save.every=1000", *settings]
    finish(start(calm, own), calm)
    source = RUN.format(seed=SEED, name=name, ranks=ranks, notes=str(notes))
    command = [sys.executable, "-c", source, "--config-name", "one_step_off", *SHORT_RUN, f"output_dir={folder}", *own]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=MAX_SECONDS)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    killed = [line.split(maxsplit=2) for line in notes.read_text().splitlines()]
    assert [(int(step), int(rank), phase) for step, rank, phase in killed] == [
        (kill.step, kill.rank, kill.phase) for kill in drawn(SEED, name, ranks=ranks)
    ]
    assert Counter(phase for _, _, phase in killed) == dict.fromkeys(PHASES, 2)
    assert len(events(folder, "rollback")) == len(killed), "each death is a recovery"
    assert digest(folder) == digest(calm)
    assert [row for row in verify(folder) if not row[1]] == []
    print(json.dumps([event["step"] for event in events(folder, "rollback")]))
