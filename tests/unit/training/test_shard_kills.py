"""Tests of a trainer rank killed at any instant while it writes a checkpoint in shares: a sound one is always left."""

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_flowrl.training.checkpoint import Checkpoint, read_checkpoint
from async_flowrl.training.checkpoint_folder import begin_checkpoint, checkpoint_step, find_checkpoint
from async_flowrl.training.fsdp import World
from async_flowrl.training.shard_saving import ShardSaving
from tests.support.forked import CONTEXT

pytestmark = pytest.mark.serial("ranks")

SHAPES = {"a": (300, 20), "b": (7, 3)}
CHANGES = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
"""Events of a process that changes a folder → place of the path among the event's arguments."""


def contents(version: int) -> Checkpoint:
    tensors = {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}
    return Checkpoint({"weights": tensors}, {"version": version, "weights_digest": f"{version:032x}"}, {})


def is_change(folder: str, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event of Python's audit changes a file in the folder: a file opened to be written, a rename, ..."""
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(folder) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    path = str(arguments[CHANGES[event]]) if event in CHANGES else ""
    return path.startswith(folder) or (bool(path) and not path.startswith("/"))  # rmtree names files relatively


def write(folder: str, version: int, before: int, most: int) -> None:
    """Writes a checkpoint as a rank does, and is killed before change number `before`, or in byte `most` of a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saving = ShardSaving.of(World(0, 1), SHAPES)
    saving.snapshot = version, contents(version)
    left = [before]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if is_change(folder, event, arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    if most:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills; Python ignores it and gets an error instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    work = saving.begin(folder)
    saving.end(work, {}, [saving.write(work)], 1, ())


def ended(folder: Path, version: int, *, before: int = 0, most: int = 0) -> int | None:
    """The exit code of a process that writes a checkpoint; minus the signal that has killed it."""
    process = CONTEXT.Process(target=write, args=(str(folder), version, before, most))
    process.start()
    process.join(120.0)
    hung = process.exitcode is None
    process.kill()
    assert not hung, "it did not end by itself"
    return process.exitcode


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


@pytest.mark.parametrize(
    "version", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["the next one", "one that is replaced"]
)
def test_killed_before_any_change_of_the_folder(tmp_path: Path, before: Path, version: int) -> None:
    copy, left = copies(tmp_path, before), []
    for change in itertools.count(1):
        folder = copy()
        code = ended(folder, version, before=change)
        left.append(check_sound(folder, (1, version)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert change > 10, "folder, shares, metadata, states, manifest, renames"
    assert left == sorted(left) and (left[0], left[-1]) == (1, version)


@pytest.mark.parametrize("most", [1, 600, 20_000])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, before: Path, most: int) -> None:
    folder = copies(tmp_path, before)()
    assert ended(folder, 2, most=most) == -signal.SIGXFSZ
    assert check_sound(folder, (1,)) == 1
