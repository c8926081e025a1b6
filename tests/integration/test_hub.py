"""Test of a run on Ray with a model of the hub: the four workers of one node fetch every file once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import resolve_model
from tests.integration.runs import LIMIT, ROOT, TINY, Run
from tests.support.hub import serving


@pytest.mark.slow
def test_workers_of_one_node_fetch_every_file_once(tmp_path: Path) -> None:
    folder, out = tmp_path / "repository", tmp_path / "run"
    shutil.copytree(resolve_model(ModelConfig()).path, folder)
    pools = ["rollout.num_workers=2", "trainer.num_workers=2", "trainer.micro_batch_size=2"]
    model = ["model.path=stand/in", "experiment=two_prompts"]  # nothing says that a hub model is a tiny one
    command = [*TINY, *pools, "total_steps=1", *model, f"output_dir={out}"]
    with serving({"stand/in": folder}) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "async_flowrl.main", *command],
            cwd=ROOT,
            env={**os.environ, **hub.environment(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stderr
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert hub.fetched() == dict.fromkeys(files, 1)
    assert Run(out).summary["steps"] == 1
    log = (out / "logs" / "controller.log").read_text()
    assert "files of stand/in: fetched by rollout-0" in log, "the other three find them in the cache"
