"""Tests of whole runs with the real vllm-omni on a CPU: staleness, delivery, reproducibility."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

from async_flowrl.cli.verify import verify
from tests.integration.runs import Run

pytestmark = pytest.mark.serial("clusters")

STEPS = 4
GLOO = ("checkpoint_engine.transport=gloo",)


def train(output: Path, *overrides: str) -> Run:
    """Runs the command of the README. Its own checks of the run's files must hold as well."""
    command = [
        *(sys.executable, "-m", "benchmarks.disturbed", "--config-name", "one_step_off"),
        *("rollout.engine=vllm_omni", f"total_steps={STEPS}", f"output_dir={output}", "monitor.report=false"),
        *("evaluate.max_prompts=1", "evaluate.images_per_prompt=2", *overrides),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row for row in verify(output) if not row[1]] == []
    return Run(output)


@pytest.mark.timeout(900)
def test_one_step_off_is_never_staler_than_one_step_and_the_same_twice(tmp_path: Path) -> None:
    """The second time with two engines, over gloo, the tickets in whatever order random delays give them."""
    plain = train(tmp_path / "plain", "ticket_size=8")
    assert plain.column("staleness/max") == [0, 1, 1, 1]
    assert plain.column("policy_version") == [0, 1, 2, 3]
    assert all(abs(gap) < 1e-6 for gap in plain.column("behaviour_gap")), "the trainer finds other log-probs"
    made = {(e["step"], e["version"]) for e in plain.tickets("RUNNING")}
    assert made == {(0, 0), (1, 0), (2, 1), (3, 2)}
    shaken = train(tmp_path / "shaken", "ticket_size=8", "rollout.num_workers=2", "disturb.generate=0.5", *GLOO)
    assert plain.digest == shaken.digest
    assert {e["worker"] for e in shaken.tickets("SCORING")} == {"rollout-0", "rollout-1"}
