"""Tests of rewards whose server the run starts: the weights are those of the in-process reward; no process is left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.cli.evaluate import main as evaluating
from async_flowrl.config import exit_codes
from async_flowrl.config.schema import Config, RewardTerm, ServeConfig
from async_flowrl.rewards.http import HTTP
from async_flowrl.types import Prompt
from tests.integration.dying_color import COUNT_FILE
from tests.integration.exported import write_config
from tests.integration.left_behind import left_behind, running, wait_for_none
from tests.integration.runs import LIMIT, ROOT, Run, finish, lines, start, train, wait_until
from tests.support.forked import python
from tests.support.tiny import adapted_policy, save_lora

QUICK = ("total_steps=2", "reward.backoff=0.05", "reward.retries=3")
SLOW = """
import pathlib, time
def slow(images, prompt):
    pathlib.Path("scores").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return [1.0] * len(images)
"""


def serving(function: str) -> str:
    """The command of a server that scores by a function."""
    reward = f"'+reward={{terms: {{x: {{name: {function}}}}}}}'"
    return f"async-flowrl serve-rewards --port {{port}} --token-file {{token_file}} ~reward {reward}"


COLOR = serving("color")
DYING = serving("tests.integration.dying_color:dying_color")
STOPPED = serving("tests.integration.dying_color:stopped_color")


def term(command: str, *, timeout: float = 100.0, required: bool = True, **serve: object) -> str:
    """A term with a server, in Hydra's grammar: keys without quotes. The server finds the rewards of these tests."""
    settings = {"command": command, "start_seconds": LIMIT, "environment": {"PYTHONPATH": str(ROOT)}, **serve}
    whole = {"name": "http", "required": required, "options": {"timeout": timeout, "retries": 1}, "serve": settings}
    return re.sub(r'"(\w+)": ', r"\1: ", json.dumps(whole))


def reward(command: str, **how: Any) -> tuple[str, ...]:
    """Overrides for the color reward behind a server of the run."""
    return *QUICK, "~reward.terms.color", f"+reward.terms.color={term(command, **how)}"


