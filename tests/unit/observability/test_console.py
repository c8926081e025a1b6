"""Tests of a run's output on stdout: lines, the progress bar, the first and the last screen."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from async_flowrl.config import exit_codes
from async_flowrl.observability.console import Bar, Lines, console_of
from async_flowrl.observability.evaluations import Curve, Evaluation
from async_flowrl.observability.result import result_sentences
from async_flowrl.observability.terminal import run_program
from tests.unit.observability.test_events_and_ledger import Clock

METRICS = {"reward/mean": 0.25, "staleness/mean": 1.0, "images": 32, "clip_fraction": 0.5, "pool/rollout/busy": 0.9}


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(100, clock)
    for step in range(100):
        clock.now += 0.5
        lines.log(step, METRICS)
    lines.evaluation(100, {"reward/mean": 0.5, "reward/change": 0.25, "reward/change_high": 0.26})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 1/100 | reward 0.2500 | staleness 1 | 0.50 s/step | ETA 0:00:50"
    assert said[99] == "step 100/100 | reward 0.2500 | staleness 1 | 0.50 s/step | ETA 0:00:00"
    assert said[100:] == ["evaluation of version 100: reward 0.5000 (+0.25 ± 0.01)"]


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


def test_the_bar_shows_progress_reward_staleness_and_the_last_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file, clock = io.StringIO(), Clock()
    bar = Bar(100, clock, Console(file=file, force_terminal=True, width=200))
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
    assert "50/100" in above and "ETA 0:00:25" in above
    assert "reward 0.2500 | staleness 1 | 0.50 s/step | last warning: one two" in below
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l"), "the cursor is visible"


def test_steps_that_are_made_again_are_counted_once() -> None:
    display = Lines(100)
    for step in (*range(10), 6):
        display.log(step, METRICS)
    assert display.done == 7


def evaluation(version: int, scores: list[float], kind: str = "trained", name: str = "reward") -> Evaluation:
    curves = {"reward": Curve("trained", 1.0, "x", {place: (score,) for place, score in enumerate(scores)})}
    if name != "reward":
        curves[name] = Curve(kind, 1.0, "y", {place: (score,) for place, score in enumerate(scores)})
    return Evaluation(version, False, "same", steps=6, guidance=1.0, curves=curves)


def test_the_result_is_a_sentence_with_its_error() -> None:
    before, after_ = evaluation(0, [0.1, 0.2, 0.3, 0.2]), evaluation(60, [0.6, 0.75, 0.8, 0.7])
    (sentence,) = result_sentences([before, after_], "held_out")
    assert sentence.startswith("On 4 held-out prompts, the reward went from 0.2 to 0.713 in 60 steps: +0.512 ± 0.")
    assert "chance" not in sentence
    (noise,) = result_sentences([before, evaluation(60, [0.2, 0.1, 0.35, 0.2])], "training")
    assert "4 training prompts" in noise and "chance" in noise
    (same,) = result_sentences([before, evaluation(60, [0.1, 0.2, 0.3, 0.2])], "training")
    assert same.endswith(": no change.")
    assert result_sentences([before], "held_out") == [] == result_sentences([], "held_out")
    _, term = result_sentences(
        [evaluation(version, [version, 1.0 + version], "held_out", "sharp") for version in (0, 3)], "held_out"
    )
    assert term.startswith("The held-out term sharp went from 0.5 to 3.5: +3")


def test_a_reward_of_several_terms_says_how_each_changed() -> None:
    def ends(*terms: str) -> list[Evaluation]:
        found = [evaluation(version, [version, version]) for version in (0, 3)]
        for each in found:
            for i, name in enumerate(terms, start=1):
                value = (float(each.version + i),)
                each.curves[name] = Curve("trained", 1.0, name, {0: value, 1: value})  # type: ignore[index]
        return found

    _, ocr, contrast = result_sentences(ends("ocr", "contrast"), "held_out")
    assert "ocr went from 1 to 4" in ocr and "contrast went from 2 to 5" in contrast
    assert len(result_sentences(ends("ocr"), "held_out")) == 1


def test_ctrl_c_ends_any_verb_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def verb() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_program(verb)
    assert (ended.value.code, capsys.readouterr().err) == (exit_codes.INTERRUPTED, "async_flowrl: interrupted\n")
