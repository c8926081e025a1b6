"""Tests of the live panel on a real pseudo-terminal: its screen, and the terminal after the program's end."""

import re
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.support.terminal import ROOT, Terminal

PROGRAM = str(ROOT / "tests/support/panel_program.py")
STEPS = ["30", "0.1"]
RULE = "── signs · one_step_off ─"


def step(terminal: Terminal, least: int) -> bool:
    """Whether the panel shows that many steps or more."""
    found = re.findall(r"^step +(\d+)/", terminal.text, re.MULTILINE)
    return bool(found) and int(found[-1]) >= least


def test_a_panel_below_whatever_else_is_said() -> None:
    terminal = Terminal([PROGRAM, *STEPS])
    terminal.until(lambda t: "version 6" in t.text and step(t, 16), "a panel with an evaluation")
    seen = terminal.lines
    assert sum(RULE in line for line in seen) == 1, "the panel is there once"
    rows = seen[next(n for n, line in enumerate(seen) if RULE in line) :]
    expected = [
        "── signs",
        "step",
        "reward",
        "held-out",
        "",
        "staleness",
        "rollout",
        "trainer",
        "rewards",
        "speed",
        "warning",
    ]
    assert [row[:10].strip().split(" ·")[0] for row in rows[:11]] == expected
    assert "● generating 1/2, waiting for weights 1/2   busy 98%" in rows[6]
    assert "MFU 42.0%" in rows[7]
    assert terminal.end() == 0
    assert terminal.was_sane
    text = " ".join(terminal.text.split())
    for said in ("a warning of very very", "many words", "a library warns, too", "and Python itself", "a print from"):
        assert text.index(said) < text.index("── signs"), f"{said!r} belongs above the panel"
    assert sum(RULE in line for line in [*terminal.above, *terminal.lines]) == 1, "nothing of older panels is left"
    assert terminal.lines[-1] == "LoRA     runs/signs/lora"
    assert "30/30" in terminal.text and "ETA 0:00" in terminal.text


def test_a_small_terminal() -> None:
    terminal = Terminal([PROGRAM, *STEPS], 40, 12)
    terminal.until(lambda t: step(t, 16) and "rollout" in t.text, "a panel, drawn to its end")
    seen = terminal.lines
    top = next(n for n, line in enumerate(seen) if line.startswith("── signs"))
    assert len(seen[top:]) <= 10 and seen[top + 1].startswith("step ")
    assert [row[:10].strip() for row in seen[top + 1 : top + 7]] == [
        "step",
        "reward",
        "held-out",
        "",
        "staleness",
        "rollout",
    ]
    assert terminal.end() == 0
    assert sum("── signs" in line for line in [*terminal.above, *terminal.lines]) == 1


@pytest.mark.parametrize("no_color", [False, True])
def test_colours(no_color: bool) -> None:
    terminal = Terminal([PROGRAM, "8", "0.1"], environment={"NO_COLOR": "1"} if no_color else {})
    assert terminal.end() == 0
    colours = set().union(*(terminal.colours(line) for line in range(24)))
    assert (colours == {"default"}) is no_color


def test_a_dumb_terminal_gets_plain_lines() -> None:
    terminal = Terminal([PROGRAM, "8", "0.05"], environment={"TERM": "dumb"})
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw
    assert [line.split(" |")[0] for line in terminal.lines if line.startswith("step")] == [
        f"step {n}/8" for n in range(1, 9)
    ]


def test_a_terminal_without_unicode() -> None:
    terminal = Terminal([PROGRAM, *STEPS], environment={"PYTHONIOENCODING": "ascii"})
    assert terminal.end() == 0
    assert terminal.raw.isascii()
    assert "-- signs - one_step_off --" in terminal.text and "* generating" in terminal.text


def test_the_panel_follows_the_size_of_the_terminal() -> None:
    terminal = Terminal([PROGRAM, "60", "0.1"])
    terminal.until(lambda t: step(t, 10), "a panel")
    terminal.resize(50, 24)
    terminal.until(lambda t: step(t, 25), "a narrower panel")
    assert max(len(line) for line in terminal.lines) <= 50
    terminal.resize(100, 8)
    terminal.until(lambda t: step(t, 40), "a wider and lower panel")
    assert any(len(line) == 100 and line.startswith("── signs") for line in terminal.lines)
    assert len(terminal.lines) <= 8
    assert terminal.end() == 0 and terminal.was_sane


def test_stderr_that_goes_elsewhere_stays_there(tmp_path: Path) -> None:
    log = tmp_path / "err"
    terminal = Terminal(["-c", f"{sys.executable} {PROGRAM} 16 0.1 2>{log}"], program="/bin/sh")
    assert terminal.end() == 0
    assert "a library warns, too" in log.read_text()
    assert "and Python itself" not in terminal.text
    assert "warning    " in terminal.text, "the panel shows the newest ones all the same"


