"""Tests of the modules that commands, workers and whole runs import; each of those listed costs a second or more."""

import json
import subprocess
import sys

import pytest

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny import build_tiny
from tests.integration.runs import LIMIT, LOCAL, ROOT

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
    "no verb": ("__main__", []),
    "version": ("__main__", ["--version"]),
    "unknown verb": ("__main__", ["nonsense"]),
    "help of the export": ("cli.export", ["--help"]),
    "arguments of the export": ("cli.export", ["only_one"]),
    "help of the planner": ("cli.plan", ["--help"]),
    "arguments of the planner": ("cli.plan", ["--devices", "many"]),
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


COMPUTING = """
import json, sys
from async_flowrl.config.compose import compose_config
from async_flowrl.run.job import run
from async_flowrl.run.prepare import prepare
from async_flowrl.training.trainer_worker import TrainerWorker
config = compose_config("one_step_off", sys.argv[1:])
prepared = prepare(config)
TrainerWorker(prepared.config, prepared.model, 0, "trainer-0").load()
print("loaded", json.dumps(sorted(sys.modules)))
code = run(config)
print("trained", json.dumps(sorted(sys.modules)))
sys.exit(code)
"""
TOOLS = (
    "cli",
    "main",
    "doctor",
    "plan",
    "benchmark",
    "verify",
    "prove",
    "check_model",
    "evaluate",
    "export",
    "generate",
    "report",
)


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules of one process once it has loaded a trainer rank, and once a run of threads has ended there."""
    folder = tmp_path_factory.mktemp("computing") / "run"
    build_tiny(TinyConfig(layers=1))  # The process must find the model: to build it needs all of its parts.
    given = (*LOCAL, "total_steps=2", f"output_dir={folder}")
    command = [sys.executable, "-c", COMPUTING, *given]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    said = [line.partition(" ") for line in ran.stdout.splitlines()]
    return {when: set(json.loads(names)) for when, _, names in said if when in ("loaded", "trained")}


def test_a_trainer_rank_loads_the_network_and_neither_the_pipeline_nor_its_text_encoder(
    computing: dict[str, set[str]],
) -> None:
    names = computing["loaded"]
    assert "diffusers.models.transformers.transformer_qwenimage" in names
    assert "diffusers.pipelines.qwenimage.pipeline_qwenimage" not in names
    assert "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl" not in names


def test_a_run_of_threads_imports_no_tool_no_test_no_ray_and_no_tracker(computing: dict[str, set[str]]) -> None:
    names = computing["trained"]
    assert {"async_flowrl.run.loop", "diffusers.pipelines.qwenimage.pipeline_qwenimage"} <= names
    packages = {name.partition(".")[0] for name in names}
    assert "torch" in packages
    assert not packages & {"tests", "ray", "wandb", "tensorboard", "matplotlib", "rapidocr", "pandas", "datasets"}
    own = [name.split(".") for name in names if name.startswith("async_flowrl.")]
    assert not {parts[1] for parts in own} & set(TOOLS)
