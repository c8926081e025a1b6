"""Test of `evaluate` with a reward that has a server: started for it, scores as in the run, and ended afterwards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from async_flowrl.cli import evaluate as serving
from async_flowrl.cli.before_after import scored
from async_flowrl.cli.evaluate import main as evaluating
from async_flowrl.config import exit_codes
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm, ServeConfig
from async_flowrl.controller.context import NoServers
from async_flowrl.rewards.registry import build_reward
from async_flowrl.types import ByteArray, Prompt
from tests.integration.dying_color import COUNT_FILE
from tests.integration.left_behind import left_behind, wait_for_none
from tests.integration.runs import LIMIT, ROOT, wait_until
from tests.support.tiny import adapted_policy, save_lora

SERVE = "async-flowrl serve-rewards --port {port} --token-file {token_file}"
DYING = "~reward '+reward={terms: {x: {name: tests.integration.dying_color:dying_color}}}'"


def run_directory(folder: Path, command: str, **serve: object) -> Path:
    """A run that has ended, with the color reward in its own process (`color`) and behind a server (`served`)."""
    config = Config()
    config.model.dtype = "float32"
    config.reward.backoff = 0.1
    config.reward.terms = {"color": RewardTerm()}
    server = ServeConfig(command=command, environment={"PYTHONPATH": str(ROOT)}, start_seconds=LIMIT, **serve)  # type: ignore[arg-type]
    config.evaluate.reward.terms = {"served": RewardTerm(name="http", serve=server)}
    config.evaluate.images_per_prompt = 2
    prompts = folder / "prompts.txt"
    prompts.write_text("red red red red\nblue blue blue blue\n")
    config.data.train = str(prompts)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    save_lora(folder / "lora", adapted_policy(config=config.lora).transformer, alpha=config.lora.alpha)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what servers write is kept."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_served_reward_is_evaluated_by_its_server(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which dies once on the way."""
    monkeypatch.setenv(COUNT_FILE, str(tmp_path / "deaths"))
    (tmp_path / "deaths").write_text("1")
    run = run_directory(tmp_path, f"{SERVE} {DYING}", replicas=2)
    assert evaluating([str(run), "--out", str(tmp_path / "out")]) == exit_codes.OK
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["rewards"]
    assert found["served"]["scores"] == found["color"]["scores"] and found["served"]["kind"] == "held_out"
    assert (tmp_path / "deaths").read_text() == "0"
    assert not left_behind(temporary) and not list(temporary.glob("async-flowrl*"))


@pytest.mark.slow
def test_a_server_that_is_lost_ends_the_evaluation_by_name(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(COUNT_FILE, str(tmp_path / "deaths"))
    (tmp_path / "deaths").write_text("9")
    run = run_directory(tmp_path, f"{SERVE} {DYING}", restarts=0)
    assert evaluating([str(run)]) == exit_codes.ERROR
    assert "the server server/served-0 of reward.terms.served died 1 times" in caplog.text
    assert not left_behind(temporary)
    assert list(temporary.rglob("served-0.log")), "what it said is kept"


@pytest.mark.slow
def test_nothing_is_left_when_the_evaluation_is_killed(tmp_path: Path, temporary: Path) -> None:
    run = run_directory(tmp_path, f"{SERVE} reward=color")
    command = [sys.executable, "-m", "async_flowrl", "evaluate", str(run), "--images", "500", "--seeds", "9"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_until(process, lambda: len(left_behind(temporary)) >= 2, "its server was there")  # a keeper, a server
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for_none(temporary)


def test_servers_get_the_gpus_that_the_images_do_not_take() -> None:
    free = ["1", "2", "3"]
    terms = {"a": 2.0, "b": 0.5, "c": 0.0}
    served = {name: RewardTerm(serve=ServeConfig(command="x {port}", gpus=gpus)) for name, gpus in terms.items()}
    found = [serving._single(name, term, free).serve for name, term in served.items()]
    assert [each and each.environment for each in found] == [
        {"CUDA_VISIBLE_DEVICES": "1,2"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {},
    ]
    with pytest.raises(ValueError, match=r"the server of b wants 0\.5 GPUs beside the one .* images, and 0 are left"):
        serving._single("b", served["b"], free)


@pytest.mark.parametrize(
    ("shown", "found"), [(None, ["0", "1"]), ("5, 6,7", ["5", "6"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_gpus_are_called_as_this_process_was_shown_them(
    shown: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert serving._visible(2) == found


class Lost(NoServers):
    """The server of `served` is gone for good."""

    def lost(self) -> dict[str, str]:
        return {"served": "it died too often"}


def test_a_term_whose_server_is_lost_is_not_asked() -> None:
    asked: list[Prompt] = []

    def ask(images: ByteArray, prompt: Prompt) -> list[float]:
        asked.append(prompt)
        return [0.5] * len(images)

    config = RewardConfig(terms={"color": RewardTerm(), "served": RewardTerm(name="color", required=False)})
    reward = build_reward(config)
    reward = replace(reward, terms=(reward.terms[0], replace(reward.terms[1], reward=ask)))
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    with ThreadPoolExecutor(1) as executor:
        found = asyncio.run(scored(reward, config, Lost(), executor, Prompt(0, "red"), images))
    assert not asked and set(found.by_term) == {"color"}
    assert found.failed["served"].reason == "it died too often"