@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C while it starts", "crash", "kill -9", "SIGTERM"])
def test_however_it_ends_the_terminal_is_as_it_was(how: str) -> None:
    words = {"crash": ["crash"], "Ctrl-C while it starts": ["start"]}.get(how, [])
    terminal = Terminal([PROGRAM, "300" if not words else "30", "0.1", *words])
    wanted = "loading the models" if "start" in words else "/30"
    terminal.until(lambda t: wanted in t.text and ("start" in words or "crash" in words or step(t, 5)), "a panel")
    if how.startswith("Ctrl-C"):
        terminal.child.sendintr()
    elif how != "crash":
        terminal.child.kill(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    codes = {"crash": 1, "kill -9": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM}
    assert terminal.end() == codes.get(how, 130)
    assert terminal.was_sane
    if how.startswith("Ctrl-C"):
        assert terminal.lines[-1] == "async_flowrl: interrupted"
    if how == "crash":
        assert terminal.lines[-1] == "RuntimeError: out of luck"


def test_drawing_takes_a_hundredth_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of one drawing by the time between two."""
    import io

    from async_flowrl.observability import panel
    from async_flowrl.observability.ledger import PoolLedger
    from async_flowrl.observability.panel_rows import Now
    from async_flowrl.observability.progress import Progress
    from tests.support.panel_program import evaluation, events, metrics

    monkeypatch.setattr(panel, "REFRESH_SECONDS", 3600.0)
    progress = Progress(1000)
    console = panel.LockedConsole(file=io.StringIO(), force_terminal=True, width=120, height=40)
    shown = panel.Panel(progress, Now("signs", held_out=True, bound=1), console)
    pools = PoolLedger(time.monotonic)
    for pool, workers in (("rollout", 64), ("trainer", 64), ("reward", 16)):
        for index in range(workers):
            pools.enter(f"{pool}-{index}", "busy")
    shown.watch(pools, events(pools), 1e12)
    shown.evaluation(6, evaluation())
    costs = []
    for number in range(60):
        shown.log(number, metrics(number))
        began = time.thread_time()
        shown._refresh()
        costs.append(time.thread_time() - began)
    shown.close()
    assert "60/1000" in console.file.getvalue()  # type: ignore[attr-defined]
    assert statistics.median(costs) < 0.01 * 0.5


def test_a_panel_that_cannot_be_drawn_is_switched_off_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no run, also when it is closed in the end, and gives stdout back."""
    import io

    from async_flowrl.config.sections.monitor import MonitorConfig
    from async_flowrl.observability import panel
    from async_flowrl.observability.monitor import Monitor
    from async_flowrl.observability.panel_rows import Now
    from async_flowrl.observability.progress import Progress

    def broken(*_: object) -> list[object]:
        raise ZeroDivisionError("no width")

    monkeypatch.setattr(panel, "rows", broken)
    before = sys.stdout
    shown = panel.Panel(Progress(2), Now("signs"), panel.LockedConsole(file=io.StringIO(), force_terminal=True))
    monitor = Monitor(MonitorConfig(), tmp_path, name="run", settings={}, display=shown)
    shown._timer.join(60)
    monitor.log(0, {"reward/mean": 1.0})
    monitor.log(1, {"reward/mean": 1.0})
    monitor.close()
    shown.close()
    assert monitor.failures == ["monitor panel: ZeroDivisionError: no width"]
    assert sys.stdout is before


def test_a_step_waits_while_the_panel_goes_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the timer's thread is reading would change below it, which raises and would end the run as incomplete."""
    import io
    import threading

    from async_flowrl.observability import panel
    from async_flowrl.observability.panel_rows import Now
    from async_flowrl.observability.progress import Progress

    progress = Progress(2)
    found: list[int] = []
    others: list[threading.Thread] = []

    def slow(*_: object) -> list[object]:
        if not others:
            others.append(threading.Thread(target=lambda: shown.log(0, {"reward/mean": 1.0})))
            others[0].start()
            others[0].join(0.3)
            found.append(progress.done)
        return []

    drawing = threading.Event()
    monkeypatch.setattr(panel, "rows", lambda *arguments: drawing.wait() and slow(*arguments))
    shown = panel.Panel(progress, Now("signs"), panel.LockedConsole(file=io.StringIO(), force_terminal=True))
    drawing.set()
    shown.close()
    others[0].join()
    assert found == [0] and progress.done == 1


def test_a_last_panel_that_cannot_be_drawn_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has its results by then."""
    import io

    from async_flowrl.observability import panel
    from async_flowrl.observability.panel_rows import Now
    from async_flowrl.observability.progress import Progress

    def broken(progress: Progress, now: Now, *_: object) -> list[object]:
        if now.ended:
            raise ValueError("I/O operation on closed file")
        return []

    monkeypatch.setattr(panel, "rows", broken)
    before = sys.stdout
    panel.Panel(Progress(2), Now("signs"), panel.LockedConsole(file=io.StringIO(), force_terminal=True)).close()
    assert "could not be drawn a last time: ValueError: I/O" in caplog.text
    assert sys.stdout is before


def test_no_panel_is_drawn_between_the_composition_and_the_writing_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the text would be written with the height of the panel before, whose rows would stay above it."""
    import io
    import threading

    import pyte
    from rich.text import Text

    from async_flowrl.observability import panel
    from async_flowrl.observability.panel_rows import Now
    from async_flowrl.observability.progress import Progress

    height = [2]
    monkeypatch.setattr(panel, "rows", lambda *_: [Text(f"panel row {n}") for n in range(height[0])])
    monkeypatch.setattr(panel, "REFRESH_SECONDS", 3600.0)
    file = io.StringIO()
    console = panel.LockedConsole(file=file, force_terminal=True, width=80, height=24)
    shown = panel.Panel(Progress(2), Now("signs"), console)

    def grow(renderables: list[object]) -> list[object]:
        if threading.current_thread() is threading.main_thread():
            height[0] = 5
            others.append(threading.Thread(target=shown._refresh))
            others[0].start()
            others[0].join(0.3)
        return renderables

    others: list[threading.Thread] = []
    hook = type("Hook", (), {"process_renderables": staticmethod(grow)})()
    console.push_render_hook(hook)
    console.print("a text")
    console.pop_render_hook()
    others[0].join(60)
    shown.close()
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    assert [line for line in lines if line] == ["a text", *(f"panel row {n}" for n in range(5))]
