"""Tests of a run's output on stdout: lines, the progress bar, the first and the last screen."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.observability.console import (
    Bar,
    Display,
    Lines,
    Progress,
    console_of,
    open_display,
)
from async_flowrl.observability.evaluations import Curve, Evaluation
from async_flowrl.observability.result import result_sentences
from async_flowrl.observability.terminal import named_lines, run_program, show_what_can_be_shown

METRICS = {
    "reward/mean": 0.25,
    "staleness/mean": 1.0,
    "images": 32,
    "clip_fraction": 0.5,
    "pool/rollout/busy": 0.9,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(Progress(100, clock))
    for step in range(100):
        clock.now += 0.5
        lines.log(step, METRICS)
    lines.evaluation(100, {"reward/mean": 0.5, "reward/change": 0.25, "reward/change_high": 0.26})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 1/100 | reward 0.2500 | staleness 1 | 0.50 s/step | ETA 0:50"
    assert said[99] == "step 100/100 | reward 0.2500 | staleness 1 | 0.50 s/step | ETA 0:00"
    assert said[100:] == ["evaluation of version 100: reward 0.5000 (+0.25 ± 0.01)"]


def test_a_resumed_run_counts_on_from_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(Progress(100, Clock())).log(40, {})
    assert capsys.readouterr().out.startswith("step 41/100 | reward - | staleness - |")


def test_lines_name_what_was_trained_without(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Progress(10, Clock()))
    lines.log(0, {"tickets_skipped": 2, "reward/judge/missing": 1})
    lines.log(1, {"tickets_skipped": 1, "reward/judge/missing": 3})
    assert "| 3 tickets skipped | 4 groups without judge |" in capsys.readouterr().out.splitlines()[1]


def test_steps_that_are_made_again_count_once_among_what_is_missing() -> None:
    """A trainer rank has died after step 2, and the run goes on from the checkpoint before step 1."""
    progress = Progress(total=5)
    for step in (0, 1, 2, 1):
        progress.step(step, {"tickets_skipped": 2, "reward/judge/missing": 1})
    assert " | 4 tickets skipped | 2 groups without judge | " in progress.numbers


@pytest.mark.parametrize(
    ("terminal", "term", "wanted", "found"),
    [
        (True, "xterm", "auto", "bar"),
        (True, "dumb", "auto", "lines"),
        (True, "", "auto", "lines"),
        (False, "xterm", "auto", "lines"),
        (True, "xterm", "lines", "lines"),
        (True, "xterm", "quiet", "quiet"),
    ],
)
def test_the_console_suits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, wanted: str, found: str
) -> None:
    monkeypatch.setattr(sys, "stdout", Tty() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    assert console_of(wanted) == found


def test_a_bar_is_refused_where_it_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(ConfigError, match=r"console=bar needs a terminal .* stdout is none: use auto or lines"):
        console_of("bar")
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(ConfigError, match="TERM=dumb cannot move its cursor"):
        console_of("bar")


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display(compose_config("sync", ["console=quiet", "output_dir=unused"]))
    assert type(display) is Display
    display.log(0, METRICS)
    display.evaluation(1, {"reward/mean": 1.0})
    display.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the C locale has the second
def test_what_stdout_cannot_encode_is_replaced(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors=errors))
    show_what_can_be_shown()
    sys.stdout.write("0.5 ± 0.1\n")
    sys.stdout.flush()
    assert written.getvalue() == b"0.5 ? 0.1\n"


def test_the_bar_shows_progress_reward_staleness_and_the_last_warning() -> None:
    file, clock = io.StringIO(), Clock()
    bar = Bar(Progress(100, clock), Console(file=file, force_terminal=True, width=200))
    bar.begin()
    clock.now += 0.5
    bar.log(49, METRICS)
    bar.evaluation(50, {"reward/mean": 0.5})
    logging.getLogger("a.library").warning("one\ntwo")
    bar.close()
    bar.close()
    logging.getLogger("a.library").warning("after the end")
    said = file.getvalue()
    assert "evaluation of version 50: reward 0.5000" in said and "after the end" not in said
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", said)
    above, below = plain.strip().splitlines()[-2:]
    assert "50/100" in above and "ETA 0:25" in above
    assert "reward 0.2500 | staleness 1 | 0.50 s/step | last warning: one two" in below
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l"), "the cursor is visible"


def test_what_is_logged_appears_above_the_bar_and_the_handlers_are_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, terminal = io.StringIO(), Tty()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        bar = Bar(Progress(2), Console(file=file, force_terminal=True, width=80))
        logging.getLogger("a.library").warning("a warning in full")
        bar.close()
        assert handler.stream is terminal and terminal.getvalue() == ""
        assert "a warning in full\n" in file.getvalue()
    finally:
        logging.getLogger().removeHandler(handler)


def test_steps_that_are_made_again_are_counted_once() -> None:
    progress = Progress(100)
    for step in (*range(10), 6):
        progress.step(step, METRICS)
    assert progress.done == 7


def evaluation(version: int, scores: list[float], kind: str = "trained", name: str = "reward") -> Evaluation:
    curves = {"reward": Curve("trained", 1.0, "x", {place: (score,) for place, score in enumerate(scores)})}
    if name != "reward":
        curves[name] = Curve(kind, 1.0, "y", {place: (score,) for place, score in enumerate(scores)})
    return Evaluation(version, False, "same", steps=6, guidance=1.0, curves=curves)


def test_the_result_is_a_sentence_with_its_error() -> None:
    before, after_ = evaluation(0, [0.1, 0.2, 0.3, 0.2]), evaluation(60, [0.6, 0.75, 0.8, 0.7])
    (sentence,) = result_sentences([before, after_], "held_out")
    assert sentence.startswith("On 4 held-out prompts, the reward went from 0.2 to 0.713 in 60 steps: +0.512 ± 0.")
    assert not sentence.endswith("no more than noise.")
    (noise,) = result_sentences([before, evaluation(60, [0.2, 0.1, 0.35, 0.2])], "training")
    assert "4 training prompts" in noise and noise.endswith("no more than noise.")
    (same,) = result_sentences([before, evaluation(60, [0.1, 0.2, 0.3, 0.2])], "training")
    assert same.endswith(": no change.")
    assert result_sentences([before], "held_out") == [] == result_sentences([], "held_out")
    _, term = result_sentences(
        [evaluation(version, [version, 1.0 + version], "held_out", "sharp") for version in (0, 3)], "held_out"
    )
    assert term.startswith("The held-out term sharp went from 0.5 to 3.5: +3")


def test_lines_wrap_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_ = [("files", "one two three four five six seven eight nine ten")]
    monkeypatch.setenv("COLUMNS", "31")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert named_lines(rows_, 8) == "files    one two three four five six seven eight nine ten\n"
    monkeypatch.setattr(sys, "stdout", Tty())
    wrapped = ["files    one two three four", "         five six seven eight", "         nine ten"]
    assert named_lines(rows_, 8).splitlines() == wrapped


def test_a_run_directory_of_another_version_is_read_and_what_is_unknown_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from async_flowrl.config.compose import read_config

    file = tmp_path / "config.yaml"
    sections = "".join(f"{name}: {{}}\n" for name in ("model", "rollout", "trainer", "reward", "data", "runtime"))
    file.write_text(f"{sections}seed: 7\nmonitor: {{progress: false, tensorboard: true}}\nold: 1\n")
    with caplog.at_level(logging.WARNING):
        config = read_config(file)
    assert (config.seed, config.monitor.tensorboard) == (7, True)
    assert "does not know: monitor.progress, old" in caplog.text
    file.write_text("one: 1\ntwo: 2\n")
    with pytest.raises(ValueError, match="is not the configuration of a run"):
        read_config(file)
    for damaged in ("", sections[: len(sections) // 2]):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"config\.yaml is (damaged|not)"):
            read_config(file)


def test_ctrl_c_ends_any_verb_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def verb() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_program(verb)
    assert (ended.value.code, capsys.readouterr().err) == (exit_codes.INTERRUPTED, "async_flowrl: interrupted\n")
