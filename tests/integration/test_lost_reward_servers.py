"""Tests of reward servers that are lost for good or hang: the run ends by name or goes on without their term."""

import json
import re
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from tests.integration.dying_color import COUNT_FILE
from tests.integration.left_behind import left_behind
from tests.integration.runs import LIMIT, Run, train

ROOT = Path(__file__).parents[2]
QUICK = ("total_steps=2", "reward.backoff=0.05", "reward.retries=3")


def term(function: str, *, timeout: float = 100.0, required: bool = True, **serve: object) -> str:
    """A term with a server that scores by a function of these tests, in Hydra's grammar: keys without quotes."""
    reward = f"'+reward={{terms: {{x: {{name: tests.integration.{function}}}}}}}'"
    command = f"async-flowrl serve-rewards --port {{port}} --token-file {{token_file}} ~reward {reward}"
    settings = {"command": command, "start_seconds": LIMIT, "environment": {"PYTHONPATH": str(ROOT)}, **serve}
    whole = {"name": "http", "required": required, "options": {"timeout": timeout, "retries": 1}, "serve": settings}
    return re.sub(r'"(\w+)": ', r"\1: ", json.dumps(whole))


def faults(run: Run, kind: str) -> list[str]:
    """Messages of the faults of a kind."""
    return [event["message"] for event in run.events if event["event"] == "fault" and event["kind"] == kind]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run with the reward in its own workers."""
    return train(tmp_path_factory.mktemp("plain"), "one_step_off", *QUICK)


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the number of calls that go wrong."""
    monkeypatch.setenv(COUNT_FILE, str(tmp_path / "turns"))
    return tmp_path / "turns"


@pytest.mark.slow
def test_a_run_goes_on_without_a_held_out_reward_whose_server_is_lost(turns: Path, tmp_path: Path, plain: Run) -> None:
    turns.write_text("99")
    held_out = f"+evaluate.reward.terms.lost={term('dying_color:dying_color', restarts=0)}"
    run = train(tmp_path / "run", "one_step_off", *QUICK, "evaluate.every=1", held_out, code=exit_codes.INCOMPLETE)
    assert run.digest == plain.digest
    lost, *evaluations = run.summary["failed"]
    assert lost.startswith("lost has no scores from here on: the server server/lost-0") and "serve.restarts=0" in lost
    assert len(evaluations) == 2 and all("held-out lost has no score for 2 of 2 prompts" in e for e in evaluations)
    assert run.summary["faults"]["ServerLost"] == 1
    assert len(faults(run, "ServerDied")) == 1, "nobody asks for a server that is gone"
    assert not left_behind(tmp_path)


def test_a_run_goes_on_without_an_optional_reward_whose_server_is_lost(turns: Path, tmp_path: Path, plain: Run) -> None:
    """Groups are trained on the other terms' sum, counted and written down, as with any failure of such a term."""
    turns.write_text("99")
    optional = f"+reward.terms.lost={term('dying_color:dying_color', restarts=0, required=False)}"
    run = train(tmp_path / "run", "one_step_off", *QUICK, optional, code=exit_codes.INCOMPLETE)
    assert run.digest == plain.digest
    lost, evaluation = run.summary["failed"]
    assert "lost has no scores from here on" in lost and "the term lost, which is not required" in evaluation
    assert sum(run.column("reward/lost/failures")) == len([e for e in run.events if e["event"] == "unscored"]) > 2


def test_a_server_that_hangs_is_started_again(turns: Path, tmp_path: Path, plain: Run) -> None:
    turns.write_text("1")
    served = f"+reward.terms.color={term('hanging_color:stopped_color', timeout=5.0, hung_seconds=1.5)}"
    run = train(tmp_path / "run", "one_step_off", *QUICK, "~reward.terms.color", served)
    assert run.digest == plain.digest
    (died,) = faults(run, "ServerDied")
    assert re.match("it hung: .*/health did not answer 200 for", died) and "logs/server/color-0.log" in died
    assert not left_behind(tmp_path)
