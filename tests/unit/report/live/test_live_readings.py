"""Tests of what the live report reads, and when: files that change, runs that start, end or are written."""

import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from async_flowrl.observability.run_directory import RunDirectory, is_held
from async_flowrl.report import live, live_document
from async_flowrl.report.live_document import LiveDocument, begun
from tests.unit.report.live.served import Client, write_steps


def test_files_are_read_when_they_change_and_not_too_often(run: Path) -> None:
    now = [0.0]
    document = LiveDocument([run], lambda: now[0])
    first = document.content()
    for _ in range(50):
        assert document.content() == first
    assert document.readings == 1
    write_steps(run, 4)
    assert document.content() == first, "less than a second ago"
    now[0] += live_document.MIN_SECONDS
    assert document.content() != first and document.readings == 2
    now[0] += 60.0
    document.content()
    assert document.readings == 2, "nothing has changed"


def test_a_long_run_is_read_less_often(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(runs: Any) -> dict[str, Any]:
        now[0] += 3.0
        return {"runs": [str(path) for path in runs], "at": now[0]}

    monkeypatch.setattr(live_document, "document", slow)
    document = LiveDocument([run], lambda: now[0])
    document.content()
    for second in range(29):
        write_steps(run, 4 + second)
        now[0] += 1.0
        document.content()
    assert document.readings == 1
    now[0] += 2.0
    document.content()
    assert document.readings == 2


def test_many_browsers_are_one_reading(run: Path, serving: Callable[..., Client]) -> None:
    client = serving(run, clock=lambda: 0.0)
    threads = [threading.Thread(target=client.ask, args=("/document.json",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.server.live.readings == 1


def test_a_run_that_is_only_starting_and_one_that_ends(tmp_path: Path, serving: Callable[..., Client]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\ntotal_steps: 9\n")
    now = [0.0]
    client = serving(folder, clock=lambda: now[0])
    assert b"The run is starting" in client.ask("/")[2]
    assert client.ask("/document.json")[0] == 503
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_steps(folder, 0)
        now[0] += 1.0
        assert b"uPlot" in client.ask("/")[2]
        write_steps(folder, 2)
        now[0] += 10.0
        assert json.loads(client.ask("/document.json")[2])["runs"][0]["state"] == "running"
    now[0] += 10.0
    assert json.loads(client.ask("/document.json")[2])["runs"][0]["state"] == "unfinished", (
        "killed: no file has changed"
    )


def test_a_file_that_is_being_written_keeps_the_last_document(run: Path, serving: Callable[..., Client]) -> None:
    now = [0.0]
    client = serving(run, clock=lambda: now[0])
    _, _, before = client.ask("/document.json")
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n')
    now[0] += 60.0
    assert client.ask("/document.json")[0::2] == (200, before)
    for known in ({}, {"If_None_Match": client.ask("/document.json")[1]["ETag"]}):
        told = unquote(client.ask("/document.json", **known)[1][live.TROUBLE])
        assert "metrics.jsonl:2: not JSON" in told, "the page can say that what it shows is not the newest"
    write_steps(run, 5)
    now[0] += 60.0
    _, headers, newest = client.ask("/document.json")
    assert newest != before and live.TROUBLE not in headers


def test_a_run_that_cannot_be_read_is_not_one_that_is_starting(run: Path, serving: Callable[..., Client]) -> None:
    (run / "metrics.jsonl").write_text("<b>\n{}\n")
    page = serving(run).ask("/")[2].decode()
    assert "cannot be read" in page and "metrics.jsonl:1: not JSON" in page and "starting" not in page


def test_runs_of_a_sweep_appear_one_by_one(tmp_path: Path, run: Path) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "1").mkdir(parents=True)
    (sweep / "1/config.yaml").write_text("name: a\n")
    assert begun([sweep]) == []
    write_steps(sweep / "1", 1)
    assert begun([sweep, run]) == [sweep / "1", run]


def test_a_controller_can_start_while_somebody_looks(run: Path) -> None:
    directory = RunDirectory(run)
    (run / ".lock").touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(run / ".lock")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            directory._take_lock()
            assert is_held(run / ".lock")
            directory.release()
    finally:
        stop.set()
        looking.join()
