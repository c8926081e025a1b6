"""What a command loads before it answers: each module named here costs every start of it a second or more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import LIMIT, LOCAL, ROOT

HEAVY = ("torch", "diffusers", "transformers", "peft", "ray", "scipy", "matplotlib", "wandb", "tensorboard", "rapidocr")
LOADED = """
import atexit, sys
atexit.register(lambda: print("LOADED", *sys.modules, file=sys.stderr))
from {module} import main
sys.argv = ["command", *sys.argv[1:]]
sys.exit(main())
"""
NO_COMPUTING = {
    "no verb": ("cli.verbs", []),
    "version": ("cli.verbs", ["--version"]),
    "unknown verb": ("cli.verbs", ["nonsense"]),
    "help of the export": ("export.__main__", ["--help"]),
    "arguments of the export": ("export.__main__", ["only_one"]),
    "help of check-model": ("check_model.__main__", ["--help"]),
    "help of the planner": ("plan.__main__", ["--help"]),
    "arguments of the planner": ("plan.__main__", ["--devices", "many"]),
    "unknown key": ("main", ["total_stepz=3"]),
    "unknown group": ("main", ["reward=ocrr"]),
    "wrong type": ("main", ["seed=abc"]),
    "unknown mode": ("main", ["mode=one_step"]),
    "out of bounds": ("main", ["total_steps=0"]),
    "unknown reward": ("main", ["reward.terms.color.name=ocrr"]),
    "missing prompts": ("main", ["data.train=/nowhere/prompts.txt"]),
    "missing model": ("main", ["model.path=/nowhere/model"]),
    "used directory": ("main", [f"output_dir={ROOT}"]),
}
"""What can be answered without a tensor."""


def loaded(module: str, arguments: list[str]) -> tuple[set[str], "subprocess.CompletedProcess[str]"]:
    """The top-level modules of the process at its end."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=f"async_flowrl.{module}"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    last = [line for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    assert last, done.stderr
    return {name.partition(".")[0] for name in last[-1].split()[1:]}, done


@pytest.mark.parametrize("case", NO_COMPUTING)
def test_an_answer_that_needs_no_tensor_loads_no_torch(case: str) -> None:
    modules, done = loaded(*NO_COMPUTING[case])
    assert "Traceback" not in done.stderr
    assert not modules & set(HEAVY)


def test_a_run_in_one_process_loads_neither_ray_nor_trackers(tmp_path: Path) -> None:
    modules, done = loaded("main", [*LOCAL, "total_steps=1", f"output_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    assert "torch" in modules
    assert not modules & {"ray", "wandb", "tensorboard", "matplotlib", "rapidocr", "pandas", "datasets"}


DRIVER = """
import sys
import async_flowrl.run.job, async_flowrl.main, separation.ray_session
from async_flowrl.config.compose import compose_config
from async_flowrl.run.prepare import prepare
prepare(compose_config(overrides=sys.argv[1:]))
print(*sys.modules)
"""


def test_the_driver_of_workers_that_are_processes_loads_no_model_code(tmp_path: Path) -> None:
    """The workers do; and a reward worker of a reward that is plain arithmetic does not even load torch."""
    given = ["model.path=tiny", f"output_dir={tmp_path / 'run'}"]
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, *given], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert driver.returncode == 0, driver.stderr
    names = {name.partition(".")[0] for name in driver.stdout.split()}
    assert "ray" in names and not names & {"diffusers", "transformers", "peft", "accelerate", "sympy"}
    build = "import sys; from async_flowrl.rewards import worker, color; print(*sys.modules)"
    reward = subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert not {name.partition(".")[0] for name in reward.stdout.split()} & set(HEAVY)
