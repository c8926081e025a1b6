"""Tests of whole runs with the real vllm-omni on a CPU: staleness, delivery, reproducibility."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

pytestmark = pytest.mark.serial("clusters")

STEPS = 4
GLOO = ("checkpoint_engine.transport=gloo",)


def train(output: Path, *overrides: str) -> dict[str, Any]:
    """Runs the command of the README; the run's summary. Its own checks of the run's files must hold as well."""
    command = [
        *(sys.executable, "-m", "benchmarks.disturbed", "--config-name", "one_step_off"),
        *("rollout.engine=vllm_omni", f"total_steps={STEPS}", f"output_dir={output}", "monitor.report=false"),
        *("evaluate.max_prompts=1", "evaluate.images_per_prompt=2", *overrides),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    proof = subprocess.run(
        [sys.executable, "-m", "async_flowrl", "verify", str(output)], capture_output=True, text=True
    )
    assert proof.returncode == 0, proof.stdout + proof.stderr
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def events(output: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.mark.timeout(900)
def test_one_step_off_is_never_staler_than_one_step_and_the_same_twice(tmp_path: Path) -> None:
    """The second time with two engines, over gloo, the tickets in whatever order random delays give them."""
    plain, shaken = tmp_path / "plain", tmp_path / "shaken"
    first = train(plain, "ticket_size=8")
    metrics = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness/max"] for line in metrics] == [0, 1, 1, 1]
    assert [line["policy_version"] for line in metrics] == [0, 1, 2, 3]
    assert all(abs(line["behaviour_gap"]) < 1e-6 for line in metrics), "the trainer finds other log-probs"
    made = {(e["step"], e["version"]) for e in events(plain, "ticket") if e["kind"] == "train" and "version" in e}
    assert made == {(0, 0), (1, 0), (2, 1), (3, 2)}
    second = train(shaken, "ticket_size=8", "rollout.num_workers=2", "disturb.generate=0.5", *GLOO)
    assert first["weights_digest"] == second["weights_digest"]
    assert {e["worker"] for e in events(shaken, "ticket") if e.get("worker")} >= {"rollout-0", "rollout-1"}
