"""Tests of the comparison of rollout engines: its table, its refusals, and one whole run of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engines import Found, cpu_seconds, differences, main, memory, table


def written(path: Path, shift: float) -> Path:
    latents = np.linspace(0, 1, 8, dtype=np.float32) + np.float32(shift)
    np.savez(path, images=np.zeros((1, 2, 2, 3), np.uint8), latents=latents, log_probs=latents[:2] * 2)
    return path


def test_differences_are_those_of_the_files(tmp_path: Path) -> None:
    one, same, other = (written(tmp_path / f"{name}.npz", shift) for name, shift in [("a", 0), ("b", 0), ("c", 0.5)])
    assert differences(same, one) == ["0.0e+00", "0.0e+00", "same"]
    assert differences(other, one) == ["5.0e-01", "1.0e+00", "differ"]


def test_the_table_says_rates_and_memory(tmp_path: Path) -> None:
    written(tmp_path / "diffusers-one-by-one.npz", 0)
    written(tmp_path / "diffusers-batches-of-2.npz", 0.5)
    rows = [
        Found("sd3", "diffusers", way, 8, wall, 4.0, 2.5, 2**30, 0)
        for way, wall in (("one by one", 2.0), ("batches of 2", 1.0))
    ]
    _, _, alone, together = table(rows, tmp_path).splitlines()
    assert alone == "| sd3 | diffusers | one by one | 4 | 0.5000 | 2.5 | 1.00 | 0.00 | 0.0e+00 | 0.0e+00 | same |"
    assert together.startswith("| sd3 | diffusers | batches of 2 | 8 | 0.5000 |") and together.endswith("differ |")


def test_cpu_and_memory_of_an_engines_own_processes_are_counted() -> None:
    """As those of vllm-omni, whose ranks are processes."""
    busy = "import time; held = b'x' * 2**28\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(60)"
    cpu, (host, _) = cpu_seconds(), memory()
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert cpu_seconds() - cpu > 0.4
        assert memory()[0] - host > 2**28
        child.kill()


def test_more_tickets_than_a_step_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "diffusers", "--tickets", "99"]) == 2
    assert "--tickets must be at most" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", "diffusers", "--rounds", "1", "--out", str(tmp_path)]
    assert main([*arguments, "ticket_size=4", "rollout.tickets_per_batch=2", "rollout.num_inference_steps=4"]) == 0
    _, _, alone, together = capfd.readouterr().out.splitlines()
    assert "one by one" in alone and alone.endswith("same |") and "batches of 2" in together
