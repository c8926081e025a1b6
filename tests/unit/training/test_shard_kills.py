"""Tests of ranks that write a checkpoint in shares, each killed at any instant: a sound one is always left."""

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_flowrl.training.checkpoint import (
    Checkpoint,
    begin_checkpoint,
    checkpoint_step,
    find_checkpoint,
    read_checkpoint,
)
from async_flowrl.training.parts import World
from async_flowrl.training.sharded import ShardSaving
from checkpoint_engine.gather import shard_rows
from tests.support.forked import CONTEXT

pytestmark = pytest.mark.serial("runs")

SHAPES = {"a": (300, 20), "b": (7, 3)}
CHANGES = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
"""Events of a process that changes a folder → place of the path among the event's arguments."""


@dataclass(frozen=True)
class Death:
    """How a rank is killed: before change number `before` of the folder, or in byte `most` of a file."""

    rank: int
    before: int = 0
    most: int = 0


def contents(version: int, world: World) -> Checkpoint:
    rows = {name: len(shard_rows(shape[0], world.size, world.rank)) for name, shape in SHAPES.items()}
    tensors = {name: torch.full((rows[name], *shape[1:]), float(version)) for name, shape in SHAPES.items()}
    return Checkpoint({"weights": tensors}, {"version": version}, {})


def is_change(folder: str, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event of Python's audit changes a file in the folder: a file opened to be written, a rename, ..."""
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(folder) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    path = str(arguments[CHANGES[event]]) if event in CHANGES else ""
    return path.startswith(folder) or (bool(path) and not path.startswith("/"))  # rmtree names files relatively


def write(folder: str, version: int, world: World, death: Death | None) -> None:
    """Writes a checkpoint as a rank does, and is killed where it shall be."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}.store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    saving = ShardSaving(world)
    saving.snapshot = version, contents(version, world)
    left = 0 if death is None else death.before

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if is_change(folder, event, arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    if death is not None and death.most:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills; Python ignores it and gets an error instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (death.most, death.most))
    work = [saving.begin(folder) if world.rank == 0 else ""]
    dist.broadcast_object_list(work, src=0)
    written: list[Any] = [None] * world.size
    dist.all_gather_object(written, saving.write(work[0]))
    if world.rank == 0:
        saving.end(work[0], {}, written, 1, ())


def ended(folder: Path, version: int, death: Death | None = None, *, ranks: int = 2) -> int | None:
    """The exit code of the rank that shall die (or of the first); minus the signal that has killed it.

    The others are killed when it has ended, as the run would do.
    """
    Path(f"{folder}.store").unlink(missing_ok=True)
    processes = []
    for rank in range(ranks):
        own = death if death is not None and death.rank == rank else None
        processes.append(CONTEXT.Process(target=write, args=(str(folder), version, World(rank, ranks), own)))
    for process in processes:
        process.start()
    watched = processes[0 if death is None else death.rank]
    watched.join(120.0)
    hung = watched.exitcode is None
    if watched.exitcode == 0:
        for process in processes:
            process.join(120.0)
        assert [process.exitcode for process in processes] == [0] * ranks
    for process in processes:
        process.kill()
        process.join()
    assert not hung, "it did not end by itself"
    return watched.exitcode


def check_sound(folder: Path, versions: tuple[int, ...]) -> int:
    """A checkpoint of one of these versions is there, and nothing else once the next one has begun."""
    found = find_checkpoint(folder)
    assert found is not None
    step = checkpoint_step(found)
    assert step in versions
    weights = read_checkpoint(found).tensors["weights"]
    assert set(weights) == set(SHAPES)
    assert all(bool((weights[name] == step).all()) for name in SHAPES), "torn"
    work = begin_checkpoint(folder, 0)
    left = {path.name for path in folder.iterdir()} - {"latest"}
    assert left <= {work.name, *(f"step_{version}" for version in versions)} and f"step_{step}" in left
    return step


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint, of version 1."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    assert ended(folder, 1) == 0
    assert check_sound(folder, (1,)) == 1
    return folder


def copies(tmp_path: Path, before: Path) -> Callable[[], Path]:
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(before, tmp_path / str(next(numbers))))


def left_by_kills(folder_of: Callable[[], Path], ranks: int, rank: int, version: int) -> list[int]:
    """Returns the versions that are left when the rank is killed before its first change, its second, ..., by none."""
    left = []
    for change in itertools.count(1):
        folder = folder_of()
        code = ended(folder, version, Death(rank, before=change), ranks=ranks)
        left.append(check_sound(folder, (1, version)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    return left


@pytest.mark.parametrize(
    "version", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["the next one", "one that is replaced"]
)
@pytest.mark.parametrize(
    ("ranks", "rank", "fewest"), [(1, 0, 10), (2, 1, 1), pytest.param(2, 0, 10, marks=pytest.mark.slow)]
)
def test_killed_before_any_change_of_the_folder(
    tmp_path: Path, before: Path, ranks: int, rank: int, fewest: int, version: int
) -> None:
    """Rank 0 makes folder, share, metadata, states, manifest, renames; rank 1 its share alone."""
    left = left_by_kills(copies(tmp_path, before), ranks, rank, version)
    assert len(left) > fewest
    assert left == sorted(left) and (left[0], left[-1]) == (1, version)
    assert rank == 0 or set(left[:-1]) == {1}, "nothing counts without the share of every rank"


@pytest.mark.parametrize(("rank", "most"), [(0, 1), (1, 600), (0, 10_000)])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, before: Path, rank: int, most: int) -> None:
    folder = copies(tmp_path, before)()
    assert ended(folder, 2, Death(rank, most=most)) == -signal.SIGXFSZ
    assert check_sound(folder, (1,)) == 1
