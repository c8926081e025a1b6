"""Test of the tiny model: its bytes are the same wherever and however often it is built."""

import hashlib
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny import build_tiny
from tests.support.forked import CONTEXT


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()


def build_there(said: Connection, cache: str, own: str) -> None:
    """Runs in the other process: it builds the model when it is told to, with all that this takes imported before.

    Of two that build at once one takes the other's, so it then builds one in the folder `own`.
    """
    import async_flowrl.policies.qwen_image  # noqa: F401

    torch.set_num_threads(2)
    os.environ["ASYNC_FLOWRL_CACHE"] = cache
    said.send(hash("red"))
    said.recv()
    said.send(str(build_tiny(TinyConfig())))
    said.send(str(build_tiny(TinyConfig(), Path(own))))


@pytest.mark.extended
@pytest.mark.serial("runs")
def test_two_processes_at_once_build_the_same_bytes_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process and another one, which has two threads and hashes in an order of its own."""
    here, there = build_tiny(TinyConfig(), tmp_path / "here"), tmp_path / "there"
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(there))
    ours, theirs = CONTEXT.Pipe()
    other = CONTEXT.Process(target=build_there, args=(theirs, str(there), str(tmp_path / "theirs")), daemon=True)
    other.start()
    assert ours.recv() != hash("red") or "PYTHONHASHSEED" in os.environ
    ours.send("begin")
    built = build_tiny(TinyConfig())
    assert Path(ours.recv()) == built
    alone = Path(ours.recv())
    other.join(300)
    assert other.exitcode == 0
    assert digest(built) == digest(here) == digest(alone)
    assert [entry.name for entry in there.iterdir()] == [here.name]