def test_ctrl_c_ends_a_server_after_the_request_that_it_scores(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    terms = f"+reward={{terms: {{slow: {{name: '{tmp_path}/slow.py:slow'}}}}}}"
    command = [*python(), "-m", "async_flowrl", "serve-rewards", "~reward", terms, "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    (url,) = re.findall(r"http://\S+", process.stdout.readline())
    with ThreadPoolExecutor(1) as asking:
        scored = asking.submit(
            lambda: asyncio.run(HTTP(url, retries=0)(np.zeros((2, 4, 4, 3), np.uint8), Prompt(0, "a")))
        )
        wait_until(process, (tmp_path / "scores").exists, "the request")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        assert scored.result() == [1.0, 1.0]
    assert (*process.communicate(timeout=LIMIT), process.returncode) == ("", "", 0)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run with the reward in its own workers."""
    return train(tmp_path_factory.mktemp("local"), "one_step_off", *QUICK)


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the number of calls that go wrong."""
    monkeypatch.setenv(COUNT_FILE, str(tmp_path / "turns"))
    return tmp_path / "turns"


def faults(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == "fault" and event["kind"] == kind]


def test_a_served_reward_makes_the_weights_of_the_same_reward_in_the_run(tmp_path: Path, local: Run) -> None:
    run = train(tmp_path, "one_step_off", *reward(COLOR, replicas=2))
    assert run.digest == local.digest
    assert run.column("reward/color/mean") == local.column("reward/color/mean")
    assert (tmp_path / "scores.jsonl").exists() and not (local.root / "scores.jsonl").exists()
    logs = sorted((tmp_path / "logs" / "server").iterdir())
    assert [path.name for path in logs] == ["color-0.log", "color-1.log"]
    assert all("serving x at http://127.0.0.1:" in path.read_text() for path in logs)
    assert not left_behind(tmp_path)


def test_a_server_that_dies_is_started_again(turns: Path, tmp_path: Path, local: Run) -> None:
    turns.write_text("1")
    run = train(tmp_path / "run", "one_step_off", *reward(DYING))
    assert run.digest == local.digest
    (died,) = faults(run, "ServerDied")
    assert died["worker"] == "server/color-0" and "exit code 137" in died["message"]
    assert run.summary["faults"]["ServerDied"] == 1
    assert not left_behind(tmp_path)


def test_a_server_that_does_not_come_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why it does not: tests/unit/rewards/test_reward_server_worker.py."""
    train(tmp_path, "one_step_off", *reward("python -c 'print(6 * 7); exit(3)' {port}"), code=1)
    said = capsys.readouterr().err
    assert "ServerLost: the server of reward.terms.color did not come up: it ended with exit code 3" in said
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_sigterm_ends_the_run_in_order_and_its_server_with_it(tmp_path: Path) -> None:
    """Schedulers send it to every process of a job: the run then needs its server once more to end its step."""
    folder = tmp_path / "run"
    slowly = ("total_steps=500", "disturb.update=0.3", "disturb.constant=true", "runtime.backend=local")
    process = start(folder, "one_step_off", *reward(COLOR), *slowly)
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    for each in running(folder):
        each.send_signal(signal.SIGTERM)
    assert "continue with resume=auto" in finish(process, exit_codes.RESUMABLE)[0]
    wait_for_none(folder)
    assert sorted((folder / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_on_ray(tmp_path: Path, local: Run) -> None:
    """Its own pool, with a resource in place of a GPU; killed with the driver, then a resume, which ends in order."""
    folder = tmp_path / "run"
    served = reward(COLOR, gpus=1)
    process = start(folder, "one_step_off", *served)
    log = folder / "logs" / "server" / "color-0.log"
    wait_until(process, lambda: log.exists() and "serving x" in log.read_text(), "its server was there")
    assert len(left_behind(folder)) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for_none(folder)
    finish(start(folder, "one_step_off", *served, "resume=auto"), 0)
    assert Run(folder).digest == local.digest
    wait_for_none(folder)


@pytest.mark.extended
def test_a_run_goes_on_without_an_optional_reward_whose_server_is_lost(turns: Path, tmp_path: Path, local: Run) -> None:
    """Groups are trained on the other terms' sum, counted and written down, as with any failure of such a term. The
    server of a held-out term is lost as well."""
    turns.write_text("99")
    optional = f"+reward.terms.lost={term(DYING, restarts=0, required=False)}"
    held_out = f"+evaluate.reward.terms.gone={term(DYING, restarts=0)}"
    run = train(tmp_path / "run", "one_step_off", *QUICK, optional, held_out, code=exit_codes.INCOMPLETE)
    assert run.digest == local.digest
    failed = "\n".join(run.summary["failed"])
    assert len(run.summary["failed"]) == 4
    for name in ("lost", "gone"):
        assert f"{name} has no scores from here on: the server server/{name}-0" in failed
    assert "the term lost, which is not required" in failed and "serve.restarts=0" in failed
    assert "held-out gone has no score for 2 of 2 prompts" in failed
    assert run.summary["faults"]["ServerLost"] == 2
    assert len(faults(run, "ServerDied")) == 2, "nobody asks for a server that is gone"
    assert sum(run.column("reward/lost/failures")) == len([e for e in run.events if e["event"] == "unscored"]) > 2
    assert not left_behind(tmp_path)


@pytest.mark.extended
def test_a_server_that_hangs_is_started_again(turns: Path, tmp_path: Path, local: Run) -> None:
    turns.write_text("1")
    run = train(tmp_path / "run", "one_step_off", *reward(STOPPED, timeout=5.0, hung_seconds=1.5))
    assert run.digest == local.digest
    died, *_ = (event["message"] for event in faults(run, "ServerDied"))  # A busy machine may have more of them.
    assert re.match("it hung: .*/health did not answer 200 for", died) and "logs/server/color-0.log" in died
    assert not left_behind(tmp_path)


@pytest.mark.extended
def test_a_served_reward_is_evaluated_by_its_server(
    turns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that has ended, with the color reward in its own process (`color`) and behind a server (`served`), which
    dies once on the way."""
    turns.write_text("1")
    temporary = tmp_path / "temporary"  # for what servers write
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    config = Config()
    config.model.dtype = "float32"
    config.reward.backoff = 0.1
    config.reward.terms = {"color": RewardTerm()}
    environment = {"PYTHONPATH": str(ROOT)}
    server = ServeConfig(command=DYING, environment=environment, start_seconds=LIMIT, replicas=2)
    config.evaluate.reward.terms = {"served": RewardTerm(name="http", serve=server)}
    config.evaluate.images_per_prompt = 2
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red red red red\nblue blue blue blue\n")
    config.data.train = str(prompts)
    write_config(tmp_path, config)
    save_lora(tmp_path / "lora", adapted_policy(config=config.lora).transformer, alpha=config.lora.alpha)
    assert evaluating([str(tmp_path), "--out", str(tmp_path / "out")]) == exit_codes.OK
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["rewards"]
    assert found["served"]["scores"] == found["color"]["scores"] and found["served"]["kind"] == "held_out"
    assert turns.read_text() == "0"
    assert not left_behind(temporary) and not list(temporary.glob("async-flowrl*"))
