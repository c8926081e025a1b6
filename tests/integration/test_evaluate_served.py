"""Test of `evaluate` with a reward that has a server: started for it, scores as in the run, and ended afterwards."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from async_flowrl.cli.evaluate import main as evaluating
from async_flowrl.config import exit_codes
from async_flowrl.config.schema import Config, RewardTerm, ServeConfig
from tests.integration.dying_color import COUNT_FILE
from tests.integration.left_behind import left_behind
from tests.integration.runs import LIMIT, ROOT
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
