"""Tests of the modules that a command imports before it answers; each of those listed costs it a second or more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_flowrl.config.sections.model import TinyConfig
from async_flowrl.policies.tiny.build import build_tiny
from tests.integration.runs import LIMIT, ROOT

HEAVY = ("torch", "diffusers", "transformers", "peft", "ray", "scipy", "matplotlib", "wandb", "tensorboard", "rapidocr")
ANSWERS = """
import contextlib, importlib, io, json, sys
for name, (module, arguments) in json.loads(sys.argv[1]).items():
    before, sys.argv = set(sys.modules), ["command", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = importlib.import_module(f"async_flowrl.{module}").main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([name, [code, said.getvalue(), sorted(set(sys.modules) - before)]]))
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
ANSWERED = {name for name in NO_COMPUTING if "help" in name} | {"no verb", "version"}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str, list[str]]]:
    """(exit code, what was said, modules that it was the first to load) of each case, all asked in one process."""
    command = [sys.executable, "-c", ANSWERS, json.dumps(NO_COMPUTING)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return {name: tuple(answer) for name, answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", NO_COMPUTING)
def test_an_answer_that_needs_no_tensor_loads_no_torch(
    case: str, answers: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, said, modules = answers[case]
    assert code == (0 if case in ANSWERED else 2), said
    assert "Traceback" not in said
    assert not {name.partition(".")[0] for name in modules} & set(HEAVY)


DRIVER = """
import sys
import async_flowrl.run.job, separation.ray_session
from async_flowrl.config.compose import compose_config
from async_flowrl.main import choose_layout
from async_flowrl.run.prepare import prepare
choose_layout(prepare(compose_config(overrides=sys.argv[1:])).at_largest, {})
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


TRAINER = """
import sys
from async_flowrl.config.compose import compose_config
from async_flowrl.run.prepare import prepare
from async_flowrl.training.worker import TrainerWorker
prepared = prepare(compose_config(overrides=sys.argv[1:]))
TrainerWorker(prepared.config, prepared.model, 0, "trainer-0").load()
print(*sys.modules)
"""


def test_a_trainer_rank_loads_the_network_and_neither_the_pipeline_nor_its_text_encoder(tmp_path: Path) -> None:
    build_tiny(TinyConfig())  # The process must find the model: to build it needs all of its parts.
    given = ["model.path=tiny", f"output_dir={tmp_path / 'run'}"]
    trainer = subprocess.run(
        [sys.executable, "-c", TRAINER, *given], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert trainer.returncode == 0, trainer.stderr
    names = set(trainer.stdout.split())
    assert "diffusers.models.transformers.transformer_qwenimage" in names
    assert "diffusers.pipelines.qwenimage.pipeline_qwenimage" not in names
    assert "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl" not in names
    assert not names & {"scipy.stats._stats_py", "scipy.optimize._optimize", "scipy.integrate._quadpack_py"}


AHEAD = "import sys; from async_flowrl.run import ahead; print(*sys.modules)"


def test_what_starts_the_cluster_beside_the_imports_imports_none_of_it() -> None:
    ahead = subprocess.run(
        [sys.executable, "-c", AHEAD], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert not {name.partition(".")[0] for name in ahead.stdout.split()} & set(HEAVY)
