"""Tests of the comparison of the nodes' memory with the plan, at the start of a run as a user starts it."""

from pathlib import Path

import pytest

from async_flowrl import main as program
from async_flowrl.config.compose import compose_config
from tests.integration.runs import LOCAL


def test_a_node_that_is_too_small_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("separation.node.total_memory", lambda: 1_000)
    monkeypatch.setattr("separation.node.swap_space", lambda: 0)
    monkeypatch.setattr("async_flowrl.run.job.load_pools", None)
    config = compose_config("one_step_off", [*LOCAL, "tune=full", f"output_dir={tmp_path / 'run'}"])
    assert program.train(config, dict) == 2
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("async_flowrl: "))
    for words in ("node 127.0.0.1 has 9.31e-07 GiB", "trainer rank", "rollout worker", "allow_oom=true tries anyway"):
        assert words in said
